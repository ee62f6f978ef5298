"""Frames of `text/event-stream`, encoded so that nothing in them can forge another.

JSON escapes CR, LF and NUL inside strings. U+0085, U+2028 and U+2029 are escaped too: they end no line of the
format, but many readers' line splitters believe so.
"""

from __future__ import annotations

import re
from typing import Final

PING: Final = b": ping\n\n"
_ESCAPES: Final = {
    b"\r": b" ",  # between tokens; inside a string JSON has no such byte
    b"\n": b" ",
    b"\xc2\x85": b"\\u0085",
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
}
_LINE_ENDS: Final = re.compile(b"|".join(_ESCAPES))
_TOKEN: Final = re.compile(r"[A-Za-z0-9._-]+\Z")


def one_line(json: bytes) -> bytes:
    """JSON in UTF-8 without anything that a reader may take for a line's end; its value is the same."""
    return _LINE_ENDS.sub(lambda found: _ESCAPES[found[0]], json)


def frame(event: str, event_id: str, json: bytes) -> bytes:
    """One event whose data is JSON. Raises ValueError when name or id are not letters, digits and . _ -"""
    if not _TOKEN.match(event) or not _TOKEN.match(event_id):
        raise ValueError("an event's name and id are letters, digits and . _ -")
    return b"event: %b\nid: %b\ndata: %b\n\n" % (event.encode(), event_id.encode(), one_line(json))


def retry(milliseconds: int) -> bytes:
    """Tells the reader how long to wait before it connects again."""
    return b"retry: %d\n\n" % milliseconds
