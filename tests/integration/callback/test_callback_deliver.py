"""Tries against a real table and real receivers: once, again, from the table, dead, redelivered."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest
import standardwebhooks

from perdure import names
from perdure.callback import InvalidSignature, verify
from perdure.callback.deliver import Deliverer
from perdure.callback.secrets import CallbackSecrets, whsec
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store, make_engine
from perdure.store.rows import NewTask
from perdure.task.policy import SLOW_TRY_DELAYS
from perdure.task.states import Status
from tests.integration.callback.conftest import ALICE, BOB, SECRET, Make, Travel, committed, delivery
from tests.support.receiver import HANG, Receiver, Request, answer, head
from tests.support.waiting import until


def genuine(request: Request) -> None:
    """The independent verifier and ours accept the request as it came."""
    standardwebhooks.Webhook(whsec(SECRET.encode())).verify(request.body, request.header_map)
    verify(request.body, request.header_map, SECRET)


def count(metrics: Metrics, family: str, outcome: str) -> float:
    value = metrics.registry.get_sample_value(f"perdure_callback_{family}_total", {"outcome": outcome})
    assert value is not None
    return value


def seconds_until(moment: datetime | None) -> float:
    assert moment is not None
    return (moment - datetime.now(UTC)).total_seconds()


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


# Slow receivers ------------------------------------------------------------------------------------
async def test_a_slow_receiver_does_not_delay_another_in_the_sweep(
    store: Store, make_deliverer: Make, travel: Travel
) -> None:
    deliverer = make_deliverer(total_seconds=60.0)
    async with Receiver([[HANG]]) as slow, Receiver() as fast:
        for _ in range(60):
            await committed(store, slow.url(), text="x")
        for _ in range(12):
            await committed(store, fast.url(), text="x")
        await travel(121)
        sweeping = asyncio.create_task(deliverer.sweep())
        await fast.received(12)
        assert slow.answered == 0  # every slow one hangs still
        assert 4 <= len(slow.requests) <= 16
        assert (await sweeping).claimed <= 40  # the slow one's others were left alone, not taken and put back
        await slow.stop()
        await deliverer.settled()


async def test_a_slow_receiver_does_not_delay_another_in_the_quick_tries(
    store: Store, make_deliverer: Make
) -> None:
    deliverer = make_deliverer(total_seconds=60.0)
    async with Receiver([[HANG]]) as slow, Receiver() as fast:
        hanging = [(await committed(store, slow.url(), text="x"))[1] for _ in range(40)]
        _, quick = await committed(store, fast.url(), text="x")
        tries = [asyncio.create_task(deliverer.attempt(one)) for one in hanging]
        await slow.received(16)
        assert (await deliverer.attempt(quick)).kind == "delivered"
        assert slow.answered == 0
        await until(lambda: sum(one.done() for one in tries) >= 24)  # no place, and nobody waits for long
        assert len(slow.requests) == 16
        await slow.stop()
        kinds = [one.kind for one in await asyncio.gather(*tries)]
    assert (kinds.count("again"), kinds.count("left")) == (16, 24)  # the others are in the table, uncounted


async def test_closing_waits_for_the_tries_in_flight(
    store: Store, make_deliverer: Make, travel: Travel
) -> None:
    deliverer = make_deliverer()
    release = asyncio.Event()
    async with Receiver([[release, head(200)]]) as receiver:
        task_id, _ = await committed(store, receiver.url())
        await travel(121)
        sweeping = asyncio.create_task(deliverer.sweep())
        await receiver.received(1)
        closing = asyncio.create_task(deliverer.aclose())
        await asyncio.sleep(0.2)
        assert not closing.done()
        release.set()
        await closing
        await sweeping
    assert (await delivery(store, task_id)).state == "DELIVERED"


# Suspension ----------------------------------------------------------------------------------------
async def test_a_receiver_that_fails_for_days_is_suspended_and_resumed(
    store: Store, deliverer: Deliverer, metrics: Metrics, travel: Travel
) -> None:
    async with Receiver([answer(410)]) as receiver, Receiver() as other:
        made = [await committed(store, receiver.url()) for _ in range(6)]
        for _, delivery_id in made[:4]:
            await deliverer.attempt(delivery_id)
        await travel(5 * 86_400 + 60)
        waiting, _ = await committed(store, receiver.url())
        assert (await deliverer.attempt(made[4][1])).kind == "dead"  # the fifth, five days after the first
        (origin,) = await store.deliveries.suspended(ALICE)
        assert origin.suspended_at is not None
        assert origin.waiting == 2
        assert await store.deliveries.suspended(BOB) == []

        late, late_delivery = await committed(store, receiver.url())
        assert (await delivery(store, late)).state == "SUSPENDED"
        assert (await delivery(store, waiting)).state == "SUSPENDED"
        assert (await deliverer.attempt(late_delivery)).kind == "skipped"
        _, elsewhere = await committed(store, other.url())
        assert (await deliverer.attempt(elsewhere)).kind == "delivered"
        await travel(1_000_000)
        assert (await deliverer.sweep()).claimed == 0
        before = len(receiver.requests)

        receiver.script = [answer(200)]
        assert await store.deliveries.resume(BOB, origin.origin) is None
        assert await store.deliveries.resume(ALICE, origin.origin) == 3
        await deliverer.sweep()
        requests = await receiver.received(before + 3)
        await deliverer.settled()
    assert len({one["webhook-id"] for one in requests[before:]}) == 3
    assert (await delivery(store, late)).state == "DELIVERED"
    assert await store.deliveries.suspended(ALICE) == []


# Secrets -------------------------------------------------------------------------------------------
async def test_rotation_keeps_pending_retries_verifiable_for_old_and_new(
    store: Store, make_deliverer: Make, secrets: CallbackSecrets, travel: Travel
) -> None:
    deliverer = make_deliverer(fixed=False)
    old = await secrets.rotate("alice")
    async with Receiver([answer(500)]) as receiver:
        made = [(await committed(store, receiver.url()))[1] for _ in range(3)]
        for delivery_id in made:
            assert (await deliverer.attempt(delivery_id)).kind == "again"
        new = await secrets.rotate("alice")
        receiver.script = [answer(200)]
        for delivery_id in made:
            assert (await deliverer.attempt(delivery_id)).kind == "delivered"
        await travel(24 * 3600 + 1)
        assert (await deliverer.attempt((await committed(store, receiver.url()))[1])).kind == "delivered"
        before, during, after = receiver.requests[:3], receiver.requests[3:6], receiver.requests[6:]
    for request in before:
        verify(request.body, request.header_map, old.plain)
    for request in during:
        verify(request.body, request.header_map, old.plain)
        verify(request.body, request.header_map, new.whsec)
        alone = {"X-Callback-Signature": request["X-Callback-Signature"]}
        verify(request.body, alone, old.plain, allow_legacy=True)
    for request in after:
        assert "," not in request["webhook-signature"].removeprefix("v1,")
        alone = {"X-Callback-Signature": request["X-Callback-Signature"]}
        for headers in (request.header_map, alone):
            verify(request.body, headers, new.plain, allow_legacy=True)
            with pytest.raises(InvalidSignature):
                verify(request.body, headers, old.plain, allow_legacy=True)


async def test_rotating_twice_fast_cuts_no_overlap_short(
    store: Store, make_deliverer: Make, secrets: CallbackSecrets
) -> None:
    deliverer = make_deliverer(fixed=False)
    shown = [await secrets.rotate("alice") for _ in range(3)]
    async with Receiver() as receiver:
        await deliverer.attempt((await committed(store, receiver.url()))[1])
        (request,) = receiver.requests
    for secret in shown:
        standardwebhooks.Webhook(secret.whsec).verify(request.body, request.header_map)
    alone = {"X-Callback-Signature": request["X-Callback-Signature"]}
    verify(request.body, alone, shown[0].plain, allow_legacy=True)


async def test_another_users_secret_signs_another_users_callbacks(
    store: Store, make_deliverer: Make, secrets: CallbackSecrets
) -> None:
    deliverer = make_deliverer(fixed=False)
    alice, bob = await secrets.rotate("alice"), await secrets.rotate("bob")
    async with Receiver() as receiver:
        for user in ("alice", "bob", "carol"):
            await deliverer.attempt((await committed(store, receiver.url(), user=user))[1])
        requests = receiver.requests
    for request, secret in zip(requests, (alice, bob), strict=False):
        standardwebhooks.Webhook(secret.whsec).verify(request.body, request.header_map)
    for secret in (alice, bob):  # carol was never shown one: hers is nobody's
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(secret.whsec).verify(requests[2].body, requests[2].header_map)


async def test_a_secret_that_cannot_be_opened_sends_nothing_unsigned(
    store: Store, make_deliverer: Make, secrets: CallbackSecrets
) -> None:
    await secrets.rotate("alice")
    other_key = "b" * 43 + "="
    deliverer = make_deliverer(fixed=False, key=other_key)
    async with Receiver() as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        assert (await deliverer.attempt(delivery_id)).kind == "again"
        assert receiver.connections == 0
    (one,) = (await delivery(store, task_id)).tries
    assert one.error == "not sent: the callback secret cannot be opened"
