"""Nothing late, repeated or out of order moves a row back, and no outcome is ignored."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.contracts import AttemptRecord, CommitReceipt, TaskResult, Usage
from perdure.store import Store, StoreRefused
from perdure.store.rows import DeliveryRow, TaskFilter, TaskRow
from perdure.task.states import Priority, Status
from tests.integration.store.helpers import (
    ANN,
    CALLBACK,
    claimed,
    created,
    finished,
    now,
    outcome,
    projection,
    queued,
    row,
    running,
)

ON_THE_WAY = st.tuples(st.sampled_from([Status.QUEUED, Status.PROCESSING]), st.integers(1, 12))
ENDS = st.tuples(st.sampled_from([Status.COMPLETED, Status.FAILED, Status.CANCELLED]), st.integers(1, 12))
MANY = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)


@MANY
@given(writes=st.lists(ON_THE_WAY | ENDS, min_size=1, max_size=15))
async def test_any_order_of_writes_follows_the_two_rules(
    store: Store, writes: list[tuple[Status, int]]
) -> None:
    """The row is compared with a model of the rules after every write."""
    task = await created(store, callback_url=CALLBACK)
    status, version = Status.PENDING, 0
    for new, number in writes:
        if new.final:
            receipt = await store.tasks.commit(outcome(task, number, new))
            assert receipt.kind == ("superseded" if status.final else "committed")
            assert (receipt.delivery_id is None) == status.final
            if not status.final:
                status, version = new, max(number, version + 1)
        else:
            taken = await store.tasks.project(projection(task, number, new))
            assert taken == (not status.final and number > version)
            if taken:
                status, version = new, number
        seen = await row(store, task)
        assert (seen.status, seen.version) == (status, version)
        assert (seen.completed_at is not None) == status.final
    assert len(await deliveries(store, task)) == (1 if status.final else 0)


@MANY
@given(
    writes=st.permutations([*((Status.QUEUED, n) for n in (1, 3)), *((Status.PROCESSING, n) for n in (2, 4))])
)
async def test_writes_at_the_same_moment_leave_the_highest(
    store: Store, writes: list[tuple[Status, int]]
) -> None:
    task = await created(store)
    await asyncio.gather(*(store.tasks.project(projection(task, number, new)) for new, number in writes))
    seen = await row(store, task)
    assert (seen.status, seen.version) == (Status.PROCESSING, 4)


async def test_of_many_outcomes_at_once_one_wins(store: Store) -> None:
    task = await running(store, callback_url=CALLBACK)
    ends = [Status.COMPLETED, Status.FAILED, Status.CANCELLED] * 4
    receipts = await asyncio.gather(*(store.tasks.commit(outcome(task, 3, end)) for end in ends))
    kinds = [receipt.kind for receipt in receipts]
    assert (kinds.count("committed"), kinds.count("superseded")) == (1, 11)
    assert (await row(store, task)).status is ends[kinds.index("committed")]
    assert len(await deliveries(store, task)) == 1


async def test_a_projection_shows_everything_it_carries(store: Store) -> None:
    task = await queued(store)
    start, later = now(), now() + timedelta(seconds=30)
    attempts = [AttemptRecord(number=1, worker="w", outcome="failed", error_code="token_timeout")]
    await store.tasks.project(
        projection(
            task,
            5,
            Status.QUEUED,
            priority=Priority.HIGH,
            progress=100,
            retry_count=2,
            attempts=attempts,
            usage=Usage(prompt_tokens=3, completion_tokens=4, discarded_tokens=5),
            error_code="token_timeout",
            error_message="no token for 60 s",
            started_at=start,
            next_attempt_at=later,
        )
    )
    seen = await row(store, task)
    assert (seen.priority, seen.lane, seen.progress, seen.retry_count) == (Priority.HIGH, 1, 99, 2)
    assert seen.attempts == attempts
    assert seen.usage == Usage(prompt_tokens=3, completion_tokens=4, discarded_tokens=5)
    assert (seen.error_code, seen.error_message) == ("token_timeout", "no token for 60 s")
    assert (seen.started_at, seen.next_attempt_at, seen.queued_at) == (start, later, task.queued_at)
    await store.tasks.project(projection(task, 6, Status.PROCESSING, started_at=later))
    assert (await row(store, task)).started_at == start, "the first start stays"


async def test_final_states_belong_to_commit_and_others_to_project(store: Store) -> None:
    task = await created(store)
    with pytest.raises(ValueError, match="final"):
        await store.tasks.project(projection(task, 1, Status.FAILED))
    with pytest.raises(ValueError, match="not final"):
        await store.tasks.commit(outcome(task, 1, Status.PROCESSING))


async def test_a_commit_writes_row_result_usage_and_callback_at_once(store: Store) -> None:
    task = await running(store, callback_url=CALLBACK)
    end = outcome(task, 3)
    receipt = await store.tasks.commit(end)
    seen = await row(store, task)
    assert (seen.status, seen.version, seen.progress) == (Status.COMPLETED, 3, 100)
    assert (seen.error_code, seen.next_attempt_at, seen.completed_at) == (None, None, end.completed_at)
    assert seen.result == {"text": "the answer", "finish_reason": "stop", "model": "model", "resumed": False}
    assert seen.usage == Usage(prompt_tokens=11, completion_tokens=7, discarded_tokens=2)
    [delivery] = await deliveries(store, task)
    assert (delivery.delivery_id, delivery.event, delivery.state) == (
        receipt.delivery_id,
        "COMPLETED",
        "PENDING",
    )
    assert delivery.next_try_at is not None
    assert timedelta(seconds=110) < delivery.next_try_at - delivery.created_at <= timedelta(seconds=120)


async def test_the_callback_is_asked_for_by_event(store: Store) -> None:
    only_failures = await running(store, callback_url=CALLBACK, callback_events=(Status.FAILED,))
    assert (await store.tasks.commit(outcome(only_failures, 3))).delivery_id is None
    silent = await running(store)
    assert (await store.tasks.commit(outcome(silent, 3))).delivery_id is None
    failing = await running(store, callback_url=CALLBACK, callback_events=(Status.FAILED,))
    assert (await store.tasks.commit(outcome(failing, 3, Status.FAILED))).delivery_id is not None


async def test_a_commit_whose_answer_was_lost_can_be_repeated(store: Store) -> None:
    task = await running(store, callback_url=CALLBACK)
    end = outcome(task, 3)
    first = await store.tasks.commit(end)
    assert await store.tasks.commit(end) == first
    changed = end.model_copy(update={"completed_at": end.completed_at + timedelta(seconds=1)})
    assert await store.tasks.commit(changed) == CommitReceipt(kind="superseded")
    assert len(await deliveries(store, task)) == 1


async def test_a_commit_for_no_row(store: Store) -> None:
    task = await finished(store)
    assert await store.tasks.delete(ANN, task.task_id) == "deleted"
    assert await store.tasks.commit(outcome(task, 3)) == CommitReceipt(kind="missing")


async def test_a_commit_without_a_workflow_behind_it_is_called_back_at_once(store: Store) -> None:
    task = await running(store, callback_url=CALLBACK)
    receipt = await store.tasks.commit(outcome(task, 3), quick=False)
    assert [claim.delivery_id for claim in await store.deliveries.claim_due(5, 40)] == [receipt.delivery_id]


async def test_a_task_that_never_started_has_no_start(store: Store) -> None:
    waiting, ended = await queued(store), await queued(store)
    await store.tasks.project(projection(waiting, 2, Status.QUEUED))
    await store.tasks.commit(outcome(ended, 2, Status.CANCELLED))
    assert (await row(store, waiting)).started_at is None
    assert (await row(store, ended)).started_at is None


async def test_an_end_before_the_creation_is_moved_to_it(store: Store) -> None:
    """The clocks of two machines differ; durations are never negative."""
    task = await created(store)
    await store.tasks.project(projection(task, 1, Status.PROCESSING, started_at=now() - timedelta(hours=1)))
    await store.tasks.commit(outcome(task, 2, at=now() - timedelta(hours=1)))
    seen = await row(store, task)
    assert seen.started_at == seen.completed_at == seen.created_at


@pytest.mark.parametrize("text", ["nul \0 in it", "half a pair \ud83d"])
async def test_text_that_cannot_be_stored_is_refused_and_changes_nothing(store: Store, text: str) -> None:
    task = await running(store, callback_url=CALLBACK)
    with pytest.raises(StoreRefused):
        await store.tasks.commit(
            outcome(task, 3, Status.FAILED).model_copy(update={"projection": _failed(task, text)})
        )
    with pytest.raises(StoreRefused):
        await store.tasks.project(
            projection(task, 3, Status.QUEUED).model_copy(update={"error_message": text})
        )
    seen = await row(store, task)
    assert (seen.status, seen.version, seen.change_seq) == (Status.PROCESSING, 2, task.change_seq)
    assert await deliveries(store, task) == []
    assert (await store.tasks.commit(outcome(task, 3, Status.FAILED))).kind == "committed"


def _failed(task: TaskRow, text: str):  # type: ignore[no-untyped-def]
    end = projection(task, 3, Status.FAILED, error_code="internal")
    return end.model_copy(update={"error_message": text})


async def test_a_result_with_half_a_pair_is_refused(store: Store) -> None:
    task = await running(store)
    bad = TaskResult(text="").model_copy(update={"text": "half a pair \ud83d"})
    with pytest.raises(StoreRefused):
        await store.tasks.commit(outcome(task, 3).model_copy(update={"result": bad}))
    assert (await row(store, task)).status is Status.PROCESSING


async def test_a_result_comes_back_exactly(store: Store) -> None:
    task = await running(store)
    text = "nul \0, \U0001f600, </script>, \u2028, \r\n, " + "long " * 100_000
    calls = [{"id": "1", "function": {"arguments": '{"n":1e21,"m":9007199254740993}'}}]
    result = TaskResult(text=text, tool_calls=calls, logprobs=[0.1, 2**70])
    await store.tasks.commit(outcome(task, 3).model_copy(update={"result": result}))
    seen = (await row(store, task)).result
    assert seen is not None
    assert (seen["text"], seen["tool_calls"], seen["logprobs"]) == (text, calls, [0.1, 2**70])


# Cancel, priority, delete ---------------------------------------------------------------------------


async def test_a_cancelled_task_says_that_a_cancel_was_asked_for(store: Store) -> None:
    """Also when it was asked for in Temporal: cancelling it again gets the same answer as any other."""
    task = await finished(store, Status.CANCELLED)
    assert task.cancel_requested
    assert not (await finished(store, Status.COMPLETED)).cancel_requested
    again = await store.tasks.request_cancel(ANN, task.task_id, None)
    assert again.kind == "already_cancelled"


async def test_a_row_never_claimed_is_cancelled_in_place_with_its_callback(store: Store) -> None:
    task = await created(store, callback_url=CALLBACK)
    result = await store.tasks.request_cancel(ANN, task.task_id, "changed my mind")
    assert (result.kind, result.signal) == ("cancelled", False)
    seen = await row(store, task)
    assert (seen.status, seen.version, seen.cancel_requested) == (Status.CANCELLED, 1, True)
    assert (seen.cancel_reason, seen.completed_at) == ("changed my mind", seen.updated_at)
    [delivery] = await deliveries(store, task)
    assert (delivery.event, delivery.state) == ("CANCELLED", "PENDING")
    [claim] = await store.deliveries.claim_due(5, 40)
    assert b'"status":"CANCELLED"' in claim.body
    assert await store.dispatch.claim("local", 3, 10, 5, "x") == []


@pytest.mark.parametrize("make", [claimed, queued, running])
async def test_any_other_row_gets_the_flag_and_the_workflow_a_signal(store: Store, make) -> None:  # type: ignore[no-untyped-def]
    task = await make(store, callback_url=CALLBACK)
    for reason in ("first", "second"):
        result = await store.tasks.request_cancel(ANN, task.task_id, reason)
        assert (result.kind, result.signal) == ("requested", True)
    seen = await row(store, task)
    assert (seen.status, seen.version, seen.cancel_reason) == (task.status, task.version, "first")
    assert seen.change_seq > task.change_seq
    assert await deliveries(store, task) == []


async def test_cancelling_what_is_over(store: Store) -> None:
    for status, kind in (
        (Status.COMPLETED, "finished"),
        (Status.FAILED, "finished"),
        (Status.CANCELLED, "already_cancelled"),
    ):
        task = await finished(store, status)
        result = await store.tasks.request_cancel(ANN, task.task_id)
        assert (result.kind, result.task and result.task.status) == (kind, status)


async def test_a_cancel_and_a_claim_at_once_never_both_win(store: Store) -> None:
    """Either the row is cancelled and nobody starts it, or it is claimed and the cancel asks for a signal."""
    for _ in range(20):
        task = await created(store)
        result, rows = await asyncio.gather(
            store.tasks.request_cancel(ANN, task.task_id), store.dispatch.claim("local", 3, 1, 60, "x")
        )
        assert (result.kind, len(rows)) in {("cancelled", 0), ("requested", 1)}
        if rows:
            [told] = await store.dispatch.queued([(task.task_id, now())])
            assert told.cancel_requested


async def test_cancel_by_filter(store: Store) -> None:
    busy = await running(store, model_id="m1")
    fresh = [await created(store, model_id="m1", callback_url=CALLBACK) for _ in range(3)]
    other, foreign = await created(store, model_id="m2"), await created(store, user_id="bob", model_id="m1")
    chosen = TaskFilter(model_id="m1", statuses=(Status.PENDING, Status.PROCESSING))
    first = await store.tasks.cancel_where(ANN, chosen, "clear out", limit=2)
    rest = await store.tasks.cancel_where(ANN, chosen, "clear out")
    assert await store.tasks.cancel_where(ANN, chosen) == []
    kinds = {result.task.task_id: result.kind for result in first + rest if result.task}
    assert kinds == {task.task_id: "cancelled" for task in fresh} | {busy.task_id: "requested"}
    for task in (other, foreign):
        assert not (await row(store, task)).cancel_requested


async def test_priority_changes_while_waiting_only(store: Store) -> None:
    waiting = await created(store, priority=Priority.LOW)
    result = await store.tasks.set_priority(ANN, waiting.task_id, Priority.HIGH)
    assert (result.kind, result.signal) == ("changed", False)
    assert result.task is not None
    assert (result.task.priority, result.task.lane, result.task.version) == (Priority.HIGH, 1, 0)
    [again] = await store.dispatch.claim("local", 1, 10, 60, "x")
    assert again.task.task_id == waiting.task_id
    in_temporal = await queued(store, user_id="ann", priority=Priority.LOW)
    result = await store.tasks.set_priority(ANN, in_temporal.task_id, Priority.NORMAL)
    assert (result.kind, result.signal) == ("changed", True)
    for make in (running, finished):
        task = await make(store)
        assert (await store.tasks.set_priority(ANN, task.task_id, Priority.HIGH)).kind == "not_waiting"


async def test_delete_takes_everything_along(store: Store, database_url: str) -> None:
    task = await finished(store, callback_url=CALLBACK)
    busy = await running(store)
    assert await store.tasks.delete(ANN, busy.task_id) == "active"
    assert await store.tasks.delete(ANN, task.task_id) == "deleted"
    assert await store.tasks.delete(ANN, task.task_id) == "unknown"
    connection = await asyncpg.connect(database_url)
    for table in ("tasks", "task_payloads", "task_results", "callback_deliveries"):
        left = await connection.fetchval(f"SELECT count(*) FROM {table} WHERE task_id = $1", task.task_id)
        assert left == 0, table
    await connection.close()


async def deliveries(store: Store, task: TaskRow) -> list[DeliveryRow]:
    found = await store.deliveries.list_for_task(ANN, task.task_id)
    assert found is not None
    return found
