"""One streaming request to a model server: bytes on a socket -> chunks, under limits of time and size.

    async with aclosing(stream_chunks(client, request, limits)) as reads:
        async for chunks in reads: ...       a list of chunks per network read

Closing the generator, or cancelling whoever waits on it, closes the connection at once; nothing is drained.
The generator ends normally at `[DONE]`, at the end of the stream, or shortly after `finish_reason` when the
server keeps the connection open. Whether that was success is for the reader of the chunks to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx

from perdure.llm.chunks import (
    Chunk,
    Done,
    NotJsonError,
    UpstreamError,
    find_error,
    parse_json,
    read_chunk,
    read_event,
)
from perdure.llm.faults import (
    encoding_fault,
    fault_of_error,
    fault_of_exception,
    fault_of_status,
    html_fault,
    timeout_fault,
    truncated_fault,
)
from perdure.llm.inflate import EncodingError, Inflater, inflater
from perdure.llm.sse import MAX_EVENT_BYTES, Event, EventTooLargeError, SseReader
from perdure.task.errors import ErrorCode, TaskFault

_T = TypeVar("_T")
AFTER_FINISH: Final = 5.0  # seconds that a finished stream may take to say its usage and [DONE]
_ERROR_BODY: Final = 64 * 1024  # bytes of a refusal that are read
_MAX_JSON: Final = 4 * 1024 * 1024  # bytes of a whole completion: text of 1 MiB with every character escaped
_BREAKS: Final = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError)
_SENT: Final = "http11.send_request_headers.started"


@dataclass(frozen=True)
class Waits:
    """Seconds. Only real output ends the wait for the first token and restarts the wait for the next."""

    first_token: float
    token: float


def make_client(connect_timeout: float, verify: Any = True) -> httpx.AsyncClient:
    """An HTTP client for one model server: no proxies from the environment, no redirects, no retries.

    Every request has a connection of its own: a generation lasts far longer than a handshake, and so no
    request ever meets a pooled connection that the server has closed meanwhile.
    """
    return httpx.AsyncClient(
        verify=verify,
        trust_env=False,
        follow_redirects=False,
        http1=True,
        http2=False,
        timeout=httpx.Timeout(connect=connect_timeout, read=None, write=30.0, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


class _Watch:
    """Raises a fault when real output does not come in time."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None  # none while connecting: the client bounds that itself
        self.output = False
        self.finished = False

    async def wait(self, step: Awaitable[_T]) -> _T:
        """Awaits one step of the stream. Raises TaskFault."""
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                self._limit: asyncio.Timeout = limit
                return await step
        except TimeoutError:
            seconds = self._waits.token if self.output else self._waits.first_token
            raise timeout_fault(output=self.output, seconds=seconds) from None

    async def trace(self, event: str, _: Mapping[str, Any]) -> None:
        """httpx's trace hook: the wait for the first token starts when the request is sent."""
        if event == _SENT:
            self._deadline = self._loop.time() + self._waits.first_token
            self._limit.reschedule(self._deadline)

    def saw(self, chunks: Sequence[Chunk]) -> None:
        if any(chunk.has_output for chunk in chunks):
            self.output = True
            self._deadline = self._loop.time() + self._waits.token
        if not self.finished and any(chunk.finish_reason for chunk in chunks):
            self.finished = True
            self._deadline = self._loop.time() + AFTER_FINISH


async def stream_chunks(
    client: httpx.AsyncClient,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    waits: Waits,
    hide: Sequence[str] = (),
) -> AsyncGenerator[list[Chunk], None]:
    """Sends the request and yields the chunks of each network read, as they come. Raises TaskFault.

    `hide`: texts of the caller that no error message repeats. A whole completion sent as JSON with status 200
    is one chunk. Once a `finish_reason` was seen, a broken or silent connection ends the stream in order.
    """
    watch = _Watch(waits)
    try:
        request = client.build_request(
            "POST", url, content=body, headers=dict(headers), extensions={"trace": watch.trace}
        )
        response = await watch.wait(client.send(request, stream=True))
    except _BREAKS as error:
        raise fault_of_exception(error, output=False) from error
    answer = _Body(response, watch)
    try:
        if not response.is_success:
            raise await _refusal(answer, hide)
        async with aclosing(_read(answer, watch, hide)) as reads:
            async for chunks in reads:
                watch.saw(chunks)
                yield chunks
    except _BREAKS as error:
        if not watch.finished:
            raise fault_of_exception(error, output=watch.output) from error
    except TaskFault as fault:
        if not (watch.finished and fault.code in (ErrorCode.FIRST_TOKEN_TIMEOUT, ErrorCode.TOKEN_TIMEOUT)):
            raise
    finally:
        await answer.aclose()


