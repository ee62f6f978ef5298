"""Frames of `text/event-stream`, encoded so that nothing in them can forge another.

JSON escapes CR, LF and NUL. U+0085, U+2028 and U+2029 are escaped too: they end no line of the format, but
many readers' line splitters believe so.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

PING: Final = b": ping\n\n"
_ESCAPES: Final = {
    b"\xc2\x85": b"\\u0085",
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
}
_LINE_ENDS: Final = re.compile(b"|".join(_ESCAPES))
_TOKEN: Final = re.compile(r"[A-Za-z0-9._-]+\Z")


def encode_data(value: Any) -> bytes:
    """One line of JSON in UTF-8 without anything that a reader may take for a line's end."""
    return _LINE_ENDS.sub(lambda found: _ESCAPES[found[0]], orjson.dumps(value))


def frame(event: str, event_id: str, data: bytes) -> bytes:
    """One event. `data` comes from `encode_data`; names and ids are ours and plain.

    Raises ValueError for a name or id that is not letters, digits and . _ -
    """
    if not _TOKEN.match(event) or not _TOKEN.match(event_id):
        raise ValueError("an event's name and id are letters, digits and . _ -")
    return b"event: %b\nid: %b\ndata: %b\n\n" % (event.encode(), event_id.encode(), data)


def retry(milliseconds: int) -> bytes:
    """Tells the reader how long to wait before it connects again."""
    return b"retry: %d\n\n" % milliseconds
