"""Composition root of the workers: builds every resource, hands it down, closes it in reverse.

Each `main_*` runs until SIGTERM or SIGINT and returns; the exit code of a drained worker is 0. The parts of a
role are imported by its own function, so that a GPU worker never loads a database driver.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from perdure.settings import CallbackSettings, DatabaseSettings, WorkerSettings
from workers.process import Process

if TYPE_CHECKING:
    from perdure.store.engine import Store


def main_control(settings: DatabaseSettings) -> None:
    """Workflows, records, upkeep and a dispatcher."""
    uvloop.run(_control(settings))


async def _control(settings: DatabaseSettings) -> None:
    from activities.maintenance import MaintenanceActivities
    from activities.records import RecordActivities
    from activities.workers import WorkerActivities
    from perdure.dispatcher import Dispatcher
    from perdure.engine_check import say_what_order_lacks
    from perdure.temporal import TemporalGate
    from workers.control import build_control_worker
    from workers.roll_call import RollCall
    from workers.schedules import keep_schedules
    from workflows.probe import EngineProbe

    async with AsyncExitStack() as stack:
        process = Process(settings, "control")
        client = await process.open(stack)
        if client is None:
            return
        store, gate = _store(process, settings, stack), TemporalGate(client)
        dispatcher = Dispatcher(store, gate, process.catalogue, process.metrics, process.identity)
        records = RecordActivities(store, gate, process.metrics, on_room=dispatcher.wake)
        upkeep = MaintenanceActivities(
            store,
            client,
            process.catalogue,
            process.metrics,
            commit=records.commit_again,
            retention_days=settings.retention_days,
        )
        worker = build_control_worker(
            client,
            [
                records.record_now,
                records.record,
                records.commit_outcome,
                upkeep.reconcile,
                upkeep.purge_expired,
                WorkerActivities(store).note_worker,
            ],
            records_at_once=settings.database_pool,
        )
        roll_call = RollCall(client, store, process.catalogue)
        check = say_what_order_lacks(client, EngineProbe, process.catalogue.pools)
        await process.run(worker, dispatcher.run(), keep_schedules(client), roll_call.run(), check)


def main_callbacks(settings: CallbackSettings) -> None:
    """Delivery of callbacks."""
    uvloop.run(_callbacks(settings))


async def _callbacks(settings: CallbackSettings) -> None:
    from workers.callbacks import build_callbacks_worker

    async with AsyncExitStack() as stack:
        process = Process(settings, "callbacks")
        client = await process.open(stack)
        if client is None:
            return
        store = _store(process, settings, stack)
        worker = await build_callbacks_worker(client, store, settings, process.metrics, stack)
        await process.run(worker)


def main_gpu(settings: WorkerSettings, pool: str, slots: int | None) -> None:
    """Generation for one pool. Knows Temporal and its model servers, nothing more."""
    uvloop.run(_gpu(settings, pool, slots))


async def _gpu(settings: WorkerSettings, pool: str, slots: int | None) -> None:
    from workers.gpu import GpuWorker

    async with AsyncExitStack() as stack:
        process = Process(settings, f"gpu:{pool}")
        client = await process.open(stack)
        if client is None:
            return
        gpu = GpuWorker(client, process.catalogue, pool, slots, process.metrics, settings.drain_seconds)
        stack.push_async_callback(gpu.aclose)
        await gpu.run(process.stop.asked, process.stop.hurried)


def _store(process: Process, settings: DatabaseSettings, stack: AsyncExitStack) -> Store:
    """The store of a process; closed with the stack."""
    from perdure.store.engine import Store, make_engine

    url, name = settings.database_url.get_secret_value(), f"perdure-{process.role}"
    store = Store(make_engine(url, pool_size=settings.database_pool, application_name=name))
    stack.push_async_callback(store.aclose)
    return store