class _Body:
    """A response's body as plain bytes, a network read at a time."""

    def __init__(self, response: httpx.Response, watch: _Watch) -> None:
        self.response = response
        self._watch = watch
        self._raw = response.aiter_raw()
        self._inflate: Inflater | None = None

    async def read(self) -> Iterator[bytes] | None:
        """The pieces of the next network read, each at most 64 KiB; None at the end. Raises TaskFault."""
        try:
            data = await self._watch.wait(anext(self._raw))
        except StopAsyncIteration:
            return None
        return self._plain(data)

    def _plain(self, data: bytes) -> Iterator[bytes]:
        try:
            if self._inflate is None:
                self._inflate = inflater(self.response.headers.get("content-encoding", ""))
            yield from self._inflate.feed(data)
        except EncodingError as error:
            raise encoding_fault(str(error)) from error

    async def whole(self, limit: int) -> tuple[bytes, bool]:
        """The body up to `limit` bytes, and whether that was all."""
        parts, size = [], 0
        while (pieces := await self.read()) is not None:
            for piece in pieces:
                parts.append(piece)
                size += len(piece)
                if size > limit:
                    return b"".join(parts)[:limit], False
        return b"".join(parts), True

    async def aclose(self) -> None:
        """Closes the connection at once; what the server still sends is not read."""
        await self.response.aclose()
        await self._raw.aclose()  # type: ignore[attr-defined] # httpx declares an iterator, it is a generator


def _read(body: _Body, watch: _Watch, hide: Sequence[str]) -> AsyncGenerator[list[Chunk], None]:
    kind = body.response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in ("text/html", "application/xhtml+xml"):
        raise html_fault()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return _read_json(body, hide)
    return _read_events(body, watch, hide)


async def _read_events(body: _Body, watch: _Watch, hide: Sequence[str]) -> AsyncGenerator[list[Chunk], None]:
    reader = SseReader()
    end = False
    while not end:
        pieces = await body.read()
        for piece in pieces if pieces is not None else (b"",):
            events = reader.feed(piece) if pieces is not None else reader.end()
            chunks, end, fault = _chunks(events, watch.output, hide)
            if chunks:
                yield chunks  # before a fault: what came is kept
            if fault:
                raise fault
            if end:
                break
            await asyncio.sleep(0)  # a piece is at most 64 KiB: other tasks run between two of them
        end = end or pieces is None


def _chunks(
    events: Iterator[Event], output: bool, hide: Sequence[str]
) -> tuple[list[Chunk], bool, TaskFault | None]:
    """Reads events: (chunks, whether `[DONE]` came, the fault that stopped the reading)."""
    chunks: list[Chunk] = []
    try:
        for event in events:
            said = read_event(event)
            if isinstance(said, Done):
                return chunks, True, None
            if isinstance(said, UpstreamError):
                return chunks, False, fault_of_error(said, output=output, hide=hide)
            if said is None:
                continue
            chunks.append(said)
            output = output or said.has_output
            if said.finish_reason == "error":
                return chunks, False, fault_of_error(UpstreamError("finish_reason: error"), output=output)
    except EventTooLargeError:
        return chunks, False, too_large(MAX_EVENT_BYTES, "one event of the model server's stream")
    except NotJsonError:
        broken = TaskFault(
            ErrorCode.STREAM_TRUNCATED, "the model server's stream holds a chunk that is not JSON"
        )
        return chunks, False, broken
    return chunks, False, None


async def _read_json(body: _Body, hide: Sequence[str]) -> AsyncGenerator[list[Chunk], None]:
    """A whole completion: accepted if it holds a finish_reason, as a stream would have to."""
    data, whole = await body.whole(_MAX_JSON)
    if not whole:
        raise too_large(_MAX_JSON, "the model server's answer")
    try:
        value = await asyncio.to_thread(parse_json, data.strip()) if data.strip() else {}
    except NotJsonError:
        raise truncated_fault(output=False) from None
    if error := find_error(value):
        raise fault_of_error(error, output=False, hide=hide)
    if isinstance(value, dict):
        yield [read_chunk(value)]


async def _refusal(body: _Body, hide: Sequence[str]) -> TaskFault:
    """The fault of a status other than 2xx. Its body is read as far as it helps."""
    try:
        data, _ = await body.whole(_ERROR_BODY)
    except (httpx.HTTPError, TaskFault):
        data = b""  # the status is enough
    response = body.response
    return fault_of_status(response.status_code, response.headers, data, hide=hide)


def too_large(limit: int, what: str) -> TaskFault:
    """More bytes than there may be."""
    return TaskFault(ErrorCode.OUTPUT_TOO_LARGE, f"{what} is larger than {limit} bytes")
