"""More runs than a control worker keeps in memory: some are dropped, and replayed when something comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from perdure import names
from perdure.contracts import Beat, GenerateInput, GenerateResult, Snapshot
from perdure.task.states import Status
from tests.support.waiting import until
from tests.workflow.conftest import Stage, World, fault, generated
from workers.control import build_control_worker

CACHED = 3
RUNS = 12


@pytest.fixture
async def small(temporal_client: Client, world: World) -> AsyncIterator[Stage]:
    """A stage whose control worker has room for three runs. Closing it must not hang."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            build_control_worker(
                temporal_client, world.activities(), records_at_once=5, cached_workflows=CACHED
            )
        )
        await stack.enter_async_context(
            Worker(temporal_client, task_queue=names.CALLBACKS_QUEUE, activities=[world.deliver()])
        )
        yield Stage(temporal_client, world, stack)


async def test_waiting_runs_leave_the_cache_and_come_back(small: Stage, world: World) -> None:
    handles = [await small.start() for _ in range(RUNS)]
    for handle in handles:  # each answer brings one run back and drops another
        snapshot = await asyncio.wait_for(handle.query(names.QUERY_SNAPSHOT, result_type=Snapshot), 20)
        assert snapshot.projection.status is Status.QUEUED
        assert not snapshot.cancel_requested, "leaving the cache is no cancel"
    used = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - used < 0.8, "a run that was dropped still spins"
    for handle in handles:
        await handle.signal(names.SIG_CANCEL)
    for handle in handles:
        await small.end(handle)
    assert [outcome.projection.status for outcome in world.outcomes] == [Status.CANCELLED] * RUNS
    assert {outcome.projection.version for outcome in world.outcomes} == {2}


async def test_attempts_and_back_offs_go_on_after_a_replay(small: Stage, world: World) -> None:
    """Every run is replayed at several points of its life."""

    async def step(given: GenerateInput) -> GenerateResult:
        await asyncio.sleep(0.05 * (int(given.task_id[-1], 16) % 5))
        if given.attempt == 1:
            raise fault("token_timeout", beat=Beat(attempt=1, text="one two", output_tokens=2))
        if given.attempt == 2:
            return GenerateResult(
                kind="drained", beat=Beat(attempt=2, text="one two three", output_tokens=3), worker="w2"
            )
        assert given.checkpoint is not None
        return generated(given, f"{given.checkpoint.text} four")

    world.script = [step]
    async with small.gpu(slots=4):
        handles = [await small.start() for _ in range(RUNS)]
        await until(lambda: len(world.outcomes) == RUNS)
        for handle in handles:
            await small.end(handle)
    for outcome in world.outcomes:
        assert outcome.projection.status is Status.COMPLETED
        assert [a.outcome for a in outcome.projection.attempts] == ["failed", "drained", "completed"]
        assert outcome.result is not None
        assert outcome.result.text == "one two three four"
        assert outcome.projection.retry_count == 1
