"""Weighted pools, ageing under `strict`, and slots that never idle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from perdure.contracts import GenerateInput, GenerateResult
from perdure.task.states import Priority, Status
from tests.integration.scheduling.floor import HIGH, LOW, NORMAL, Floor, ended
from tests.support.waiting import until

WEIGHTED = 'scheduling = "weighted"\n'


@pytest.mark.parametrize("pending", [False, True], ids=["queued", "pending"])
async def test_classes_of_a_weighted_pool_share_six_four_two(floor: Floor, *, pending: bool) -> None:
    """Two users in each class, LOW first to come. All wait in the engine, or nearly all are rows yet and the
    dispatcher refills a narrow window."""
    ids: list[str] = []
    for priority, count in ((LOW, 4), (NORMAL, 6), (HIGH, 8)):
        for user in ("ann", "bob"):
            ids += await floor.submit(count, user, priority)
    bay = floor.bay()
    bay.seconds = 0.1 if pending else 0.0
    async with floor.running(floor.catalogue(WEIGHTED + ("slots = 1\nwindow = 3" if pending else ""))):
        if pending:
            await floor.reached(Status.QUEUED, 9)
            assert await floor.count(Status.PENDING) == len(ids) - 9
        else:
            await floor.in_engine(ids)
        async with bay.worker(slots=1):
            await bay.started(24)
    found = Counter(bay.classes[:24])
    off = 2
    assert abs(found[HIGH] - 12) <= off, found
    assert abs(found[NORMAL] - 8) <= off, found
    assert abs(found[LOW] - 4) <= off, found
    for priority in (HIGH, NORMAL, LOW):
        users = Counter(start.user for start in bay.starts[:24] if start.priority is priority)
        assert abs(users["ann"] - users["bob"]) <= 2, (priority, users)


async def test_slots_stay_busy_while_anything_waits(floor: Floor) -> None:
    """Classes, users and a window as they come: a free slot takes the best that waits."""
    for priority in (LOW, NORMAL, HIGH):
        for user in ("ann", "bob"):
            await floor.submit(2, user, priority)
    bay, slots = floor.bay(), 3
    bay.seconds = 1.0
    async with floor.running(floor.catalogue(f"slots = {slots}\nwindow = 4")), bay.worker(slots):
        await floor.reached(Status.COMPLETED, 12)
    spans = sorted(bay.spans)
    begun = spans[slots - 1][0]  # all slots have work, until the last wave begins
    over = spans[-slots][0]
    busy = sum(max(0.0, min(end, over) - max(start, begun)) for start, end in spans)
    assert busy / (slots * (over - begun)) >= 0.9


@pytest.mark.parametrize("as_row", [False, True], ids=["in the engine", "as a row"])
async def test_a_flood_of_high_keeps_low_no_longer_than_its_max_wait(floor: Floor, *, as_row: bool) -> None:
    """One slot, HIGH tasks of a tenth of a second, 25 of them waiting at any time, all of one user. LOW moves
    up twice; then every second start is its own."""
    max_wait, window = 0.6, 6 if as_row else 30
    bay = floor.bay()
    bay.seconds = 0.1
    flood: list[str] = []

    async def keep_high_waiting() -> None:
        while True:
            missing = bay.classes.count(HIGH) + 25 - len(flood)
            if missing > 0:
                flood.extend(await floor.submit(missing, "hot", HIGH))
                dispatcher.wake()
            await asyncio.sleep(0.02)

    pool = f"max_wait = {max_wait}\nwindow = {window}"
    async with floor.running(floor.catalogue(pool)) as (dispatcher,), bay.worker(slots=1):
        flooding = asyncio.create_task(keep_high_waiting())
        await bay.started(5)
        low = await floor.submit(window + 1 if as_row else 1, "hot", LOW)
        submitted = time.monotonic()
        dispatcher.wake()
        await until(lambda: low[-1] in bay.ids)
        flooding.cancel()
    last = next(start for start in bay.starts if start.task_id == low[-1])
    assert last.at - submitted >= 2 * max_wait * 0.9
    # In starts, which a slow machine does not change: its turn, and those of LOW before it, come at once. A
    # row moves up at a look of the dispatcher, up to a second late.
    due = submitted + 2 * max_wait * 1.1
    after = sum(due < start.at < last.at for start in bay.starts)
    each = (last.at - submitted) / sum(submitted < start.at < last.at for start in bay.starts)
    assert after <= 2 * len(low) + 4 + (1.2 / each if as_row else 0)


async def test_an_old_backlog_of_low_does_not_stand_before_high(floor: Floor) -> None:
    """LOW of the same user that has moved up to HIGH takes turns with it; it does not come first."""
    bay = floor.bay()
    bay.hold()
    known = floor.catalogue("max_wait = 0.5\nwindow = 4")
    async with floor.running(known) as (dispatcher,), bay.worker(slots=1):
        low = await floor.submit(40, "ann", LOW)
        dispatcher.wake()
        await bay.started(1)

        async def all_moved_up() -> bool:
            return [lane.lane for lane in await floor.store.dispatch.lanes()] == [2]

        await until(all_moved_up)
        high = await floor.submit(3, "ann", HIGH)
        dispatcher.wake()
        await floor.in_engine(high)
        bay.let_go()
        await until(lambda: set(high) <= set(bay.ids))
    assert len(bay.ids) <= 1 + 2 * len(high) + 2
    assert set(bay.ids) <= {*low, *high}


@pytest.mark.parametrize("priority", [HIGH, NORMAL])
async def test_a_drained_attempt_goes_on_before_its_class(floor: Floor, priority: Priority) -> None:
    bay = floor.bay()
    drained = asyncio.Event()

    async def work(given: GenerateInput) -> GenerateResult | None:
        if given.task_id == ids[0] and given.attempt == 1:
            await drained.wait()
            return ended(given, "drained")
        return None

    bay.work = work
    async with floor.running(floor.catalogue()) as (dispatcher,), bay.worker(slots=1):
        ids = await floor.submit(1, priority=priority)
        dispatcher.wake()
        await bay.started(1)
        ids += await floor.submit(6, priority=priority)
        dispatcher.wake()
        await floor.in_engine(ids[1:])
        bay.hold()
        drained.set()
        await bay.started(2)  # the slot does not wait for the hand-over: another may have come between
        await floor.in_engine(ids[:1])
        bay.let_go()
        await bay.started(8)
    assert ids[0] in bay.ids[1:3]
    assert bay.ids.count(ids[0]) == 2


async def test_a_lost_attempt_goes_on_before_its_class(floor: Floor) -> None:
    bay = floor.bay()

    async def work(given: GenerateInput) -> GenerateResult | None:
        if given.task_id == ids[0] and given.attempt == 1:
            await asyncio.sleep(4)  # no heartbeat: at 2 s it counts as lost
        return None

    bay.work = work
    async with floor.running(floor.catalogue()) as (dispatcher,), bay.worker(slots=1):
        ids = await floor.submit()
        dispatcher.wake()
        await bay.started(1)
        ids += await floor.submit(6)
        dispatcher.wake()
        await bay.started(8)
    assert [(start.task_id, start.attempt) for start in bay.starts[:2]] == [(ids[0], 1), (ids[0], 2)]
