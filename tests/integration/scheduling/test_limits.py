"""Pauses, limits of users, a change of class at an awkward moment, and models that no worker has."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime

import pytest
from temporalio.client import Client

from perdure.contracts import GenerateInput, GenerateResult, ModelNews, TaskInput, WorkerNews
from perdure.observability.metrics import Metrics
from perdure.starts import Starts
from perdure.store import Store
from perdure.store.rows import WorkerReport
from perdure.task.states import Status
from perdure.temporal import TemporalGate
from tests.integration.scheduling.floor import HIGH, LOW, Floor
from tests.support.tasks import ANN
from tests.support.waiting import until


async def test_pausing_and_resuming_loses_nothing(floor: Floor) -> None:
    more = f'[models.n]\npool = "{floor.pool}"\nexecutor = "simulated"\n'
    bay = floor.bay()
    async with floor.running(floor.catalogue("window = 3", more)) as (dispatcher,), bay.worker(slots=2):
        await floor.store.dispatch.pause("model", "n", "ops", "new weights")
        held = await floor.submit(5, "bob", model_id="n")
        await floor.submit(10)
        dispatcher.wake()
        await floor.reached(Status.COMPLETED, 10)
        assert not set(held) & set(bay.ids)
        await floor.store.dispatch.pause("pool", floor.pool, "ops", None)
        late = await floor.submit(5, priority=HIGH)
        await floor.store.dispatch.resume("model", "n")
        dispatcher.wake()
        await asyncio.sleep(1.2)  # longer than a look of the dispatcher: nothing happens
        assert await floor.count(Status.PENDING) == 10
        await floor.store.dispatch.resume("pool", floor.pool)
        dispatcher.wake()
        await floor.reached(Status.COMPLETED, 20)
    assert Counter(bay.ids) == Counter(list(floor.known))
    assert set(late) | set(held) == set(bay.ids[10:])


async def test_a_user_never_runs_more_than_allowed(floor: Floor) -> None:
    """Two dispatchers, eight slots; Bob has a limit of his own, Eve the common one."""
    more = "max_running_per_user = 2\n[users.bob]\nmax_running = 3"
    bay = floor.bay()
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def work(given: GenerateInput) -> GenerateResult | None:
        user = floor.known[given.task_id][0]
        running[user] += 1
        most[user] = max(most[user], running[user])
        await asyncio.sleep(0.1)
        running[user] -= 1
        return None

    bay.work = work
    async with floor.running(floor.catalogue("slots = 8", more), dispatchers=2) as both, bay.worker(slots=8):
        for user, count in (("ann", 12), ("bob", 12), ("eve", 1)):
            await floor.submit(count, user)
        for one in both:
            one.wake()
        await floor.reached(Status.COMPLETED, 25)
    assert most["ann"] <= 2
    assert most["bob"] <= 3
    assert sum(most.values()) > 3, "users did not hold each other back"


class SlowGate(TemporalGate):
    """A start that takes its time."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def start_task(self, task: TaskInput, *, seconds: float = 2.0) -> bool:
        self.begun.set()
        await self.go.wait()
        return await super().start_task(task, seconds=seconds)


async def test_a_change_of_class_between_claim_and_start_arrives(
    floor: Floor, store: Store, temporal_client: Client
) -> None:
    known = floor.catalogue()
    gate = SlowGate(temporal_client)
    starts = Starts(store, gate, known, Metrics(known))
    async with floor.running(known, dispatchers=0):
        (task_id,) = await floor.submit(priority=LOW)
        (claimed,) = await store.dispatch.claim(floor.pool, 5, 1, 60, "test")
        flushing = asyncio.create_task(starts.flush_forever())
        starts.begin(claimed.task, 1.0)
        await gate.begun.wait()
        changed = await store.tasks.set_priority(ANN, task_id, HIGH)
        assert changed.signal
        assert not await gate.signal_priority(task_id, HIGH.value), "there is no workflow to tell yet"
        gate.go.set()

        async def waits_as_high() -> bool:
            described = await temporal_client.get_workflow_handle(task_id).describe()
            pending = described.raw_description.pending_activities
            return [one.priority.priority_key for one in pending] == [1]

        await until(lambda: store_says(floor, task_id, Status.QUEUED))
        await until(waits_as_high)
        flushing.cancel()
        await starts.aclose()


async def store_says(floor: Floor, task_id: str, status: Status) -> bool:
    return (await floor.row(task_id)).status is status


async def test_a_model_that_no_worker_has_is_held_back(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has a worker, which told its models; tasks of another model wait as rows until one has it."""
    monkeypatch.setattr("perdure.dispatcher._WORKER_CHECK", 0.1)
    pool = floor.pool
    more = f'[models.n]\npool = "{pool}"\nexecutor = "simulated"\n'
    report = [WorkerReport("w", pool, ("m", "n"), 1, 0)]
    await floor.store.workers.report(report)
    news = WorkerNews(worker="w", pool=pool, slots=1, models=[ModelNews(model_id="m")], at=datetime.now(UTC))
    await floor.store.workers.note(news)
    await floor.store.workers.report(report)  # what the worker told outranks what its pool should have
    assert [worker.models for worker in await floor.store.workers.live()] == [("m",)]
    bay = floor.bay()
    async with floor.running(floor.catalogue(more=more)) as (dispatcher,), bay.worker(slots=1):
        held = await floor.submit(2, model_id="n")
        await floor.submit(2)
        dispatcher.wake()
        await floor.reached(Status.COMPLETED, 2)
        assert await floor.count(Status.PENDING) == 2
        both = [ModelNews(model_id="m"), ModelNews(model_id="n")]
        assert await floor.store.workers.note(
            news.model_copy(update={"models": both, "at": datetime.now(UTC)})
        )
        assert not await floor.store.workers.note(news), "older news change nothing"
        await floor.reached(Status.COMPLETED, 4)
    assert set(bay.ids[2:]) == set(held)
