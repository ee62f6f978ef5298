"""Tries against a real table and real receivers: once, again, from the table, dead, redelivered."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from perdure import names
from perdure.callback.deliver import Deliverer
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store, make_engine
from perdure.store.rows import NewTask
from perdure.task.policy import SLOW_TRY_DELAYS
from perdure.task.states import Status
from tests.integration.callback.harness import (
    ALICE,
    BOB,
    Make,
    Travel,
    committed,
    count,
    delivery,
    genuine,
    seconds_until,
)
from tests.support.receiver import Receiver, answer, head
from tests.support.waiting import until


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
async def test_a_callback_arrives_once_signed_and_recorded(
    store: Store, deliverer: Deliverer, metrics: Metrics, status: Status
) -> None:
    async with Receiver([answer(200, b"thanks")]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url(), status=status)
        assert (await deliverer.attempt(delivery_id)).kind == "delivered"
        assert (await deliverer.attempt(delivery_id)).kind == "skipped"
        assert (await deliverer.sweep()).claimed == 0
        (request,) = receiver.requests
    genuine(request)
    body = json.loads(request.body)
    assert list(body) == ["task_id", "event", "status", "result", "error", "timestamp"]
    assert (body["task_id"], body["event"], body["status"]) == (task_id, status, status)
    assert body["result"]["text"] == "héllo \u2028 😀"
    assert (body["error"] is not None) == (status is Status.FAILED)
    assert request["X-Callback-Event"] == status
    assert request["webhook-id"] == delivery_id
    row = await delivery(store, task_id)
    assert (row.state, row.next_try_at) == ("DELIVERED", None)
    (one,) = row.tries
    assert (one.number, one.status, one.error, one.address, one.sample) == (
        1,
        200,
        None,
        "127.0.0.1",
        "thanks",
    )
    assert abs(seconds_until(one.at)) < 60
    assert count(metrics, "tries", "success") == 1
    assert count(metrics, "deliveries", "delivered") == 1


async def test_a_second_try_has_the_same_id_and_bytes_and_a_fresh_time(
    store: Store, deliverer: Deliverer, metrics: Metrics
) -> None:
    async with Receiver([answer(503, b"busy"), answer(200)]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        first = await deliverer.attempt(delivery_id)
        assert first.kind == "again"
        assert first.delay is not None
        assert 0.8 <= first.delay <= 1.2
        stamp = int(receiver.requests[0]["webhook-timestamp"])
        await until(lambda: int(datetime.now(UTC).timestamp()) > stamp)
        assert (await deliverer.attempt(delivery_id)).kind == "delivered"
        one, two = receiver.requests
    assert one.body == two.body
    assert one["webhook-id"] == two["webhook-id"] == delivery_id
    assert int(two["webhook-timestamp"]) > int(one["webhook-timestamp"])
    assert one["webhook-signature"] != two["webhook-signature"]
    assert one["X-Callback-Signature"] == two["X-Callback-Signature"]
    assert (one["X-Callback-Attempt"], two["X-Callback-Attempt"]) == ("1", "2")
    genuine(one)
    genuine(two)
    tries = (await delivery(store, task_id)).tries
    assert [(t.number, t.status, t.error, t.sample) for t in tries] == [
        (1, 503, "the receiver answered 503", "busy"),
        (2, 200, None, None),
    ]
    assert (count(metrics, "tries", "http_error"), count(metrics, "tries", "success")) == (1, 1)
    sums = metrics.registry.get_sample_value("perdure_callback_tries_per_delivery_sum")
    assert sums == 2


async def test_a_receiver_that_was_down_for_a_minute_gets_it_once_it_is_back(
    store: Store, deliverer: Deliverer, travel: Travel
) -> None:
    receiver = Receiver()
    await receiver.start()
    await receiver.stop()
    task_id, delivery_id = await committed(store, receiver.url())
    results = [await deliverer.attempt(delivery_id) for _ in range(5)]
    assert [one.kind for one in results] == ["again"] * 4 + ["left"]
    delays = [one.delay for one in results[:4]]
    for delay, planned in zip(delays, (1, 2, 4, 8), strict=True):
        assert delay is not None
        assert planned * 0.8 <= delay <= planned * 1.2
    assert (await deliverer.sweep()).claimed == 0  # not due yet
    row = await delivery(store, task_id)
    assert row.state == "RETRYING"
    assert 50 < seconds_until(row.next_try_at) <= 60
    async with receiver:
        await travel(61)
        assert (await deliverer.sweep()).claimed == 1
        await receiver.received(1)
        for _ in range(3):
            await travel(200_000)
            assert (await deliverer.sweep()).claimed == 0
        assert len(receiver.requests) == 1
    row = await delivery(store, task_id)
    assert row.state == "DELIVERED"
    assert [t.error for t in row.tries] == ["connection refused"] * 5 + [None]


async def test_the_tail_runs_to_dead_and_one_call_redelivers(
    store: Store, deliverer: Deliverer, metrics: Metrics, travel: Travel
) -> None:
    async with Receiver([answer(500)]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        for _ in range(5):
            await deliverer.attempt(delivery_id)
        for delay in SLOW_TRY_DELAYS:
            row = await delivery(store, task_id)
            assert delay - 30 < seconds_until(row.next_try_at) <= delay
            await travel(delay + 1)
            assert await deliverer.sweep() is not None
            await receiver.received(len(row.tries) + 1)
            await deliverer.settled()
        row = await delivery(store, task_id)
        assert (row.state, row.next_try_at, len(row.tries)) == ("DEAD", None, 13)
        assert count(metrics, "deliveries", "dead") == 1
        await travel(1_000_000)
        assert (await deliverer.sweep()).claimed == 0

        receiver.script = [answer(200)]
        assert (await store.deliveries.redeliver(ALICE, task_id, delivery_id))[0] == "queued"
        assert (await store.deliveries.redeliver(ALICE, task_id, delivery_id))[0] == "queued"
        assert (await deliverer.sweep()).claimed == 1
        requests = await receiver.received(14)
        await deliverer.settled()
        assert (await deliverer.sweep()).claimed == 0
    assert {one.body for one in requests} == {requests[0].body}
    assert {one["webhook-id"] for one in requests} == {delivery_id}
    assert (await delivery(store, task_id)).state == "DELIVERED"
    genuine(requests[-1])


async def test_a_delivered_callback_can_be_sent_again_and_keeps_its_log(
    store: Store, deliverer: Deliverer
) -> None:
    async with Receiver() as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        await deliverer.attempt(delivery_id)
        kind, row = await store.deliveries.redeliver(ALICE, task_id, delivery_id)
        assert kind == "queued"
        assert row is not None
        assert len(row.tries) == 1
        await deliverer.sweep()
        one, two = await receiver.received(2)
        await deliverer.settled()
    assert (one.body, one["webhook-id"]) == (two.body, two["webhook-id"])
    assert [t.number for t in (await delivery(store, task_id)).tries] == [1, 2]


async def test_redelivery_of_others_deliveries_is_unknown(store: Store, deliverer: Deliverer) -> None:
    async with Receiver() as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        await deliverer.attempt(delivery_id)
    assert (await store.deliveries.redeliver(BOB, task_id, delivery_id))[0] == "unknown"
    other, _ = await committed(store, receiver.url())
    assert (await store.deliveries.redeliver(ALICE, other, delivery_id))[0] == "unknown"


async def test_redelivery_while_a_try_is_in_flight_says_so(store: Store, deliverer: Deliverer) -> None:
    release = asyncio.Event()
    async with Receiver([[release, head(200)]]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        trying = asyncio.create_task(deliverer.attempt(delivery_id))
        await receiver.received(1)
        assert (await store.deliveries.redeliver(ALICE, task_id, delivery_id))[0] == "in_flight"
        assert (await deliverer.attempt(delivery_id)).kind == "skipped"
        release.set()
        assert (await trying).kind == "delivered"
        assert len(receiver.requests) == 1


async def test_all_dead_since_a_time_are_redelivered_at_once(store: Store, deliverer: Deliverer) -> None:
    begun = datetime.now(UTC) - timedelta(minutes=1)
    async with Receiver([answer(410)]) as receiver:
        made = [await committed(store, receiver.url(), user=user) for user in ("alice", "alice", "bob")]
        for _, delivery_id in made:
            assert (await deliverer.attempt(delivery_id)).kind == "dead"
        receiver.script = [answer(204)]
        assert await store.deliveries.redeliver_since(ALICE, datetime.now(UTC)) == 0
        assert await store.deliveries.redeliver_since(ALICE, begun) == 2
        await deliverer.sweep()
        requests = await receiver.received(5)
        await deliverer.settled()
    assert {one["webhook-id"] for one in requests[3:]} == {made[0][1], made[1][1]}
    assert (await delivery(store, made[2][0], BOB)).state == "DEAD"


async def test_410_and_blocked_addresses_are_dead_at_once(store: Store, deliverer: Deliverer) -> None:
    async with Receiver([answer(410)]) as receiver:
        gone, delivery_id = await committed(store, receiver.url())
        assert (await deliverer.attempt(delivery_id)).kind == "dead"
    blocked, delivery_id = await committed(store, "http://10.0.0.1/hook?token=hush")
    result = await deliverer.attempt(delivery_id)
    assert result.kind == "dead"
    assert result.error is not None
    assert result.error.startswith("address-not-allowed")
    assert "hush" not in result.error
    assert [(await delivery(store, one)).state for one in (gone, blocked)] == ["DEAD", "DEAD"]


@pytest.mark.parametrize(("asked", "kind"), [("20", "again"), ("119", "again"), ("600", "left")])
async def test_retry_after_moves_the_next_try(
    store: Store, deliverer: Deliverer, asked: str, kind: str
) -> None:
    async with Receiver([answer(429, headers={"Retry-After": asked})]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        result = await deliverer.attempt(delivery_id)
    assert result.kind == kind
    row = await delivery(store, task_id)
    if kind == "again":
        assert result.delay == float(asked)
        assert seconds_until(row.next_try_at) > float(asked) + 30  # the table leaves it to Temporal
    else:
        assert 570 < seconds_until(row.next_try_at) <= 600


async def test_two_minutes_end_the_quick_phase(store: Store, deliverer: Deliverer) -> None:
    async with Receiver([answer(500)]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        assert (await deliverer.attempt(delivery_id, waited=119.9)).kind == "left"
    assert 50 < seconds_until((await delivery(store, task_id)).next_try_at) <= 60


async def test_the_sweep_finds_what_a_crash_after_the_commit_left(
    store: Store, deliverer: Deliverer, travel: Travel
) -> None:
    async with Receiver() as receiver:
        task_id, _ = await committed(store, receiver.url())
        assert (await deliverer.sweep()).claimed == 0  # a workflow may be at it for two minutes
        await travel(121)
        assert (await deliverer.sweep()).claimed == 1
        await receiver.received(1)
        await deliverer.settled()
    assert (await delivery(store, task_id)).state == "DELIVERED"


async def test_the_cancel_of_a_task_that_never_ran_calls_back_from_the_table(
    store: Store, deliverer: Deliverer
) -> None:
    async with Receiver() as receiver:
        task_id = names.new_task_id()
        await store.tasks.create(
            NewTask(
                task_id=task_id, user_id="alice", model_id="m", pool="p", params_json="{}",
                callback_url=receiver.url(),
            )
        )  # fmt: skip
        assert (await store.tasks.request_cancel(ALICE, task_id, None)).kind == "cancelled"
        assert (await deliverer.sweep()).claimed == 1
        (request,) = await receiver.received(1)
        await deliverer.settled()
    genuine(request)
    assert json.loads(request.body)["event"] == "CANCELLED"
    assert (await delivery(store, task_id)).state == "DELIVERED"


async def test_a_try_is_recorded_although_postgres_went_away_meanwhile(
    own_postgres: EmbeddedPostgres, make_deliverer: Make
) -> None:
    """Postgres is down when the receiver answers, and comes back within the lease."""
    store = Store(make_engine(own_postgres.dsn, pool_size=2, application_name="perdure-test"))
    deliverer = make_deliverer(store=store)
    release = asyncio.Event()
    async with Receiver([[release, head(200)]]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        trying = asyncio.create_task(deliverer.attempt(delivery_id))
        await receiver.received(1)
        await asyncio.to_thread(own_postgres.stop)
        release.set()
        await asyncio.sleep(0.5)
        assert not trying.done()
        await asyncio.to_thread(own_postgres.start)
        assert (await trying).kind == "delivered"
        assert len(receiver.requests) == 1
    assert (await delivery(store, task_id)).state == "DELIVERED"
    await store.aclose()


async def test_a_deleted_task_takes_its_callbacks_along(store: Store, deliverer: Deliverer) -> None:
    release = asyncio.Event()
    async with Receiver([[release, head(500)]]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        trying = asyncio.create_task(deliverer.attempt(delivery_id))
        await receiver.received(1)
        assert await store.tasks.delete(ALICE, task_id) == "deleted"
        release.set()
        assert (await trying).kind == "skipped"
        assert (await deliverer.attempt(delivery_id)).kind == "skipped"
        assert (await deliverer.sweep()).claimed == 0
    assert await store.deliveries.list_for_task(ALICE, task_id) is None
