"""What every worker process holds, and how it ends. Imports no database: a GPU worker has none."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Final

from temporalio.client import Client
from temporalio.worker import Worker

from perdure.models import Catalogue, load_catalogue
from perdure.observability.logs import setup_logging
from perdure.observability.metrics import Metrics
from perdure.observability.page import Exposition, MetricsPage
from perdure.observability.temporal_metrics import SdkMetrics, make_runtime
from perdure.observability.traces import start_tracing, stop_tracing
from perdure.settings import WorkerSettings
from perdure.temporal import EngineUnavailable, connect, default_identity
from workers.heartbeat import HEARTBEAT

log = logging.getLogger(__name__)
_CONNECT_PATIENCE: Final = 30.0  # seconds between log lines that name the address


class Stop:
    """SIGTERM and SIGINT: `asked` at the first, `hurried` at the second."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard)

    def _heard(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


class Process:
    """What every worker process holds: catalogue, metrics, its page, a client."""

    def __init__(self, settings: WorkerSettings, role: str) -> None:
        setup_logging(settings, role)
        self.settings, self.role, self.stop = settings, role, Stop()
        self.catalogue: Catalogue = load_catalogue(settings.models)
        self.metrics = Metrics(self.catalogue)
        self.sdk: SdkMetrics = make_runtime(HEARTBEAT)
        self.identity = default_identity(role)

    async def open(self, stack: AsyncExitStack) -> Client | None:
        """Traces, the metrics page and a client. None when it was stopped before Temporal answered."""
        start_tracing(self.role)
        stack.callback(stop_tracing)
        if self.settings.metrics_port is not None:
            exposition = Exposition(self.metrics, self.sdk)
            page = MetricsPage(
                exposition,
                self.settings.metrics_host,
                self.settings.metrics_port,
                ready=lambda: not self.stop.asked.is_set(),
            )
            await page.start()
            stack.push_async_callback(page.aclose)
        connecting = asyncio.create_task(self._connect())
        asked = asyncio.create_task(self.stop.asked.wait())
        await asyncio.wait([connecting, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if connecting.done():
            return connecting.result()
        connecting.cancel()
        return None

    async def _connect(self) -> Client:
        while True:
            try:
                return await connect(
                    self.settings,
                    identity=self.identity,
                    runtime=self.sdk.runtime,
                    patience=_CONNECT_PATIENCE,
                )
            except EngineUnavailable as error:
                log.warning(str(error))

    async def run(self, worker: Worker, *beside: Awaitable[None]) -> None:
        """Runs the worker, and loops beside it, until a signal. A fatal error of the worker is raised."""
        loops = [asyncio.ensure_future(loop) for loop in beside]
        for loop in loops:
            loop.add_done_callback(_ended)
        async with worker:
            log.info("worker ready", extra={"worker": self.identity, "queue": worker.task_queue})
            await self.stop.asked.wait()
            while pending := [loop for loop in loops if not loop.done()]:
                for loop in pending:  # again: a query that breaks just now can swallow a cancel
                    loop.cancel()
                await asyncio.wait(pending, timeout=1.0)
        log.info("worker stopped", extra={"worker": self.identity})


def _ended(loop: asyncio.Future[None]) -> None:
    """A loop beside the worker that ends by itself does so by a fault of ours: it must not go unseen."""
    if not loop.cancelled() and (error := loop.exception()) is not None:
        log.error("a part of this worker ended; start the worker again", exc_info=error)
