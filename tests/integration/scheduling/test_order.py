"""Who starts next: the order of starts is measured, not its time."""

from __future__ import annotations

from collections import Counter

import pytest

from perdure.task.states import Status
from tests.integration.scheduling.floor import HIGH, LOW, NORMAL, Floor
from tests.support.tasks import ANN
from tests.support.waiting import until


async def test_a_full_backlog_starts_by_class_then_by_users_in_turn(floor: Floor) -> None:
    """LOW was first to come, user by user: nothing of that shows in the order."""
    ids: list[str] = []
    for priority in (LOW, NORMAL, HIGH):
        for user in ("ann", "bob"):
            ids += await floor.submit(4, user, priority)
    bay = floor.bay()
    async with floor.running(floor.catalogue()):
        await floor.in_engine(ids)
        async with bay.worker(slots=1):
            await bay.started(len(ids))
    assert bay.classes == [HIGH] * 8 + [NORMAL] * 8 + [LOW] * 8
    for first in range(0, 24, 8):
        of_class = bay.users[first : first + 8]
        for most in range(1, 8):
            taken = Counter(of_class[:most])
            assert abs(taken["ann"] - taken["bob"]) <= 1, of_class


async def test_users_share_by_their_weights(floor: Floor) -> None:
    ids = await floor.submit(4, "ann") + await floor.submit(10, "bob")
    bay = floor.bay()
    async with floor.running(floor.catalogue(more="[users.bob]\nweight = 3")):
        await floor.in_engine(ids)
        async with bay.worker(slots=1):
            await bay.started(12)
    assert abs(bay.users[:12].count("bob") - 9) <= 1


async def test_high_is_next_behind_low_that_runs(floor: Floor) -> None:
    bay = floor.bay()
    bay.hold()
    async with floor.running(floor.catalogue()) as (dispatcher,), bay.worker(slots=2):
        await floor.submit(12, priority=LOW)
        dispatcher.wake()
        await bay.started(2)
        (high,) = await floor.submit(priority=HIGH)
        dispatcher.wake()
        await floor.in_engine([high])
        assert len(bay.starts) == 2
        bay.let_go(1)
        await bay.started(3)
        assert bay.ids[2] == high


async def test_high_passes_a_burst_that_is_only_rows_yet(floor: Floor) -> None:
    bay = floor.bay()
    bay.hold()
    async with floor.running(floor.catalogue()) as (dispatcher,), bay.worker(slots=1):
        (first,) = await floor.submit(priority=LOW)
        dispatcher.wake()
        await bay.started(1)
        await floor.submit(1000, priority=LOW)
        dispatcher.wake()
        (high,) = await floor.submit(priority=HIGH)
        dispatcher.wake()
        await floor.in_engine([high])
        assert await floor.count(Status.PENDING) >= 900, "HIGH was started before the burst was"
        assert await floor.count(Status.QUEUED) <= 33 + 1
        bay.let_go(1)
        await bay.started(2)
        assert bay.ids == [first, high]


@pytest.mark.parametrize("unstarted", [False, True], ids=["queued", "unstarted"])
async def test_a_second_user_is_not_behind_the_first(floor: Floor, *, unstarted: bool) -> None:
    """A's 200 fill the window before B comes, or are all rows yet."""
    bay = floor.bay()
    bay.seconds = 0.1
    first = await floor.submit(200, "ann")
    second = await floor.submit(5, "bob") if unstarted else []
    async with floor.running(floor.catalogue("slots = 1\nwindow = 12")):
        if not unstarted:
            await floor.in_engine(first[:12])
            second = await floor.submit(5, "bob")
        async with bay.worker(slots=1):
            await until(lambda: set(second) <= set(bay.ids))
    # Every second start is B's, but for what a claim takes on its way.
    assert len(bay.ids) <= 20, bay.users


async def test_a_change_of_class_counts_while_pending_and_while_queued(floor: Floor) -> None:
    bay = floor.bay()
    bay.hold()
    async with floor.running(floor.catalogue("window = 4")) as (dispatcher,), bay.worker(slots=1):
        low = await floor.submit(6, priority=LOW)
        dispatcher.wake()
        await bay.started(1)
        await floor.in_engine(low[1:5])  # the window is full, the last is a row
        normal = await floor.submit(3)
        dispatcher.wake()
        await floor.in_engine(normal)
        queued, pending = low[3], low[5]
        assert (await floor.row(queued)).status is Status.QUEUED
        assert (await floor.row(pending)).status is Status.PENDING
        assert (await floor.store.tasks.set_priority(ANN, pending, HIGH)).kind == "changed"
        dispatcher.wake()
        await floor.in_engine([pending])
        changed = await floor.store.tasks.set_priority(ANN, queued, HIGH)
        assert changed.signal
        assert await floor.gate.signal_priority(queued, HIGH.value)
        await floor.in_engine([queued])
        bay.let_go()
        await bay.started(9)
    assert set(bay.ids[1:3]) == {queued, pending}
    assert set(bay.ids[3:6]) == set(normal)
    assert [start.attempt for start in bay.starts] == [1] * 9
