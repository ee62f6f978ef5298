"""A scripted OpenAI-compatible server on a real socket: exact bytes, chosen timing, a record of what it saw.

    async with ModelServer() as server:
        server.script(stream(chunk("Hello"), chunk(" world"), finish(), usage(5, 2), DONE))
        ... call server.base_url ...
        call = server.calls[0]; call.body; call.written; await call.closed_by_client(2)

A reply is a list of steps: bytes are written as they are, a number is a pause in seconds, an `asyncio.Event`
is waited for, a callable is called (and awaited) with the call, `CLOSE` ends the connection in order, `RESET`
breaks it. After the last step the connection is closed. `stream(...)` and `reply(...)` write the status line
and headers; without them the steps are the whole answer. Replies are used in order, the last one again and
again; a reply may be a function from the call to its steps.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CLOSE = object()
RESET = object()
Steps = list[Any]
Reply = Steps | Callable[["Call"], Steps]


def event(data: str, *, end: str = "\n\n") -> bytes:
    """One event with these data."""
    return f"data: {data}{end}".encode()


def chunk(content: str | None = None, **delta: Any) -> bytes:
    """A chunk with `content` and other fields of the delta (`reasoning_content`, `tool_calls`, ...)."""
    if content is not None:
        delta["content"] = content
    return event(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))


def finish(reason: str = "stop") -> bytes:
    """The chunk that proves the end."""
    return event(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}))


def usage(prompt: int, completion: int) -> bytes:
    """The usage chunk that follows with `include_usage`."""
    return event(
        json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})
    )


DONE = event("[DONE]")


def words(text: str) -> list[bytes]:
    """A chunk per word, spaces kept in front."""
    parts = text.split(" ")
    return [chunk(part if number == 0 else " " + part) for number, part in enumerate(parts)]


def reply(
    status: int, body: bytes | str = b"", content_type: str | None = "application/json", **headers: str
) -> Steps:
    """A whole answer with a length. Header names are written with `_` for `-`."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} Scripted", f"Content-Length: {len(data)}"]
    if content_type:
        lines.append(f"Content-Type: {content_type}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", data]


def stream(*steps: Any, content_type: str | None = "text/event-stream", **headers: str) -> Steps:
    """A streamed answer: headers, then the steps, without a length; the close ends it."""
    lines = ["HTTP/1.1 200 OK", "Connection: close"]
    if content_type:
        lines.append(f"Content-Type: {content_type}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", *steps]


@dataclass(eq=False)
class Call:
    """One request, and what became of its connection. Times are monotonic seconds."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    at: float = field(default_factory=time.monotonic)
    written: int = 0  # bytes of the answer
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the client closed its side
    gone_at: float | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        value = json.loads(self.raw)
        assert isinstance(value, dict)
        return value

    async def closed_by_client(self, seconds: float) -> float:
        """Waits until the client has closed the connection; when it did (monotonic)."""
        await asyncio.wait_for(self.gone.wait(), seconds)
        assert self.gone_at is not None
        return self.gone_at


class ModelServer:
    """The server. `calls` holds every request in the order of arrival."""

    def __init__(self, port: int = 0) -> None:
        self.calls: list[Call] = []
        self.open = 0  # connections that are answered now
        self.most_open = 0
        self._replies: list[Reply] = [reply(500, '{"error": {"message": "nothing is scripted"}}')]
        self._wanted = port
        self._server: asyncio.Server | None = None
        self._arrival = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def script(self, *replies: Reply) -> None:
        """Sets the answers from now on."""
        self._replies = list(replies)

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def call(self, number: int, seconds: float = 10) -> Call:
        """The call with this number (from 0), once it has arrived."""
        async with asyncio.timeout(seconds):
            while len(self.calls) <= number:
                self._arrival.clear()
                await self._arrival.wait()
        return self.calls[number]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._wanted, limit=2**20)
        self._wanted = self.port

    async def stop(self) -> None:
        """Stops listening and breaks every connection, as a killed server does. It can be started again."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> ModelServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            call = await _request(reader)
            self.calls.append(call)
            self._arrival.set()
            following = asyncio.create_task(_follow(reader, call))
            try:
                await self._answer(call, writer)
            finally:
                following.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> None:
        script = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        for step in script(call) if callable(script) else script:
            if isinstance(step, bytes):
                if call.gone.is_set():
                    return
                writer.write(step)
                await writer.drain()
                call.written += len(step)
            elif isinstance(step, asyncio.Event):
                await _first(step.wait(), call.gone.wait())
            elif step is RESET:
                _reset(writer)
                return
            elif step is CLOSE:
                return
            elif callable(step):
                if (made := step(call)) is not None:
                    await made
            else:
                await _first(asyncio.sleep(step), call.gone.wait())


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _request(reader: asyncio.StreamReader) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Call(method, path, headers, raw)


async def _follow(reader: asyncio.StreamReader, call: Call) -> None:
    """Notes when the client closes: nothing more is read from it than that."""
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    call.gone_at = time.monotonic()
    call.gone.set()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket | None = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
