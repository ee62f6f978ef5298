"""One page per process: our families, the process's own and the Temporal SDK's.

exposition = Exposition(metrics, sdk, gauges)
body = await exposition.render()                 the API's /metrics
page = MetricsPage(exposition, host, port)       a worker's own /metrics, /healthz and /readyz
await page.start(); ...; await page.aclose()
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, Protocol

from prometheus_client import generate_latest

from perdure.observability.metrics import Metrics
from perdure.observability.temporal_metrics import SdkMetrics

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_SECONDS: Final = 5.0
_MAX_HEAD: Final = 16 * 1024  # bytes of a request's line and headers


class Refresh(Protocol):
    """Fills gauges from their source before a page is made."""

    async def refresh(self) -> None:
        """Brings the gauges up to date. Never raises."""
        ...


class Exposition:
    """The text of the page. `sdk` and `gauges` are left out where a process has none."""

    def __init__(
        self, metrics: Metrics, sdk: SdkMetrics | None = None, gauges: Refresh | None = None
    ) -> None:
        self._metrics = metrics
        self._sdk = sdk
        self._gauges = gauges

    async def render(self) -> bytes:
        """Prometheus text (format 0.0.4). Gauges that cannot be read keep their last value."""
        if self._gauges is not None:
            await self._gauges.refresh()
        return await asyncio.to_thread(self._text)  # some milliseconds: too long for the event loop

    def _text(self) -> bytes:
        ours = generate_latest(self._metrics.registry)
        return ours + self._sdk.text() if self._sdk is not None else ours


class MetricsPage:
    """A small HTTP server for a worker: /metrics, /healthz (the event loop turns) and /readyz."""

    def __init__(
        self, exposition: Exposition, host: str, port: int, *, ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._exposition = exposition
        self._host = host
        self._wanted = port
        self._ready = ready
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        if self._server is None:
            raise RuntimeError("the metrics page is not started")
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listens. Raises OSError, with the address and the setting in its message."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._wanted, limit=_MAX_HEAD)
        except OSError as error:
            raise OSError(
                f"metrics page cannot listen on {self._host}:{self._wanted} ({error.strerror}); "
                "set PERDURE_METRICS_PORT to a free port"
            ) from error
        log.info("metrics page listens", extra={"host": self._host, "port": self.port})

    async def aclose(self) -> None:
        """Stops listening and drops open connections."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_SECONDS)
            status, kind, body = await self._answer(head)
            line = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            rest = f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
            writer.write((line + rest).encode() + (b"" if head.startswith(b"HEAD ") else body))
            await asyncio.wait_for(writer.drain(), _REQUEST_SECONDS)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that went away or never spoke; the next scrape is a new connection
        finally:
            writer.close()

    async def _answer(self, head: bytes) -> tuple[HTTPStatus, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _plain(HTTPStatus.BAD_REQUEST)
        if words[0] not in (b"GET", b"HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        route = self._routes().get(words[1].split(b"?", 1)[0])
        return await route() if route is not None else _plain(HTTPStatus.NOT_FOUND)

    def _routes(self) -> dict[bytes, Callable[[], Awaitable[tuple[HTTPStatus, str, bytes]]]]:
        return {b"/metrics": self._metrics, b"/healthz": self._healthz, b"/readyz": self._readyz}

    async def _metrics(self) -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, CONTENT_TYPE, await self._exposition.render()

    async def _healthz(self) -> tuple[HTTPStatus, str, bytes]:
        return _plain(HTTPStatus.OK, "ok")

    async def _readyz(self) -> tuple[HTTPStatus, str, bytes]:
        return _plain(HTTPStatus.OK, "ready") if self._ready() else _plain(HTTPStatus.SERVICE_UNAVAILABLE)


def _plain(status: HTTPStatus, text: str | None = None) -> tuple[HTTPStatus, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{text or status.phrase}\n".encode()
