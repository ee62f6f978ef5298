"""Receivers that are slow, that fail for days, and secrets that change under them."""

from __future__ import annotations

import asyncio

import pytest
import standardwebhooks

from perdure.callback import InvalidSignature, verify
from perdure.callback.deliver import Deliverer
from perdure.callback.secrets import CallbackSecrets
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store
from tests.integration.callback.harness import (
    ALICE,
    BOB,
    Make,
    Travel,
    committed,
    delivery,
)
from tests.support.receiver import HANG, Receiver, answer, head
from tests.support.waiting import until


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
