"""A model server's own words inside our messages: no secret, nothing of the prompt, one bounded line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from perdure.observability.redact import redact
from perdure.task.text import one_line

QUOTE_LIMIT: Final = 300  # characters
_READ: Final = 2000  # characters that are looked at
_WINDOW: Final = 16  # a stretch this long that also stands in the prompt is the prompt
_SHORTEST: Final = 8  # texts below that are ordinary words


def quoted(message: str, hide: Sequence[str] = ()) -> str:
    """A server's own words, fit for an error message: no secret, nothing of the prompt, one bounded line."""
    return one_line(redact(_without(message[:_READ], hide)), QUOTE_LIMIT)


def _without(message: str, hide: Sequence[str]) -> str:
    """The message with every stretch that also stands in one of the texts blanked out."""
    hit = bytearray(len(message))
    for text in hide:
        size = min(_WINDOW, len(text))
        if size < _SHORTEST:
            continue
        for at in range(0, len(message) - size + 1, 1 if size < _WINDOW else _WINDOW // 2):
            if message[at : at + size] in text:
                hit[at : at + size] = b"\x01" * size
    parts, at = [], 0
    while at < len(message):
        end = at
        while end < len(message) and hit[end] == hit[at]:
            end += 1
        parts.append("[prompt]" if hit[at] else message[at:end])
        at = end
    return "".join(parts)


def texts_of(params: Mapping[str, object]) -> list[str]:
    """The caller's own texts in a request: what `quoted` must not repeat."""
    found: list[str] = []
    todo: list[object] = [params.get("messages"), params.get("prompt")]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, Mapping):
            todo.extend(item for key, item in value.items() if key not in ("role", "type"))
        elif isinstance(value, list | tuple):
            todo.extend(value)
    return found
