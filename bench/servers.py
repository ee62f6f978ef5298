"""The two outside parties, in the bench's own process: a callback receiver and a scripted model server.

Both listen on 127.0.0.1 and note wall-clock times (`time.time()`), which the workers on this machine share.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self, cast

import orjson

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_TOKEN = re.compile(r"w(\d+)")


class _Hook(asyncio.Protocol):
    """One connection of the receiver: answers 204 to every whole request, connections are kept."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._buffer, 0, end)
            total = end + 4 + (int(found.group(1)) if found else 0)
            if len(self._buffer) < total:
                return
            path = self._buffer.split(b" ", 2)[1].decode()
            self._receiver.came(path, self._buffer[end + 4 : total])
            self._buffer = self._buffer[total:]
            self._transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")


class Receiver:
    """Takes callbacks at `url(label)` and keeps when each body came."""

    def __init__(self) -> None:
        self._came: dict[str, list[tuple[float, bytes]]] = defaultdict(list)
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Hook(self), "127.0.0.1", 0, backlog=1024)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def url(self, label: str) -> str:
        return f"http://127.0.0.1:{self.port}/{label}"

    def came(self, path: str, body: bytes) -> None:
        self._came[path.lstrip("/")].append((time.time(), body))
        self._news.set()

    def times(self, label: str) -> dict[str, float]:
        """When the first callback of each task came, by its `task_id`."""
        found: dict[str, float] = {}
        for at, body in self._came[label]:
            found.setdefault(str(orjson.loads(body)["task_id"]), at)
        return found

    def bodies(self, label: str) -> list[tuple[float, bytes]]:
        """Every callback at a label, with when it came."""
        return list(self._came[label])

    def count(self, label: str) -> int:
        return len(self._came[label])

    async def wait(self, label: str, count: int, seconds: float) -> bool:
        """Waits until `count` came at a label; False when the time was over first."""
        end = time.monotonic() + seconds
        while self.count(label) < count:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), end - time.monotonic())
            except TimeoutError:
                return False
        return True


@dataclass(eq=False)
class Generation:
    """One request to the model. Tokens are `w0 w1 …`; `first` is the number it went on from."""

    label: str
    first: int
    began: float
    first_token_at: float | None = None
    made: int = 0
    ended: float | None = None
    closed_early: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ModelServer:
    """OpenAI-compatible streaming. The last user message says what to make, as JSON:
    {"label": text, "tokens": n, "rate": tokens a second, "silent": bool}; `silent`: headers, no token."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Generation]] = defaultdict(list)
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def generation(self, label: str, number: int, seconds: float, made: int = 0) -> Generation | None:
        """Request `number` (from 0) for a label once it made so many tokens; None when it never came."""
        end = time.monotonic() + seconds
        while len(self.seen[label]) <= number or self.seen[label][number].made < made:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), end - time.monotonic())
            except TimeoutError:
                return None
        return self.seen[label][number]

    def all(self, prefix: str) -> list[Generation]:
        """Every request of the labels that begin so."""
        return [one for label, many in self.seen.items() if label.startswith(prefix) for one in many]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            found = _LENGTH.search(head)
            body = orjson.loads(await reader.readexactly(int(found.group(1)) if found else 0))
        except (OSError, asyncio.IncompleteReadError, orjson.JSONDecodeError):
            writer.close()
            return
        order, first = _order(body["messages"])
        made = Generation(order["label"], first, time.time())
        self.seen[made.label].append(made)
        self._news.set()
        work = asyncio.create_task(self._generate(order, made, writer))
        gone = asyncio.create_task(_end_of(reader))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        made.ended, made.closed_early = time.time(), not work.done()
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
        writer.close()
        made.over.set()

    async def _generate(self, order: dict[str, Any], made: Generation, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: hello\n\n"
        )
        if order.get("silent"):
            await asyncio.Event().wait()
        loop, pause = asyncio.get_running_loop(), 1 / order["rate"]
        due = loop.time()
        for number in range(made.first, order["tokens"]):
            due += pause
            if made.first_token_at is not None or not order.get("eager", True):
                await asyncio.sleep(max(0, due - loop.time()))
            writer.write(_chunk({"content": f" w{number}" if number else "w0"}))
            made.made += 1
            made.first_token_at = made.first_token_at or time.time()
            self._news.set()
            await writer.drain()
        await asyncio.sleep(max(0, due - loop.time()))
        writer.write(_chunk({}, "stop") + b"data: [DONE]\n\n")
        await writer.drain()


def _order(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """What to make, and the token to go on from when a partial answer came along."""
    order = next(orjson.loads(m["content"]) for m in reversed(messages) if m["role"] == "user")
    last = messages[-1]
    tokens = _TOKEN.findall(last["content"]) if last["role"] == "assistant" else []
    return order, int(tokens[-1]) + 1 if tokens else 0


def _chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Returns when the client closed its side, however it did."""
    try:
        while await reader.read(65536):
            pass
    except OSError:
        pass
