"""Composition root of the workers: builds every resource, hands it down, closes it in reverse.

Each `main_*` runs until SIGTERM or SIGINT and returns; the exit code of a drained worker is 0.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Final

import uvloop
from temporalio.client import Client
from temporalio.worker import Worker

from activities.maintenance import MaintenanceActivities
from activities.records import RecordActivities
from perdure.dispatcher import Dispatcher
from perdure.models import Catalogue, load_catalogue
from perdure.observability.logs import setup_logging
from perdure.observability.metrics import Metrics
from perdure.observability.page import Exposition, MetricsPage
from perdure.observability.temporal_metrics import SdkMetrics, make_runtime
from perdure.observability.traces import start_tracing, stop_tracing
from perdure.settings import CallbackSettings, DatabaseSettings, WorkerSettings
from perdure.store.engine import Store, make_engine
from perdure.temporal import EngineUnavailable, TemporalGate, connect, default_identity
from workers.callbacks import build_callbacks_worker
from workers.control import build_control_worker
from workers.gpu import GpuWorker
from workers.roll_call import HEARTBEAT, RollCall
from workers.schedules import keep_schedules

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
            page = MetricsPage(exposition, self.settings.metrics_host, self.settings.metrics_port)
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

    def store(self, settings: DatabaseSettings, stack: AsyncExitStack) -> Store:
        """The store of this process; closed with the stack."""
        url, name = settings.database_url.get_secret_value(), f"perdure-{self.role}"
        store = Store(make_engine(url, pool_size=settings.database_pool, application_name=name))
        stack.push_async_callback(store.aclose)
        return store

    async def run(self, worker: Worker, *beside: Awaitable[None]) -> None:
        """Runs the worker, and loops beside it, until a signal. A fatal error of the worker is raised."""
        loops = [asyncio.ensure_future(loop) for loop in beside]
        async with worker:
            log.info("worker ready", extra={"worker": self.identity, "queue": worker.task_queue})
            await self.stop.asked.wait()
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
        log.info("worker stopped", extra={"worker": self.identity})


def main_control(settings: DatabaseSettings) -> None:
    """Workflows, records, upkeep and a dispatcher."""
    uvloop.run(_control(settings))


async def _control(settings: DatabaseSettings) -> None:
    async with AsyncExitStack() as stack:
        process = Process(settings, "control")
        client = await process.open(stack)
        if client is None:
            return
        store, gate = process.store(settings, stack), TemporalGate(client)
        dispatcher = Dispatcher(store, gate, process.catalogue, process.metrics, process.identity)
        records = RecordActivities(store, gate, process.metrics, on_room=dispatcher.wake)
        upkeep = MaintenanceActivities(
            store, client, process.catalogue, process.metrics, retention_days=settings.retention_days
        )
        worker = build_control_worker(
            client,
            [
                records.record_now,
                records.record,
                records.commit_outcome,
                upkeep.reconcile,
                upkeep.purge_expired,
            ],
            records_at_once=settings.database_pool,
        )
        roll_call = RollCall(client, store, process.catalogue)
        await process.run(worker, dispatcher.run(), keep_schedules(client), roll_call.run())


def main_callbacks(settings: CallbackSettings) -> None:
    """Delivery of callbacks."""
    uvloop.run(_callbacks(settings))


async def _callbacks(settings: CallbackSettings) -> None:
    async with AsyncExitStack() as stack:
        process = Process(settings, "callbacks")
        client = await process.open(stack)
        if client is None:
            return
        store = process.store(settings, stack)
        worker = await build_callbacks_worker(client, store, settings, process.metrics, stack)
        await process.run(worker)


def main_gpu(settings: WorkerSettings, pool: str, slots: int | None) -> None:
    """Generation for one pool. Knows Temporal and its model servers, nothing more."""
    uvloop.run(_gpu(settings, pool, slots))


async def _gpu(settings: WorkerSettings, pool: str, slots: int | None) -> None:
    async with AsyncExitStack() as stack:
        process = Process(settings, f"gpu:{pool}")
        client = await process.open(stack)
        if client is None:
            return
        gpu = GpuWorker(client, process.catalogue, pool, slots, process.metrics, settings.drain_seconds)
        stack.push_async_callback(gpu.aclose)
        await gpu.run(process.stop.asked, process.stop.hurried)
