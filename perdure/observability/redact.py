"""Takes secrets out of text. The one layer that logs, error messages and summaries share.

    protect(value)      a secret this process holds: its exact text never appears again
    redact(text)        the text without keys, tokens, signatures, URL userinfo and query strings
    redact_value(value) the same for what a log line's extras hold

Known secrets are removed by their exact text; patterns catch those of others. It is a safety net: code must
not log prompts or bodies in the first place, since no pattern knows a prompt.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

HIDDEN: Final = "[redacted]"
MAX_TEXT: Final = 8_192  # characters of one string in a log line
_OVERLAP: Final = 4_096  # read beyond the cut, so that a secret on it is seen whole
_MIN_SECRET: Final = 6  # shorter values would blank ordinary words
_SHORT: Final = 64  # characters
_OUR_ID: Final = re.compile(r"(?:task_|msg_)?[0-9a-f]{32}\Z")  # of a task, a callback, a request: no secret
_MAX_DEPTH: Final = 6
_MAX_ITEMS: Final = 100

# Key names whose values are secret, in dicts, in `name=value` and in `"name": "value"`.
_NAMES: Final = (
    r"authorization|proxy-authorization|cookie|set-cookie|x-api-key|api[_-]?key|apikey|access[_-]?token|"
    r"refresh[_-]?token|stream[_-]?token|token|client[_-]?secret|secret|secret[_-]?key|callback[_-]?secret|"
    r"payload[_-]?key|private[_-]?key|password|passwd|pwd|signature|webhook-signature|x-callback-signature"
)
_SECRET_NAME: Final = re.compile(rf"(?:\A|[^a-z0-9])(?:{_NAMES})\Z", re.IGNORECASE)

_URL: Final = re.compile(r"\b([a-z][a-z0-9+.-]{1,20}://)([^\s\"'<>\\^`{|}]+)", re.IGNORECASE)
_PATTERNS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"\b(bearer|basic)[ \t]+(?!\[redacted)[^\s\"',;]+", re.IGNORECASE), rf"\1 {HIDDEN}"),
    (re.compile(r"\bwhsec_[A-Za-z0-9+/=_-]+"), HIDDEN),
    (re.compile(r"\b[sp]k[_-][A-Za-z0-9._~+/=-]{6,}"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?"), HIDDEN),
    (re.compile(r"\bv1a?,[A-Za-z0-9+/=_-]{16,}"), HIDDEN),
    (
        re.compile(
            rf"(?<![a-z0-9])(?P<name>(?:[a-z0-9]{{1,32}}[_-]){{0,4}}(?:{_NAMES}))"
            r"(?P<sep>[\"']?[ \t]*[:=][ \t]*)"
            r"(?!(?:bearer|basic)\b)(?!\[redacted)(?:b?\"[^\"\n]*\"|b?'[^'\n]*'|[^\s\"',;&)\]}]+)",
            re.IGNORECASE,
        ),
        rf"\g<name>\g<sep>{HIDDEN}",
    ),
    # What libraries put into their messages: pydantic's inputs, SQLAlchemy's parameters, Postgres' rows.
    # Each runs on to the end of the text where its close is missing: linear, and on the safe side.
    (
        re.compile(r"input_value=.*?(?=, input_type=|\Z)", re.DOTALL),
        f"input_value={HIDDEN}",
    ),
    (re.compile(r"\[parameters: .*?(?:\](?=\n|\Z)|\Z)", re.DOTALL), f"[parameters: {HIDDEN}]"),
    (re.compile(r"(Failing row contains )\(.*?(?:\)(?=\.|\n|\Z)|\Z)", re.DOTALL), rf"\1({HIDDEN})"),
    (re.compile(r"(Key \([^)\n]{1,200}\)=)\([^\n]*?(?:\)(?= |\.|$)|$)", re.MULTILINE), rf"\1({HIDDEN})"),
)

_known: set[str] = set()  # process-wide, as logging is
_known_pattern: re.Pattern[str] | None = None


def protect(*values: str | None) -> None:
    """Names secrets that this process holds; `redact` removes their exact text. Values under 6 characters
    are left out: they would blank ordinary words."""
    global _known_pattern
    fresh = {value for value in values if value and len(value) >= _MIN_SECRET} - _known
    if fresh:
        _known.update(fresh)
        _known_pattern = re.compile("|".join(map(re.escape, sorted(_known, key=len, reverse=True))))
        _redact_short.cache_clear()


def redact(text: str) -> str:
    """The text without secrets. Redacting twice changes nothing more."""
    if _OUR_ID.match(text) and text not in _known:
        return text
    return _redact_short(text) if len(text) <= _SHORT else _redact(text)


@lru_cache(maxsize=4_096)
def _redact_short(text: str) -> str:
    """Names, routes and states stand in line after line: they are judged once."""
    return _redact(text)


def _redact(text: str) -> str:
    if _known_pattern is not None:
        text = _known_pattern.sub(HIDDEN, text)
    if "://" in text:
        text = _URL.sub(lambda found: found[1] + _plain_authority(found[2]), text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_url(url: str) -> str:
    """A URL without userinfo, query and fragment: fit for a log line."""
    return redact(url.split("?", 1)[0].split("#", 1)[0])


def _plain_authority(rest: str) -> str:
    """What follows `scheme://`, without userinfo, query and fragment."""
    cut = re.search(r"[?#]", rest)
    rest = rest[: cut.start()] if cut else rest
    authority, slash, path = rest.partition("/")
    return authority.rpartition("@")[2] + slash + path


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret (`api_key` does, `output_tokens` does not)."""
    return _SECRET_NAME.search(name) is not None


def redact_value(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it, without secrets: strings redacted and cut to 8,192 characters, values of
    secret-named keys hidden, containers bounded, other objects as their redacted text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # JSON has no NaN and no infinity
    if isinstance(value, str):
        clean = redact(value[: MAX_TEXT + _OVERLAP])
        return clean if len(value) <= MAX_TEXT else clean[:MAX_TEXT] + "…"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"  # never content: a body may be anything
    if depth >= _MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {
            redact(str(key)[:200]): HIDDEN
            if is_secret_name(str(key)) and item
            else redact_value(item, depth + 1)
            for key, item in items
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [redact_value(item, depth + 1) for item in list(value)[:_MAX_ITEMS]]
    try:
        return redact_value(str(value), depth + 1)
    except Exception:  # an object whose text fails must not lose the log line
        return f"<{type(value).__name__}>"
