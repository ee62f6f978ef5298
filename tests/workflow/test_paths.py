"""Each way that a task can take, with fake activities on a real server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import WorkflowHandle
from temporalio.exceptions import CancelledError as TemporalCancelled

from perdure import names
from perdure.contracts import AttemptRecord, Beat, GenerateInput, GenerateResult, Snapshot, Usage
from perdure.task.states import Priority, Status
from tests.support.waiting import until
from tests.workflow.conftest import Stage, World, announce, beat_until, fault, generated, until_cancelled


async def test_a_quick_task_commits_without_an_intermediate_row(stage: Stage, world: World) -> None:
    world.script = [lambda given: _later(generated(given))]
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert outcome.projection.status is Status.COMPLETED
    assert outcome.projection.version == 3
    assert outcome.projection.progress == 100
    assert outcome.result is not None
    assert outcome.result.text == "done"
    assert world.rows == []
    assert world.deliveries == []
    (attempt,) = outcome.projection.attempts
    assert (attempt.number, attempt.worker, attempt.outcome) == (1, "w1", "completed")


async def test_an_announced_start_is_written_as_processing(stage: Stage, world: World) -> None:
    async def run(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        await beat_until(lambda: bool(world.rows))
        return generated(given)

    world.script = [run]
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert [row.status for row in world.rows] == [Status.PROCESSING]
    assert world.rows[0].version == 2
    assert outcome.projection.version == 3
    assert outcome.projection.started_at == world.rows[0].started_at


async def test_a_fault_is_retried_from_its_checkpoint_after_back_off(stage: Stage, world: World) -> None:
    beat = Beat(attempt=1, text="one two", output_tokens=2, progress=20)

    async def first(given: GenerateInput) -> GenerateResult:
        raise fault("stream_truncated", beat=beat, usage=Usage(completion_tokens=2))

    async def second(given: GenerateInput) -> GenerateResult:
        assert given.checkpoint is not None
        return generated(given, given.checkpoint.text + " three")  # type: ignore[operator]  # has text

    world.script = [first, second]
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert outcome.result is not None
    assert outcome.result.text == "one two three"
    assert outcome.projection.retry_count == 1
    assert outcome.projection.usage.completion_tokens == 3
    assert outcome.projection.error_code is None
    assert [a.outcome for a in outcome.projection.attempts] == ["failed", "completed"]
    assert [a.error_code for a in outcome.projection.attempts] == ["stream_truncated", None]
    assert world.rows[0].status is Status.QUEUED
    assert world.rows[0].next_attempt_at is not None
    assert world.rows[0].error_code == "stream_truncated"


async def test_retries_are_used_up(stage: Stage, world: World) -> None:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("token_timeout")

    world.script = [fail]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=1))
    assert outcome.projection.status is Status.FAILED
    assert outcome.projection.error_code == "token_timeout"
    assert len(world.given) == 2


async def test_a_permanent_fault_ends_at_once(stage: Stage, world: World) -> None:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("invalid_request", retryable=False)

    world.script = [fail]
    world.delivery_id = "msg_1"
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert outcome.projection.status is Status.FAILED
    assert len(world.given) == 1
    assert [d.delivery_id for d in world.deliveries] == ["msg_1"]


async def test_refusals_within_patience_cost_no_retry(stage: Stage, world: World) -> None:
    async def refuse(given: GenerateInput) -> GenerateResult:
        raise fault("upstream_unavailable", refused=True)

    world.script = [refuse, refuse, lambda given: _later(generated(given))]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=0))
    assert outcome.projection.status is Status.COMPLETED
    assert outcome.projection.retry_count == 0


async def test_refusals_beyond_patience_count(stage: Stage, world: World) -> None:
    async def refuse(given: GenerateInput) -> GenerateResult:
        raise fault("upstream_unavailable", refused=True)

    world.script = [refuse]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=0, unavailable_patience=0))
    assert outcome.projection.status is Status.FAILED
    assert outcome.projection.error_code == "upstream_unavailable"


async def test_a_drain_costs_nothing_and_goes_on_ahead(stage: Stage, world: World) -> None:
    async def drain(given: GenerateInput) -> GenerateResult:
        return GenerateResult(kind="drained", beat=Beat(attempt=1, text="a b", output_tokens=2), worker="w1")

    world.script = [drain, lambda given: _later(generated(given, "a b c"))]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_retries=0))
    assert outcome.projection.status is Status.COMPLETED
    assert outcome.projection.retry_count == 0
    assert [a.outcome for a in outcome.projection.attempts] == ["drained", "completed"]
    assert [p.priority_key for p in world.priorities] == [3, 2]
    assert [p.fairness_key for p in world.priorities] == ["ann", "ann"]


async def test_lost_workers_have_a_budget_of_their_own(stage: Stage, world: World) -> None:
    async def vanish(given: GenerateInput) -> GenerateResult:
        activity.heartbeat(Beat(attempt=given.attempt, text="a b", output_tokens=2))
        await asyncio.sleep(0.3)
        await asyncio.Event().wait()  # falls silent
        raise AssertionError

    world.script = [vanish]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(max_lost=1, max_retries=0, heartbeat_seconds=1))
    assert outcome.projection.status is Status.FAILED
    assert outcome.projection.error_code == "worker_lost"
    assert [a.outcome for a in outcome.projection.attempts] == ["lost", "lost"]
    assert world.given[1].checkpoint is not None
    assert world.given[1].checkpoint.text == "a b"
    assert outcome.projection.usage.completion_tokens == 4


async def test_cancel_while_queued(stage: Stage, world: World) -> None:
    handle = await stage.start()
    await asyncio.sleep(0)
    await handle.signal(names.SIG_CANCEL, "no longer needed")
    outcome = await stage.end(handle)
    assert outcome.projection.status is Status.CANCELLED
    assert world.given == []
    assert outcome.result is None


@pytest.mark.parametrize("how", ["signal", "signal-empty", "temporal"])
async def test_cancel_while_running_keeps_the_partial_text(stage: Stage, world: World, how: str) -> None:
    async def run(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            return GenerateResult(kind="cancelled", beat=Beat(attempt=1, text="so far", output_tokens=2))
        raise AssertionError

    world.script = [run]
    async with stage.gpu():
        handle = await stage.start()
        await world.started.wait()
        if how == "temporal":
            await handle.cancel()
        else:
            await handle.signal(names.SIG_CANCEL, *([{"reason": "x"}] if how == "signal" else []))
        outcome = await stage.end(handle)
    assert outcome.projection.status is Status.CANCELLED
    assert outcome.result is not None
    assert outcome.result.text == "so far"
    assert outcome.take_last_beat is False
    assert outcome.projection.attempts[0].outcome == "cancelled"


async def test_a_worker_that_does_not_answer_a_cancel(stage: Stage, world: World) -> None:
    release = asyncio.Event()

    async def deaf(given: GenerateInput) -> GenerateResult:
        while not release.is_set():
            activity.heartbeat(Beat(attempt=1, text="seen"))
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                continue
        raise TemporalCancelled("late")

    world.script = [deaf]
    async with stage.gpu():
        handle = await stage.start(heartbeat_seconds=30)
        await world.started.wait()
        began = asyncio.get_running_loop().time()
        await handle.signal(names.SIG_CANCEL, "stop")
        outcome = await stage.end(handle)
        took = asyncio.get_running_loop().time() - began
        release.set()
    assert outcome.projection.status is Status.CANCELLED
    assert outcome.take_last_beat is True
    assert took < 15  # 4 s and what a loaded machine adds


async def test_cancel_during_back_off(stage: Stage, world: World) -> None:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("rate_limited", retry_after=300)

    world.script = [fail]
    async with stage.gpu():
        handle = await stage.start()
        await until(lambda: bool(world.rows))
        await handle.signal(names.SIG_CANCEL)
        outcome = await stage.end(handle)
    assert outcome.projection.status is Status.CANCELLED


async def test_a_cancel_changes_nothing_once_committing(stage: Stage, world: World) -> None:
    world.script = [lambda given: _later(generated(given))]
    world.commit_errors = 3
    async with stage.gpu():
        handle = await stage.start()
        await until(lambda: world.commit_errors < 3)
        await handle.cancel()
        await handle.signal(names.SIG_CANCEL)
        outcome = await stage.end(handle)
    assert outcome.projection.status is Status.COMPLETED


async def test_cancel_before_the_first_step(stage: Stage, world: World) -> None:
    outcome = await stage.end(await stage.start(cancel_requested=True))
    assert outcome.projection.status is Status.CANCELLED
    assert outcome.projection.attempts == []


async def test_the_queue_deadline_ends_a_task_that_no_worker_takes(stage: Stage, world: World) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1)
    outcome = await stage.end(await stage.start(queue_deadline=soon))
    assert outcome.projection.status is Status.FAILED
    assert outcome.projection.error_code == "queue_expired"


async def test_the_total_deadline_stops_a_running_attempt(stage: Stage, world: World) -> None:
    async def run(given: GenerateInput) -> GenerateResult:
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            return GenerateResult(kind="cancelled", beat=Beat(attempt=1, text="part", output_tokens=1))
        raise AssertionError

    world.script = [run]
    async with stage.gpu():
        outcome = await stage.end(
            await stage.start(total_deadline=datetime.now(UTC) + timedelta(seconds=1.5))
        )
    assert outcome.projection.status is Status.FAILED
    assert outcome.projection.error_code == "deadline_exceeded"
    assert outcome.result is not None
    assert outcome.result.text == "part"


async def test_a_wait_that_would_pass_the_deadline_ends_at_once(stage: Stage, world: World) -> None:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("rate_limited", retry_after=300)

    world.script = [fail]
    async with stage.gpu():
        outcome = await stage.end(await stage.start(total_deadline=datetime.now(UTC) + timedelta(seconds=60)))
    assert outcome.projection.error_code == "deadline_exceeded"
    assert "rate_limited" in (outcome.projection.error_message or "")


async def test_a_waiting_task_ages_to_a_better_lane(stage: Stage, world: World) -> None:
    world.script = [lambda given: _later(generated(given))]
    handle = await stage.start(
        priority=Priority.LOW, scheduling={"mode": "strict", "max_wait": 0.4}, created_at=datetime.now(UTC)
    )
    await _scheduled(handle, 3)
    async with stage.gpu():
        outcome = await stage.end(handle)
    assert world.priorities[0].priority_key == 1
    assert [a.number for a in outcome.projection.attempts] == [1]


async def test_a_change_of_priority_moves_a_waiting_task(stage: Stage, world: World) -> None:
    world.script = [lambda given: _later(generated(given))]
    handle = await stage.start()
    await _scheduled(handle, 1)
    await handle.signal(names.SIG_SET_PRIORITY, "HIGH")
    await handle.signal(names.SIG_SET_PRIORITY, "NONSENSE")
    await _scheduled(handle, 2)
    async with stage.gpu():
        await stage.end(handle)
    assert [p.priority_key for p in world.priorities] == [1]
    assert [g.attempt for g in world.given] == [1]


async def test_a_row_that_cannot_be_written_is_brought_later(stage: Stage, world: World) -> None:
    async def run(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        await beat_until(lambda: bool(world.rows))
        return generated(given)

    world.script = [run]
    world.row_errors = 3
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert [row.version for row in world.rows] == [2]
    assert outcome.projection.status is Status.COMPLETED


async def test_an_end_is_committed_although_no_projection_ever_landed(stage: Stage, world: World) -> None:
    async def first(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        before = world.row_errors
        await beat_until(lambda: world.row_errors < before - 2)
        raise fault("token_timeout")

    world.script = [first, lambda given: _later(generated(given))]
    world.row_errors = 1_000_000
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert outcome.projection.status is Status.COMPLETED
    assert world.rows == []


async def test_a_restart_goes_on_from_the_row(stage: Stage, world: World) -> None:
    world.script = [lambda given: _later(generated(given))]
    async with stage.gpu():
        outcome = await stage.end(
            await stage.start(
                base_version=7,
                retry_count=2,
                attempts=[AttemptRecord(number=1), AttemptRecord(number=2)],
                usage=Usage(completion_tokens=10),
            )
        )
    assert outcome.projection.version == 10
    assert [a.number for a in outcome.projection.attempts] == [1, 2, 3]
    assert outcome.projection.usage.completion_tokens == 11
    assert [row.version for row in world.rows][:1] == [8]


async def test_a_dead_receiver_does_not_fail_the_task(stage: Stage, world: World) -> None:
    async def refuse() -> None:
        raise RuntimeError("down")

    world.script = [lambda given: _later(generated(given))]
    world.delivery_id, world.callback = "msg_2", refuse
    async with stage.gpu():
        handle = await stage.start()
        await stage.end(handle)
    assert 1 < len(world.deliveries) <= 5


async def test_the_snapshot_answers_the_live_state(stage: Stage, world: World) -> None:
    handle = await stage.start()
    await _scheduled(handle, 1)
    snapshot = await handle.query(names.QUERY_SNAPSHOT, result_type=Snapshot)
    assert snapshot.projection.status is Status.QUEUED
    assert snapshot.waiting == "slot"
    await handle.signal(names.SIG_CANCEL)
    await stage.end(handle)


async def test_large_params_are_not_copied_into_each_attempt(stage: Stage, world: World) -> None:
    world.script = [lambda given: _later(generated(given))]
    async with stage.gpu():
        await stage.end(await stage.start(params={"messages": [{"role": "user", "content": "x" * 20_000}]}))
    assert world.given[0].params is None


async def test_signals_of_an_old_attempt_are_ignored(stage: Stage, world: World) -> None:
    async def run(given: GenerateInput) -> GenerateResult:
        handle = stage.client.get_workflow_handle(given.task_id)
        await handle.signal(names.SIG_ATTEMPT_STARTED, args=[99, "ghost", datetime.now(UTC)])
        return generated(given)

    world.script = [run]
    async with stage.gpu():
        outcome = await stage.end(await stage.start())
    assert outcome.projection.attempts[0].worker == "w1"
    assert world.rows == []


async def _later(result: GenerateResult) -> GenerateResult:
    return result


async def _scheduled(handle: WorkflowHandle[Any, Any], times: int) -> None:
    """Waits until `generate` was put on its queue that often."""

    async def enough() -> bool:
        events = (await handle.fetch_history()).events
        return sum(e.HasField("activity_task_scheduled_event_attributes") for e in events) >= times

    await until(enough)
