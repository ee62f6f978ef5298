"""Events out of the bytes of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from perdure.client.errors import ClientError

FINAL_STATES: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
_MAX_EVENT: Final = 8 * 1024 * 1024

Task = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `id` resumes after it."""

    id: str
    name: str
    data: Task

    @property
    def final(self) -> bool:
        return self.data.get("status") in FINAL_STATES


class Frames:
    """Reads `text/event-stream` from bytes: any split of them gives the same events. Events whose data is no
    JSON object are passed over. `retry` is the server's wish in seconds."""

    def __init__(self) -> None:
        self.retry = 0.0
        self._buffer = b""
        self._id = ""
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Events that these bytes complete. Raises ClientError for one beyond all measure."""
        self._buffer += chunk
        while True:
            line, rest = self._line()
            if line is None:
                break
            self._buffer = rest
            if line:
                self._field(line)
            elif event := self._event():
                yield event
        if len(self._buffer) + self._size > _MAX_EVENT:
            raise ClientError("an event is larger than this client reads")

    def _line(self) -> tuple[bytes | None, bytes]:
        ends = [at for at in (self._buffer.find(b"\n"), self._buffer.find(b"\r")) if at >= 0]
        if not ends:
            return None, self._buffer
        at = min(ends)
        if self._buffer[at] == 0x0D and at + 1 == len(self._buffer):
            return None, self._buffer  # LF may follow
        width = 2 if self._buffer[at : at + 2] == b"\r\n" else 1
        return self._buffer[:at], self._buffer[at + width :]

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
        elif name == b"event":
            self._name = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")
        elif name == b"retry" and value.isdigit() and len(value) < 10:
            self.retry = int(value) / 1000

    def _event(self) -> Event | None:
        name, data = self._name or "message", b"\n".join(self._data)
        self._name, self._data, self._size = "", [], 0
        if not data:
            return None
        try:
            value = json.loads(data)
        except ValueError:
            return None
        return Event(self._id, name, value) if isinstance(value, dict) else None
