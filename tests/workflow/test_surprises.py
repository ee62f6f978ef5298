"""What nobody foresaw, in each step of a task: every path ends in a final state."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure import names
from perdure.contracts import Beat, GenerateInput, GenerateResult
from perdure.task.states import Priority, Status
from tests.support.waiting import until
from tests.workflow.conftest import Stage, World, announce, beat_until, fault, generated


@pytest.mark.parametrize(
    "surprise",
    [
        RuntimeError("a bug in the worker"),
        ApplicationError("no details", type="Odd"),
        ApplicationError("details of another shape", {"what": "ever"}, type="Odd"),
        ApplicationError("details that are no model", 5, None, type="Odd", non_retryable=True),
    ],
    ids=["exception", "bare", "other shape", "no model"],
)
async def test_an_attempt_that_ends_in_no_known_way(stage: Stage, world: World, surprise: Exception) -> None:
    """Counts as a fault, is retried, and the text so far is kept."""

    async def first(given: GenerateInput) -> GenerateResult:
        raise fault("token_timeout", beat=Beat(attempt=1, text="so far", output_tokens=2))

    async def break_(given: GenerateInput) -> GenerateResult:
        raise surprise

    world.script = [first, break_]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=1))
    assert (outcome.projection.status, outcome.projection.error_code) == (Status.FAILED, "internal")
    assert "could not run the attempt" in (outcome.projection.error_message or "")
    assert [a.outcome for a in outcome.projection.attempts] == ["failed", "failed"]
    assert outcome.result is not None
    assert outcome.result.text == "so far"


async def test_a_result_larger_than_temporal_takes_ends_the_task_once(stage: Stage, world: World) -> None:
    """Our own limit comes first; should it fail us, the model does not run again and again."""

    async def huge(given: GenerateInput) -> GenerateResult:
        return generated(given, "x" * 2_200_000)

    world.script = [huge]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=20))
    assert (outcome.projection.status, outcome.projection.error_code) == (Status.FAILED, "output_too_large")
    assert len(world.given) == 1


async def test_heartbeats_that_are_no_beats(stage: Stage, world: World) -> None:
    """A checkpoint that cannot be read is none: the next attempt starts over."""

    async def babble(given: GenerateInput) -> GenerateResult:
        activity.heartbeat({"text": 5}, "more")
        await asyncio.Event().wait()
        raise AssertionError

    async def done(given: GenerateInput) -> GenerateResult:
        assert given.checkpoint is None
        return generated(given)

    world.script = [babble, done]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(heartbeat_seconds=1))
    assert outcome.projection.status is Status.COMPLETED


@pytest.mark.parametrize(
    "said", [[5], [["a", "list"]], [{"reason": {"deep": 1}}], ["x" * 9_000], [None], ["one", "two"], []]
)
async def test_signals_with_odd_arguments(stage: Stage, world: World, said: list[Any]) -> None:
    """Whatever a person types into a shell, it is a cancel, and no workflow task fails."""
    handle = await stage.start()
    await handle.signal(names.SIG_CANCEL, args=said)
    outcome = await stage.end(handle)
    assert outcome.projection.status is Status.CANCELLED
    events = (await handle.fetch_history()).events
    assert not any(e.HasField("workflow_task_failed_event_attributes") for e in events)


async def test_odd_announcements_are_no_starts(stage: Stage, world: World) -> None:
    async def run(given: GenerateInput) -> GenerateResult:
        handle = stage.client.get_workflow_handle(given.task_id)
        for odd in (["1"], [0, "w", "not a time"], [], [1, 2, 3, 4]):
            await handle.signal(names.SIG_ATTEMPT_STARTED, args=odd)
        for other in ([], [5], [["HIGH"]], ["HIGH", "LOW", "x"]):
            await handle.signal(names.SIG_SET_PRIORITY, args=other)
        await handle.signal("unheard_of", "x")
        await announce(stage.client, given)
        await beat_until(lambda: bool(world.rows))
        return generated(given)

    world.script = [run]
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert outcome.projection.status is Status.COMPLETED
    assert [row.status for row in world.rows] == [Status.PROCESSING]


async def test_an_attempt_that_its_worker_does_not_end(stage: Stage, world: World) -> None:
    """It beats for ever beyond its time limit: Temporal gives it up 15 s later, and the text is kept."""

    async def endless(given: GenerateInput) -> GenerateResult:
        while True:
            activity.heartbeat(Beat(attempt=1, text="so far", output_tokens=2))
            await asyncio.sleep(0.1)

    world.script = [endless]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=0, timeout_seconds=0.1))
    assert outcome.projection.error_code == "attempt_timeout"
    assert [a.outcome for a in outcome.projection.attempts] == ["failed"]
    assert outcome.result is not None
    assert outcome.result.text == "so far"


async def test_the_outage_of_one_model_delays_no_other_pool(stage: Stage, world: World) -> None:
    """Forty HIGH tasks that all retry against a dead model, and one NORMAL task of another pool."""

    async def by_model(given: GenerateInput) -> GenerateResult:
        if given.model_id == "dead":
            raise fault("upstream_unavailable", refused=True)
        return generated(given)

    world.script = [by_model]
    elsewhere = Stage(stage.client, world, stage.stack)
    async with stage.gpu(), elsewhere.gpu():
        dead = [await stage.start(model_id="dead", priority=Priority.HIGH) for _ in range(40)]
        await until(lambda: len(world.given) > 40)
        began = asyncio.get_running_loop().time()
        other = await elsewhere.start()
        await asyncio.wait_for(other.result(), 60)
        assert asyncio.get_running_loop().time() - began < 5
        for handle in dead:
            await handle.signal(names.SIG_CANCEL)
        for handle in dead:
            await handle.result()
