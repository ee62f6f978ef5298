"""A response of server-sent events: pulls from a source at the pace of its reader.

Nothing is queued for a reader: while a write waits, its source only moves on in what it knows. A reader that
takes nothing for SEND_SECONDS is dropped; it resumes with its last id. A stream ends after its source's last
event, after MAX_AGE, and when the process stops; in the last two cases it tells the reader to come back soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.live import sse

log = logging.getLogger(__name__)

PING_SECONDS: Final = 15.0  # a comment line after so long without an event
SEND_SECONDS: Final = 30.0
MAX_AGE: Final = 3600.0
FIRST_RETRY: Final = 3000  # milliseconds until a reader whose connection broke comes back
LAST_RETRY: Final = 1000  # the same for one that was told to
_STOP_SECONDS: Final = 1.0  # how long a write that waits may go on when the process stops
HEADERS: Final = {
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx hands every event on at once
    "Vary": "Authorization",
}


class Source(Protocol):
    """Frames for one reader."""

    @property
    def ended(self) -> bool:
        """There will be no more."""
        ...

    @property
    def finished(self) -> bool:
        """It ended because all was told, not because somebody stopped it."""
        ...

    async def next(self, seconds: float) -> bytes | None:
        """The next frame; None when there was none in `seconds`, or when it ended meanwhile."""
        ...

    def close(self) -> None:
        """Ends a `next` that waits, now."""
        ...


class EventStream(Response):
    """One stream. `open_source` is called before the first byte goes out: what it raises is answered as a
    problem. What it enters into the stack is left when the stream is over, whatever ended it.

    `on_stop(callback)` arranges that the callback is called when the process stops; it returns the undoing.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        open_source: Callable[[ExitStack], Source],
        on_stop: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._open = open_source
        self._on_stop = on_stop
        self._writing: asyncio.Timeout | None = None
        self._left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            source = self._open(stack)
            stack.callback(self._on_stop(lambda: self._stop(source)))
            leaving = asyncio.create_task(self._leave(receive, source))
            stack.callback(leaving.cancel)
            await self._pump(source, send)

    async def _pump(self, source: Source, send: Send) -> None:
        end = asyncio.get_running_loop().time() + MAX_AGE
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        going = await self._write(send, sse.retry(FIRST_RETRY))  # carries the headers out at once
        while going and not source.ended and (left := end - asyncio.get_running_loop().time()) > 0:
            frame = await source.next(min(PING_SECONDS, left))
            if frame is not None or not source.ended:
                going = await self._write(send, frame or sse.PING)
        if going and not self._left:
            last = b"" if source.finished else sse.retry(LAST_RETRY)
            await self._write(send, last, more=False)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> bool:
        """Writes as fast as the reader takes it. False when it takes nothing any more."""
        try:
            async with asyncio.timeout(SEND_SECONDS) as self._writing:
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            log.info("a reader that took no events was dropped")
            return False
        finally:
            self._writing = None
        return not self._left

    async def _leave(self, receive: Receive, source: Source) -> None:
        """Notices that the reader is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        source.close()

    def _stop(self, source: Source) -> None:
        source.close()
        if self._writing is not None:
            self._writing.reschedule(asyncio.get_running_loop().time() + _STOP_SECONDS)
