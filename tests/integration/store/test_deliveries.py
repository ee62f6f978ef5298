"""Deliveries: one try at a time, nothing forgotten, nothing sent twice by our own doing."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import asyncpg
import pytest

from perdure.store import Store
from perdure.store.rows import DeliveryClaim, DeliveryRow, NewTry, TaskRow, TryKind
from perdure.task.states import Status
from tests.integration.store.helpers import (
    ADMIN,
    ANN,
    BOB,
    CALLBACK,
    created,
    finished,
    now,
    outcome,
    running,
)

ORIGIN = "https://receiver.example"


async def delivery(store: Store, task: TaskRow) -> DeliveryRow:
    found = await store.deliveries.list_for_task(ADMIN, task.task_id)
    assert found is not None
    [one] = found
    return one


async def pending(store: Store, **values: object) -> DeliveryRow:
    """The delivery of a task that has just ended."""
    return await delivery(store, await finished(store, **({"callback_url": CALLBACK} | values)))


async def claim(store: Store, one: DeliveryRow) -> DeliveryClaim:
    claim = await store.deliveries.claim(one.delivery_id, 40)
    assert claim is not None
    return claim


def tried(kind: TryKind = "quick", **values: object) -> NewTry:
    return NewTry(**({"kind": kind, "at": now(), "duration_ms": 12, "status": 500} | values))  # type: ignore[arg-type]


async def age(url: str, seconds: float, table: str = "callback_deliveries", column: str = "next_due") -> None:
    """Lets time pass for a column of every row."""
    connection = await asyncpg.connect(url)
    await connection.execute(
        f"UPDATE {table} SET {column} = {column} - make_interval(secs => $1)", float(seconds)
    )
    await connection.close()


async def test_a_claim_holds_the_frozen_body_and_keeps_others_out(store: Store) -> None:
    one = await pending(store)
    first, *rest = await asyncio.gather(*(store.deliveries.claim(one.delivery_id, 40) for _ in range(6)))
    claims = [each for each in (first, *rest) if each]
    assert len(claims) == 1
    assert (claims[0].tries, claims[0].slow_tries, claims[0].url, claims[0].user_id) == (
        0,
        0,
        CALLBACK,
        "ann",
    )
    assert claims[0].body.startswith(b'{"task_id":"' + one.task_id.encode())
    assert await store.deliveries.claim_due(10, 40) == []
    assert await store.deliveries.claim("unknown", 40) is None


async def test_every_try_sends_the_same_bytes(store: Store) -> None:
    one = await pending(store)
    bodies = set()
    for _ in range(3):
        held = await claim(store, one)
        bodies.add(held.body)
        assert await store.deliveries.record_try(held, tried(), "failed", 1) == "RETRYING"
    assert len(bodies) == 1


async def test_delivered_is_the_end(store: Store) -> None:
    one = await pending(store)
    held = await claim(store, one)
    assert await store.deliveries.record_try(held, tried(status=204), "delivered") == "DELIVERED"
    assert await store.deliveries.claim(one.delivery_id, 40) is None
    assert await store.deliveries.state(one.delivery_id) == "DELIVERED"
    seen = await delivery(store, await task_of(store, one))
    assert (seen.state, seen.tries_made, seen.next_try_at) == ("DELIVERED", 1, None)
    assert [(each.number, each.kind, each.status) for each in seen.tries] == [(1, "quick", 204)]
    assert await store.deliveries.state("unknown") is None


async def task_of(store: Store, one: DeliveryRow) -> TaskRow:
    task = await store.tasks.by_id_any(one.task_id)
    assert task is not None
    return task


async def test_a_failed_try_plans_the_next(store: Store, database_url: str) -> None:
    one = await pending(store)
    await store.deliveries.record_try(
        await claim(store, one), tried(error="HTTP 500", address="::1"), "failed", 60
    )
    seen = await delivery(store, await task_of(store, one))
    assert seen.next_try_at is not None
    assert timedelta(seconds=55) < seen.next_try_at - now() <= timedelta(seconds=60)
    assert (seen.tries[0].error, seen.tries[0].address) == ("HTTP 500", "::1")
    assert await store.deliveries.claim_due(10, 40) == []
    await age(database_url, 60)
    [held] = await store.deliveries.claim_due(10, 40)
    assert (held.tries, held.slow_tries) == (1, 0)
    await store.deliveries.record_try(held, tried("sweep"), "failed", 300)
    await age(database_url, 300)
    [held] = await store.deliveries.claim_due(10, 40)
    assert (held.tries, held.slow_tries) == (2, 1)


async def test_a_failure_without_a_next_try_is_dead_and_kept(store: Store) -> None:
    one = await pending(store)
    assert await store.deliveries.record_try(await claim(store, one), tried(), "failed") == "DEAD"
    assert await store.deliveries.claim(one.delivery_id, 40) is None
    assert (await store.deliveries.counts())["DEAD"] == 1


async def test_a_quick_claim_keeps_the_sweep_away(store: Store, database_url: str) -> None:
    one = await pending(store)
    await age(database_url, 119)
    await claim(store, one)
    await age(database_url, 100, column="leased_until")  # the worker died in the try
    assert await store.deliveries.claim_due(10, 40) == []
    await age(database_url, 120)
    [held] = await store.deliveries.claim_due(10, 40)
    assert held.delivery_id == one.delivery_id


async def test_what_nobody_tried_is_due_after_two_minutes(store: Store, database_url: str) -> None:
    one = await pending(store)
    assert await store.deliveries.claim_due(10, 40) == []
    await age(database_url, 120)
    assert [held.delivery_id for held in await store.deliveries.claim_due(10, 40)] == [one.delivery_id]


async def test_a_sweep_that_dies_leaves_its_claims_due(store: Store, database_url: str) -> None:
    one = await pending(store)
    await age(database_url, 120)
    [dead] = await store.deliveries.claim_due(10, 40)
    await age(database_url, 40)
    await age(database_url, 40, column="leased_until")
    [held] = await store.deliveries.claim_due(10, 40)
    assert (held.delivery_id, held.token > dead.token) == (one.delivery_id, True)
    # The first was only slow. Its failure is logged; the state is its successor's.
    assert await store.deliveries.record_try(dead, tried("sweep"), "failed") == "PENDING"
    assert await store.deliveries.claim(one.delivery_id, 40) is None, "the successor's lease still holds"
    assert await store.deliveries.record_try(held, tried("sweep"), "failed", 60) == "RETRYING"
    assert (await delivery(store, await task_of(store, one))).tries_made == 2


async def test_a_late_success_counts_whoever_holds_the_lease(store: Store, database_url: str) -> None:
    one = await pending(store)
    slow = await claim(store, one)
    await age(database_url, 100, column="leased_until")
    successor = await claim(store, one)
    assert await store.deliveries.record_try(slow, tried(status=200), "delivered") == "DELIVERED"
    assert await store.deliveries.record_try(successor, tried(), "failed", 60) == "DELIVERED"


async def test_a_claim_can_be_given_back(store: Store) -> None:
    one = await pending(store)
    await store.deliveries.defer(await claim(store, one), 0)
    [held] = await store.deliveries.claim_due(10, 40)
    assert (held.delivery_id, held.tries) == (one.delivery_id, 0)


async def test_a_try_of_a_deleted_task_is_nobodys(store: Store) -> None:
    one = await pending(store)
    held = await claim(store, one)
    await store.tasks.delete(ANN, one.task_id)
    assert await store.deliveries.record_try(held, tried(), "failed", 1) is None


async def test_one_receivers_backlog_holds_up_nobody(store: Store, database_url: str) -> None:
    for n in range(12):
        await pending(store, callback_url=f"https://slow.example/{n}")
    quick = [await pending(store, callback_url=f"https://quick{n}.example/") for n in range(2)]
    other = await pending(store, user_id="bob", callback_url="https://slow.example/bob")
    await age(database_url, 120)
    held = await store.deliveries.claim_due(20, 40)
    assert len(held) == 4 + 2 + 1
    assert {one.delivery_id for one in [*quick, other]} < {each.delivery_id for each in held}
    assert len(await store.deliveries.claim_due(20, 40)) == 4, "the next four of the slow one"
    skipped = await store.deliveries.claim_due(20, 40, skip=[("ann", "https://slow.example")])
    assert skipped == []
    assert [len(await store.deliveries.claim_due(3, 40, per_origin=9)) for _ in range(2)] == [3, 1]


async def test_due_claims_are_oldest_first(store: Store, database_url: str) -> None:
    ones = [await pending(store, callback_url=f"https://r{9 - n}.example/") for n in range(5)]
    await age(database_url, 120)
    first = await store.deliveries.claim_due(3, 40)
    assert [held.delivery_id for held in first] == [one.delivery_id for one in ones[:3]]


async def test_redelivery_is_the_same_event_again(store: Store) -> None:
    one = await pending(store)
    held = await claim(store, one)
    await store.deliveries.record_try(held, tried(), "dead")
    for _ in range(2):  # a double click is one
        kind, seen = await store.deliveries.redeliver(ANN, one.task_id, one.delivery_id)
        assert (kind, seen and seen.state) == ("queued", "RETRYING")
    [again] = await store.deliveries.claim_due(10, 40)
    assert (again.delivery_id, again.body, again.tries, again.slow_tries) == (
        one.delivery_id,
        held.body,
        1,
        0,
    )
    assert await store.deliveries.claim_due(10, 40) == []
    assert (await store.deliveries.redeliver(ANN, one.task_id, one.delivery_id))[0] == "in_flight"
    await store.deliveries.record_try(again, tried("sweep", status=200), "delivered")
    assert (await store.deliveries.redeliver(ANN, one.task_id, one.delivery_id))[0] == "queued"


async def test_redelivery_of_others_events(store: Store) -> None:
    one, other = await pending(store), await pending(store)
    assert await store.deliveries.redeliver(BOB, one.task_id, one.delivery_id) == ("unknown", None)
    assert await store.deliveries.redeliver(ANN, other.task_id, one.delivery_id) == ("unknown", None)
    assert await store.deliveries.redeliver(ANN, one.task_id, "unknown") == ("unknown", None)
    assert (await store.deliveries.redeliver(ADMIN, one.task_id, one.delivery_id))[0] == "queued"


async def test_redelivery_since(store: Store) -> None:
    start = now() - timedelta(seconds=1)
    ones = [await pending(store) for _ in range(3)] + [
        await pending(store, callback_url="https://b.example/")
    ]
    theirs = await pending(store, user_id="bob")
    for one in [*ones, theirs]:
        await store.deliveries.record_try(await claim(store, one), tried(), "dead")
    later = now() + timedelta(hours=1)
    assert await store.deliveries.redeliver_since(ANN, later) == 0
    assert await store.deliveries.redeliver_since(ANN, start, "DELIVERED") == 0
    assert await store.deliveries.redeliver_since(ANN, start, until=start) == 0
    assert await store.deliveries.redeliver_since(ANN, start, origin="https://b.example") == 1
    assert await store.deliveries.redeliver_since(ANN, start, limit=2) == 2
    assert await store.deliveries.redeliver_since(ANN, start) == 1
    assert await store.deliveries.redeliver_since(ADMIN, start) == 1
    assert (await store.deliveries.counts())["RETRYING"] == 5


async def test_a_receiver_that_fails_for_days_is_suspended_and_resumed(
    store: Store, database_url: str
) -> None:
    waiting = await pending(store)
    for n in range(5):
        one = await pending(store)
        if n == 4:
            await age(database_url, 5 * 86_400 + 1, "callback_origins", "failing_since")
        await store.deliveries.record_try(await claim(store, one), tried(), "dead")
    assert await store.deliveries.state(waiting.delivery_id) == "SUSPENDED"
    [origin] = await store.deliveries.suspended(ANN)
    assert (origin.origin, origin.dead, origin.reason, origin.waiting) == (ORIGIN, 5, "failing", 1)
    assert await store.deliveries.suspended(BOB) == []
    late = await pending(store)
    cancelled = await created(store, callback_url=CALLBACK.upper().replace("HTTPS", "https"))
    await store.tasks.request_cancel(ANN, cancelled.task_id)
    assert {(await delivery(store, cancelled)).state, late.state} == {"SUSPENDED"}
    assert await store.deliveries.claim(late.delivery_id, 40) is None
    assert await store.deliveries.resume(BOB, ORIGIN) is None
    assert await store.deliveries.resume(ANN, ORIGIN) == 3
    assert await store.deliveries.resume(ANN, ORIGIN) is None
    assert len(await store.deliveries.claim_due(10, 40)) == 3
    assert await store.deliveries.suspended(ANN) == []


async def test_a_success_ends_a_receivers_bad_days(store: Store, database_url: str) -> None:
    for verdict in ("dead", "dead", "dead", "dead", "delivered", "dead"):
        one = await pending(store)
        await store.deliveries.record_try(await claim(store, one), tried(), verdict)  # type: ignore[arg-type]
        await age(database_url, 6 * 86_400, "callback_origins", "failing_since")
    [origin] = await store.deliveries.suspended(ANN)
    assert (origin.dead, origin.suspended_at) == (1, None)


async def test_suspending_at_once(store: Store) -> None:
    one = await pending(store)
    held = await claim(store, one)
    assert await store.deliveries.suspend("ann", ORIGIN, "gone") == 1
    assert await store.deliveries.record_try(held, tried(), "failed", 1) == "SUSPENDED"
    [origin] = await store.deliveries.suspended(ANN)
    assert origin.reason == "gone"
    assert isinstance(origin.suspended_at, datetime)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
async def test_each_final_state_calls_back_with_its_own_event(store: Store, status: Status) -> None:
    task = await running(store, callback_url=CALLBACK)
    await store.tasks.commit(outcome(task, 3, status))
    one = await delivery(store, task)
    held = await claim(store, one)
    assert (one.event, held.event) == (status.value, status.value)
    assert f'"event":"{status.value}"'.encode() in held.body
