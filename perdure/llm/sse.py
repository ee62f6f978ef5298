"""Server-sent events from bytes: bytes -> lines -> events, byte by byte if need be.

    reader = SseReader()
    for event in reader.feed(data): ...      every split of the bytes gives the same events
    for event in reader.end(): ...           what stood at the end without a blank line

A line ends with CR, LF or CRLF and with nothing else. A BOM before the first line is dropped; comments, `id`,
`retry` and unknown fields are ignored. Two things that the standard drops are kept, because servers report
failures with them: a line `error: ...` counts as data of an event named `error`, and lines that start a JSON
or HTML document (`{`, `[`, `<`) become an event with `bare` set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAX_EVENT_BYTES: Final = 1024 * 1024
_EOL: Final = re.compile(rb"[\r\n]")
_CR: Final = 0x0D
_LF: Final = 0x0A
_BOM: Final = b"\xef\xbb\xbf"
_DOCUMENT: Final = (b"{", b"[", b"<")


class EventTooLargeError(Exception):
    """One line or one event is larger than the limit."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `data` lines are joined by LF. `cut`: the stream ended before its blank line."""

    data: bytes
    name: str = ""
    bare: bool = False
    cut: bool = False


class SseReader:
    """Incremental reader of one stream. `feed` and `end` raise EventTooLargeError after the good events."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line = bytearray()
        self._after_cr = False
        self._first = True
        self._clear()

    def _clear(self) -> None:
        self._data: list[bytes] = []
        self._bare: list[bytes] = []
        self._size = 0
        self._name = ""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Events that these bytes complete. Exhaust the iterator before the next call."""
        for line in self._lines(data):
            yield from self._take(line)

    def end(self) -> Iterator[Event]:
        """The unterminated last event, marked `cut`. Its reader decides whether it is whole."""
        line, self._line = bytes(self._line), bytearray()
        if line:
            yield from self._take(line)
        yield from self._dispatch(cut=True)

    def _lines(self, data: bytes) -> Iterator[bytes]:
        at = 0
        if self._after_cr and data:
            self._after_cr = False
            at = 1 if data[0] == _LF else 0
        while found := _EOL.search(data, at):
            self._line += data[at : found.start()]
            at = found.end()
            if data[found.start()] == _CR:
                if at == len(data):
                    self._after_cr = True
                elif data[at] == _LF:
                    at += 1
            self._check_line()
            line, self._line = bytes(self._line), bytearray()
            yield line
        self._line += data[at:]
        self._check_line()

    def _check_line(self) -> None:
        if len(self._line) > self._max:
            raise EventTooLargeError

    def _take(self, line: bytes) -> Iterator[Event]:
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        if not line:
            yield from self._dispatch()
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._keep(self._data, value.removeprefix(b" "))
        elif name == b"error" and value:
            self._name = "error"
            self._keep(self._data, value.removeprefix(b" "))
        elif name == b"event":
            self._name = value.removeprefix(b" ").decode(errors="replace")
        elif line.startswith(_DOCUMENT) or (self._bare and name):
            self._keep(self._bare, line)

    def _keep(self, lines: list[bytes], line: bytes) -> None:
        self._size += len(line) + 1
        if self._size > self._max:
            raise EventTooLargeError
        lines.append(line)

    def _dispatch(self, cut: bool = False) -> Iterator[Event]:
        data, bare, name = self._data, self._bare, self._name
        self._clear()
        if bare:
            yield Event(b"\n".join(bare), bare=True, cut=cut)
        if data or name == "error":
            yield Event(b"\n".join(data), name=name, cut=cut)
