"""A small HTTP/1.1 client on raw asyncio streams, so that the load generator is not what is measured.

    api = Api("127.0.0.1", 8000, connections=32)
    status, body = await api.call("POST", "/v1/tasks", {...})
    await api.aclose()

Loopback only. Connections are kept and used by one request at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

_CALL_SECONDS = 90.0  # `Prefer: wait=60` and some


class UnexpectedAnswer(Exception):  # noqa: N818 - says what came
    """The API answered something else than the bench needs; the message holds it."""


@dataclass
class Load:
    """What many clients saw: seconds of each call, and answers that were no success, by status."""

    seconds: list[float] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    elapsed: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.elapsed if self.elapsed else 0.0


class Api:
    """At most `connections` at once; more callers wait for one to be free."""

    def __init__(self, url: str, connections: int = 8) -> None:
        parts = urlsplit(url)
        assert parts.hostname == "127.0.0.1", "the bench talks to this machine only"
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._room = asyncio.Semaphore(connections)

    async def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """One request: status and parsed JSON. Raises OSError, TimeoutError."""
        async with self._room:
            reader, writer = self._kept() or await self._open()
            try:
                async with asyncio.timeout(_CALL_SECONDS):
                    writer.write(self._request(method, path, body, headers or {}))
                    status, raw = await _answer(reader)
            except BaseException:
                writer.close()
                raise
            self._idle.append((reader, writer))
        return status, orjson.loads(raw) if raw else None

    async def expect(self, status: int, method: str, path: str, body: Any = None) -> Any:
        """The parsed answer of a call that must have this status. Raises UnexpectedAnswer."""
        got, answer = await self.call(method, path, body)
        if got != status:
            raise UnexpectedAnswer(f"{method} {path}: {got} {answer}")
        return answer

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A kept connection that the server has not closed meanwhile."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, limit=2**22)

    def _request(self, method: str, path: str, body: Any, headers: dict[str, str]) -> bytes:
        data = b"" if body is None else orjson.dumps(body)
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + data

    async def aclose(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = int(head[9:12]), 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return status, await reader.readexactly(length) if length else b""


async def closed_loop(clients: int, count: int, once: Callable[[int], Awaitable[int]]) -> Load:
    """`clients` callers make `count` calls in all, each the next as soon as its last is over.

    `once(n)` makes call n and returns its HTTP status; below 300 its time counts.
    """
    load, numbers = Load(), iter(range(count))

    async def client() -> None:
        for number in numbers:
            began = time.perf_counter()
            status = await once(number)
            took = time.perf_counter() - began
            if status < 300:
                load.seconds.append(took)
            else:
                load.refused[status] = load.refused.get(status, 0) + 1

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.elapsed = time.perf_counter() - began
    return load
