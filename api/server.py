"""Runs the API in one process: listens, serves, and on SIGTERM ends within the grace time.

    serve(settings)        blocks until SIGTERM or SIGINT; what `perdure api` calls

Open event streams are told first, so that the server does not wait for them. One process, one event loop:
run several processes to use more cores.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uuid_utils
import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from api.app import create_app
from api.auth import is_loopback
from api.problems import Problem, render
from perdure.observability.logs import setup_logging
from perdure.observability.temporal_metrics import SdkMetrics, make_runtime
from perdure.observability.traces import start_tracing, stop_tracing
from perdure.settings import ApiSettings

log = logging.getLogger(__name__)
_CLOSING: Final = 3.0  # seconds of the grace that closing the resources may take
_BARE: Final = re.compile(r"[A-Za-z0-9_-]*")
_KEEP_ALIVE: Final = 75  # seconds: longer than the idle times of usual proxies and clients


class PortTaken(OSError):  # noqa: N818 - says what is, not that we erred
    """The address cannot be listened on; the message names the setting."""


def serve(settings: ApiSettings) -> None:
    """Serves until a signal. Raises CatalogueError, UnsafeAuth, PortTaken or ValueError before it starts."""
    setup_logging(settings, "api")
    start_tracing("api")
    try:
        uvloop.run(serve_until_stopped(settings, make_runtime()))
    finally:
        stop_tracing()


async def serve_until_stopped(
    settings: ApiSettings,
    sdk: SdkMetrics | None = None,
    *,
    listening: socket.socket | None = None,
    started: asyncio.Event | None = None,
) -> None:
    """Serves in the running loop until SIGTERM or SIGINT.

    `listening`: a socket to serve on instead of the settings' address; `started` is set once it serves.
    """
    app = create_app(settings, sdk=sdk)
    listening = listening or listen(settings.host, settings.port)
    config = uvicorn.Config(
        OwnHosts(app) if settings.auth == "none" else app,
        http="httptools",
        loop="none",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, int(settings.grace_seconds - _CLOSING)),
    )
    with listening:
        host, port = listening.getsockname()[:2]
        log.info("api listens", extra={"host": host, "port": port})
        server = Server(config, app, started)
        await server.serve(sockets=[listening])
    if not server.started:
        raise SystemExit(3)  # the log says why; a supervisor must see that it failed


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortTaken in words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error.strerror}); set PERDURE_HOST and PERDURE_PORT"
        ) from error


class Server(uvicorn.Server):
    """Uvicorn, which tells the app that it stops before it waits for open replies."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, started: asyncio.Event | None = None) -> None:
        super().__init__(config)
        self._app = app
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _collect_less()
        if self._started is not None:
            self._started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        resources = getattr(self._app.state, "resources", None)
        if resources is not None:
            resources.drain.set()
            resources.hub.drain()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends at SIGTERM and SIGINT, at once at the second; the exit code of an orderly stop is 0."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _collect_less() -> None:
    """Leaves what start-up made out of garbage collection, and collects less often: submits make few cycles,
    and looking for them stops every request (measured under load: half the p99 of submits)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


class OwnHosts:
    """Without keys, only requests that name this machine are answered: a web page whose name was made to
    resolve to loopback must not reach the service through a browser. A page's name has a dot in it, so a
    bare word (`api`, or none at all) is a program's and is let in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_own(_host_of(scope)):
            request_id = uuid_utils.uuid7().hex
            problem = Problem(403, "foreign-host", "Without keys this service answers to localhost only.")
            problem.headers["X-Request-ID"] = request_id
            await render(problem, request_id)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_own(host: str) -> bool:
    return is_loopback(host) or _BARE.fullmatch(host) is not None


def _host_of(scope: Any) -> str:
    """The name in the Host header, without port and brackets; empty when there is none."""
    found = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host = found[0] if len(found) == 1 else ""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
