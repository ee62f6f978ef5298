"""The reconciler's repairs, retention, the ledger, figures, keys, secrets and workers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from perdure.contracts import AttemptRecord, Usage
from perdure.store import Store, StoreRefused
from perdure.store.rows import Idempotency, NewKey, NewTry, UsageRow, WorkerReport
from perdure.task.states import Priority, Status
from tests.integration.store.helpers import (
    ADMIN,
    ANN,
    BOB,
    CALLBACK,
    claimed,
    created,
    finished,
    new_task,
    now,
    outcome,
    projection,
    queued,
    row,
    running,
)

DAY = 86_400.0


async def age(url: str, table: str, column: str, seconds: float) -> None:
    """Lets time pass for a column of every row."""
    connection = await asyncpg.connect(url)
    await connection.execute(
        f"UPDATE {table} SET {column} = {column} - make_interval(secs => $1)", float(seconds)
    )
    await connection.close()


# Reconciliation -------------------------------------------------------------------------------------


async def test_silent_rows_are_those_that_a_workflow_should_have_written(
    store: Store, database_url: str
) -> None:
    waiting, busy = await queued(store), await running(store)
    await created(store)
    await claimed(store)
    await finished(store)
    assert await store.maintenance.silent(60) == []
    await age(database_url, "tasks", "updated_at", 61)
    assert {task.task_id for task in await store.maintenance.silent(60)} == {waiting.task_id, busy.task_id}
    assert await store.maintenance.silent(60) == [], "a pass does not look at the same rows again"
    await age(database_url, "tasks", "checked_at", 61)
    assert len(await store.maintenance.silent(60, limit=1)) == 1
    await store.tasks.project(projection(waiting, 5, Status.PROCESSING))
    await store.tasks.project(projection(busy, 5, Status.PROCESSING))
    assert await store.maintenance.silent(60) == []


async def test_cancels_are_signalled_again(store: Store, database_url: str) -> None:
    task = await running(store)
    await claimed(store)
    await store.tasks.request_cancel(ANN, task.task_id)
    assert await store.maintenance.cancels_due(5) == []
    await age(database_url, "tasks", "cancel_signalled_at", 6)
    assert [each.task_id for each in await store.maintenance.cancels_due(5)] == [task.task_id]
    assert await store.maintenance.cancels_due(5) == []
    await age(database_url, "tasks", "cancel_signalled_at", 6)
    await store.tasks.commit(outcome(task, 3, Status.CANCELLED))
    assert await store.maintenance.cancels_due(5) == []


async def test_a_lost_workflow_is_restarted_once_and_then_failed(store: Store, database_url: str) -> None:
    task = await running(store, callback_url=CALLBACK)
    first = await store.maintenance.note_missing(task.task_id, 2)
    assert first is not None
    assert (first.age, first.restarts) == (0, 0)
    await age(database_url, "tasks", "missing_since", 60)
    second = await store.maintenance.note_missing(task.task_id, 2)
    assert second is not None
    assert second.age >= 60
    restarts = await asyncio.gather(*(store.maintenance.restart(task.task_id, 2) for _ in range(4)))
    [again] = [each for each in restarts if each]
    assert (again.params, again.version, again.restarts) == ({"messages": []}, 2, 1)
    missing = await store.maintenance.note_missing(task.task_id, 2)
    assert missing is not None
    assert (missing.age, missing.restarts) == (0, 1)
    receipt = await store.maintenance.fail(task.task_id, 2, "internal", "the engine lost it twice")
    assert receipt.kind == "committed"
    seen = await row(store, task)
    assert (seen.status, seen.version, seen.error_code) == (Status.FAILED, 3, "internal")
    assert [claim.delivery_id for claim in await store.deliveries.claim_due(5, 40)] == [receipt.delivery_id]


async def test_repairs_of_a_row_that_moved_on_change_nothing(store: Store) -> None:
    task = await running(store)
    assert await store.maintenance.note_missing(task.task_id, 2)
    await store.tasks.project(projection(task, 3, Status.QUEUED))
    assert await store.maintenance.note_missing(task.task_id, 2) is None
    assert await store.maintenance.restart(task.task_id, 2) is None
    assert (await store.maintenance.fail(task.task_id, 2, "internal", "x")).kind == "superseded"
    mark = await store.maintenance.note_missing(task.task_id, 3)
    assert mark is not None
    assert mark.age == 0, "the workflow's write took the note away"
    await store.tasks.commit(outcome(task, 4))
    assert (await store.maintenance.fail(task.task_id, 4, "internal", "x")).kind == "superseded"
    assert (await store.maintenance.fail("unknown", 4, "internal", "x")).kind == "missing"
    assert (await row(store, task)).status is Status.COMPLETED


async def test_marks_never_go_back(store: Store) -> None:
    assert await store.maintenance.mark("visibility") is None
    late = now()
    await store.maintenance.set_mark("visibility", late)
    await store.maintenance.set_mark("visibility", late - timedelta(hours=1))
    assert await store.maintenance.mark("visibility") == late


# Retention and the ledger ---------------------------------------------------------------------------


async def test_retention_takes_what_is_old_and_waits_for_nothing(store: Store, database_url: str) -> None:
    old = [await finished(store) for _ in range(5)]
    waiting = await finished(store, callback_url=CALLBACK)
    await age(database_url, "tasks", "completed_at", 31 * DAY)
    young, busy = await finished(store), await running(store)
    assert (await store.maintenance.purge(30, limit=3)).tasks == 3
    assert (await store.maintenance.purge(30, limit=3)).tasks == 2
    assert (await store.maintenance.purge(30, limit=3)).total == 0
    for task in old:
        assert await store.tasks.by_id_any(task.task_id) is None
    for task in (waiting, young, busy):
        assert await store.tasks.by_id_any(task.task_id) is not None
    [delivery] = await store.deliveries.list_for_task(ANN, waiting.task_id) or []
    claim = await store.deliveries.claim(delivery.delivery_id, 40)
    assert claim is not None
    await store.deliveries.record_try(claim, NewTry("quick", now(), 1, 200), "delivered")
    assert (await store.maintenance.purge(30)).tasks == 1


async def test_retention_at_once_by_two(store: Store, database_url: str) -> None:
    for _ in range(20):
        await finished(store)
    await age(database_url, "tasks", "completed_at", 31 * DAY)
    passes = await asyncio.gather(*(store.maintenance.purge(30, limit=7) for _ in range(4)))
    assert sum(each.tasks for each in passes) == 20
    assert sum(each.tasks for each in await ledger(store)) == 20


async def test_retention_of_keys_workers_and_secrets(store: Store, database_url: str) -> None:
    await store.tasks.create(new_task(), Idempotency("ann", "r", "old", b"f", ttl_seconds=-1))
    await store.tasks.create(new_task(), Idempotency("ann", "r", "new", b"f"))
    await store.workers.report([WorkerReport("w", "local", ("m",), 2, 0)])
    await age(database_url, "workers_seen", "seen_at", 1.1 * DAY)
    await store.secrets.ensure("s1", "ann", b"1")
    await store.secrets.rotate("s2", "ann", b"2", -1)
    purged = await store.maintenance.purge(30)
    assert (purged.tasks, purged.keys, purged.workers, purged.secrets) == (0, 1, 1, 1)
    assert (await store.maintenance.purge(30)).total == 0


async def ledger(store: Store, **values: object) -> list[UsageRow]:
    week = timedelta(days=40)
    return await store.stats.usage(ADMIN, now() - week, now() + week, **values)  # type: ignore[arg-type]


async def test_the_ledger_is_the_same_before_and_after_a_delete(store: Store) -> None:
    for user, model in (("ann", "m1"), ("ann", "m1"), ("ann", "m2"), ("bob", "m1")):
        await finished(store, user_id=user, model_id=model)
    never = await created(store, model_id="m1")
    await store.tasks.request_cancel(ANN, never.task_id)
    await running(store, model_id="m1")  # counts when it ends
    before = await ledger(store)
    assert [(each.user_id, each.model_id, each.tasks, each.attempts) for each in before] == [
        ("ann", "m1", 3, 2),
        ("ann", "m2", 1, 1),
        ("bob", "m1", 1, 1),
    ]
    assert (before[0].prompt_tokens, before[0].completion_tokens, before[0].discarded_tokens) == (22, 14, 4)
    assert before[0].queue_seconds > 0
    assert before[0].run_seconds > 0
    today = now()
    assert before[0].day == datetime(today.year, today.month, today.day, tzinfo=UTC)
    page = await store.tasks.list(ADMIN)
    for task in page.tasks[2:4]:
        await store.tasks.delete(ADMIN, task.task_id)
    after = await ledger(store)
    assert [rounded(each) for each in after] == [rounded(each) for each in before]
    while (await store.maintenance.purge(0)).total:
        pass
    assert [rounded(each) for each in await ledger(store)] == [rounded(each) for each in before]


def rounded(usage: UsageRow) -> tuple[object, ...]:
    return (
        *(usage.user_id, usage.model_id, usage.day, usage.tasks, usage.attempts, usage.prompt_tokens),
        *(usage.completion_tokens, usage.discarded_tokens),
        *(round(usage.queue_seconds, 5), round(usage.run_seconds, 5)),
    )


async def test_the_ledger_by_user_model_and_time(store: Store) -> None:
    for user, model in (("ann", "m1"), ("ann", "m2"), ("bob", "m1")):
        await finished(store, user_id=user, model_id=model)
    assert len(await ledger(store, user_id="ann")) == 2
    assert len(await ledger(store, model_id="m1")) == 2
    mine = await store.stats.usage(BOB, now() - timedelta(days=1), now() + timedelta(days=1), user_id="ann")
    assert [each.user_id for each in mine] == ["bob"]
    assert await store.stats.usage(ADMIN, now() + timedelta(days=1), now() + timedelta(days=2)) == []


async def test_a_task_without_known_tokens_counts_as_a_task(store: Store) -> None:
    task = await running(store)
    end = outcome(task, 3, usage=Usage(), attempts=[AttemptRecord(number=1), AttemptRecord(number=2)])
    await store.tasks.commit(end)
    [usage] = await ledger(store)
    assert (usage.tasks, usage.attempts, usage.prompt_tokens) == (1, 2, 0)


# Figures --------------------------------------------------------------------------------------------


async def test_queue_figures(store: Store, database_url: str) -> None:
    assert await store.stats.queues() == []
    await queued(store)
    await running(store)
    await created(store, priority=Priority.HIGH, pool="other")
    await age(database_url, "tasks", "created_at", 100)
    await created(store)
    await created(store, not_before=now() + timedelta(hours=1))
    await finished(store, priority=Priority.LOW)
    figures = {(each.pool, each.priority): each for each in await store.stats.queues()}
    assert set(figures) == {("local", Priority.NORMAL), ("other", Priority.HIGH)}
    normal = figures["local", Priority.NORMAL]
    assert (normal.pending, normal.queued, normal.running, normal.scheduled, normal.waiting) == (
        1,
        1,
        1,
        1,
        2,
    )
    assert 100 <= normal.oldest_wait < 160
    counts = await store.stats.by_state()
    assert (counts[Status.PENDING], counts[Status.QUEUED], counts[Status.PROCESSING]) == (3, 1, 1)


async def test_waiting_counts_stop_at_what_is_asked(store: Store) -> None:
    await store.tasks.create_many(
        [new_task() for _ in range(5)] + [new_task(user_id="bob", priority=Priority.LOW)]
    )
    await queued(store, priority=Priority.HIGH)
    await running(store)
    assert await store.stats.waiting("local") == {Priority.HIGH: 1, Priority.NORMAL: 5, Priority.LOW: 1}
    assert (await store.stats.waiting("local", at_most=2))[Priority.NORMAL] == 2
    assert (await store.stats.waiting_of("ann"), await store.stats.waiting_of("ann", at_most=3)) == (6, 3)


async def test_how_many_are_ahead(store: Store) -> None:
    low = await created(store, priority=Priority.LOW)
    first, second = await created(store), await created(store)
    await created(store, not_before=now() + timedelta(hours=1), priority=Priority.HIGH)
    await created(store, pool="other", priority=Priority.HIGH)
    high = await queued(store, priority=Priority.HIGH)
    ahead = [await store.stats.ahead(ANN, task.task_id) for task in (high, first, second, low)]
    assert ahead == [0, 1, 2, 3]
    assert await store.stats.ahead(ANN, low.task_id, at_most=2) == 2
    assert await store.stats.ahead(BOB, low.task_id) is None
    assert await store.stats.ahead(ANN, (await finished(store)).task_id) is None


async def test_service_times(store: Store) -> None:
    assert (await store.stats.service_times("local")).count == 0
    for seconds in (1.0, 2.0, 9.0):
        task = await running(store)
        assert task.started_at is not None
        await store.tasks.commit(outcome(task, 3, at=task.started_at + timedelta(seconds=seconds)))
    await finished(store, Status.FAILED)
    times = await store.stats.service_times("local")
    assert (times.count, times.mean, times.p50) == (3, 4.0, 2.0)
    assert times.p95 == pytest.approx(8.3)
    assert (await store.stats.service_times("local", last=1)).p50 in {1.0, 2.0, 9.0}
    assert (await store.stats.service_times("other")).count == 0


async def test_callbacks_waiting(store: Store) -> None:
    await finished(store, callback_url=CALLBACK)
    assert await store.stats.callbacks_waiting() == 1


# Keys, secrets, workers -----------------------------------------------------------------------------


async def test_keys(store: Store, database_url: str) -> None:
    new = NewKey("k1", "ann", b"digest", frozenset({"tasks:read", "tasks:write"}), act_as=True, name="laptop")
    made = await store.keys.create(new)
    assert (made.digest, made.scopes, made.act_as, made.name, made.live) == (
        b"digest",
        new.scopes,
        True,
        "laptop",
        True,
    )
    with pytest.raises(StoreRefused):
        await store.keys.create(new)
    await store.keys.create(NewKey("k2", "bob", b"d", frozenset(), expires_at=now() - timedelta(seconds=1)))
    expired = await store.keys.by_id("k2")
    assert expired is not None
    assert not expired.live
    assert {key.key_id for key in await store.keys.list()} == {"k1", "k2"}
    assert [key.key_id for key in await store.keys.list("bob")] == ["k2"]
    assert [await store.keys.by_id(name) for name in ("", "k3", "\0", "é")] == [None] * 4
    await store.keys.touch(["k1", "k3"])
    first = await store.keys.by_id("k1")
    await store.keys.touch(["k1"])
    again = await store.keys.by_id("k1")
    assert first is not None
    assert first.last_used_at is not None
    assert again == first, "written once a minute at most"
    await age(database_url, "api_keys", "last_used_at", 61)
    await store.keys.touch(["k1"])
    later = await store.keys.by_id("k1")
    assert later is not None
    assert later.last_used_at is not None
    assert later.last_used_at > first.last_used_at
    assert [await store.keys.revoke(name) for name in ("k1", "k1", "k3")] == [True, False, False]
    revoked = await store.keys.by_id("k1")
    assert revoked is not None
    assert not revoked.live


async def test_secrets_overlap_while_they_rotate(store: Store) -> None:
    assert await store.secrets.active("ann") == []
    made = await asyncio.gather(*(store.secrets.ensure(f"s{n}", "ann", bytes([n])) for n in range(8)))
    assert len({each.secret_id for each in made}) == 1
    first = made[0].secret_id
    await store.secrets.rotate("r1", "ann", b"new", 3600)
    await store.secrets.rotate("r2", "ann", b"newer", 0)  # r1 goes at once; the first keeps its hour
    active = await store.secrets.active("ann")
    assert [each.secret_id for each in active] == ["r2", first]
    assert (active[0].sealed, active[0].retires_at) == (b"newer", None)
    assert active[1].retires_at is not None
    assert await store.secrets.active("bob") == []
    assert await store.secrets.users() == ["ann"]


async def test_rotations_at_once_leave_one_current_secret(store: Store) -> None:
    await asyncio.gather(*(store.secrets.rotate(f"r{n}", "ann", b"x", 3600) for n in range(6)))
    active = await store.secrets.active("ann")
    assert (len(active), sum(each.retires_at is None for each in active)) == (6, 1)


async def test_workers_seen(store: Store, database_url: str) -> None:
    await store.workers.report([])
    await store.workers.report(
        [WorkerReport("w1", "local", ("a", "b"), 4, 1), WorkerReport("w2", "local", (), 2, 0)]
    )
    await age(database_url, "workers_seen", "seen_at", 31)
    assert await store.workers.live(30) == []
    same = WorkerReport("w1", "local", ("a",), 4, 4, draining=True)
    await store.workers.report([same, same])
    [live] = await store.workers.live(30)
    assert (live.worker, live.models, live.slots, live.in_use, live.draining) == ("w1", ("a",), 4, 4, True)
    assert len(await store.workers.live(3600)) == 2
