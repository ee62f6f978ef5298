"""Text from outside, made storable and printable."""

from __future__ import annotations

import re
from typing import Final

_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def clean(text: str) -> str:
    """Text that Postgres, JSON and UTF-8 can hold.

    Split surrogate pairs are joined; lone surrogates and U+0000 become U+FFFD.
    """
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    if _SURROGATES.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_json(value: object) -> object:
    """`clean` for every string of a JSON value, keys included; non-finite floats become None."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(key)): clean_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_json(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def one_line(text: str, limit: int = 500) -> str:
    """A message for an error field or a log: one line, no control characters, at most `limit` characters."""
    flat = _CONTROLS.sub(" ", clean(text)).strip()
    return flat if len(flat) <= limit else flat[: limit - 1] + "\u2026"


def reason_text(reason: object, limit: int = 500) -> str | None:
    """A cancel's reason from whatever a signal brought: text, `{"reason": text}`, or nothing."""
    if isinstance(reason, dict):
        reason = reason.get("reason")
    return one_line(reason, limit) or None if isinstance(reason, str) else None
