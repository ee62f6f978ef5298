"""A scripted callback receiver on a real socket: byte exact, with chosen timing, and it records what came.

    async with Receiver([answer(503), answer(200)]) as receiver:
        ... receiver.url("/hook") ...
        await receiver.received(2)
        receiver.requests[0].body

A script is a list of replies, one per request (the last one repeats), or a function of the request. A reply
is a list of steps: bytes are written, a number is a pause in seconds, an asyncio.Event is waited for, HANG
keeps the socket open until the receiver stops, RESET breaks the connection. After the last step the socket is
closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import TracebackType
from typing import Final, Literal, Self

from perdure.callback.addresses import Address

HANG: Final = "hang"
RESET: Final = "reset"
Step = bytes | float | asyncio.Event | Literal["hang", "reset"]
Reply = Sequence[Step]


@dataclass(frozen=True)
class Request:
    """One request as it came. `headers` keeps order and case; `at` is monotonic seconds."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    at: float = field(default_factory=monotonic)

    def __getitem__(self, name: str) -> str:
        """The header's value, whatever the case of its name. Raises KeyError."""
        for key, value in self.headers:
            if key.lower() == name.lower():
                return value
        raise KeyError(name)

    @property
    def header_map(self) -> dict[str, str]:
        return dict(self.headers)


def answer(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> Reply:
    """A whole answer in one write."""
    return [head(status, headers, length=len(body)) + body]


def head(status: int, headers: dict[str, str] | None = None, *, length: int | None = None) -> bytes:
    """Status line and headers, up to the empty line."""
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def drip(data: bytes, pause: float) -> Reply:
    """One byte at a time."""
    return [step for byte in data for step in (bytes([byte]), pause)]


class Names:
    """A resolver that answers from a list, another entry at each look-up (the last one stays)."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> list[Address]:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.append(host)
        return [ipaddress.ip_address(one) for one in found]


class Receiver:
    """Listens on a free port of 127.0.0.1 from `start` to `stop`; the port survives both."""

    def __init__(
        self,
        script: Sequence[Reply] | Callable[[Request], Reply] = ([b"HTTP/1.1 204 Done\r\n\r\n"],),
        *,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.connections = 0
        self.answered = 0  # replies played to their end
        self.host = host
        self.port = 0
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def url(self, path: str = "/hook", host: str | None = None) -> str:
        """Its address; `host` where a name stands for it."""
        return f"{'https' if self._tls else 'http'}://{host or self.host}:{self.port}{path}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self.host, self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuses connections from now on and ends those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def received(self, count: int, timeout: float = 20) -> list[Request]:
        """Waits until `count` requests came; returns all so far."""
        async with asyncio.timeout(timeout):
            while len(self.requests) < count:
                self._changed.clear()
                await self._changed.wait()
        return list(self.requests)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                request = await _read(reader)
                self.requests.append(request)
                self._changed.set()
                await self._play(self._reply(request, len(self.requests)), writer)
                self.answered += 1
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)

    def _reply(self, request: Request, number: int) -> Reply:
        if callable(self.script):
            return self.script(request)
        return self.script[min(number, len(self.script)) - 1]

    async def _play(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        for step in reply:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif step == HANG:
                await asyncio.Event().wait()
            elif step == RESET:
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                await asyncio.sleep(float(step))


async def _read(reader: asyncio.StreamReader) -> Request:
    """Reads one request with a Content-Length, as the sender always has."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = [
        (name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)
    ]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Request(method, target, headers, await reader.readexactly(length))
