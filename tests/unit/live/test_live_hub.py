"""The hub: one query a tick for all, waits that end as they should, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from perdure.live.hub import Hub
from perdure.live.places import WAIT_STEP
from perdure.live.queue import Queues, ahead_of, judge
from perdure.live.reader import Reader
from perdure.models import parse_catalogue
from perdure.store.errors import StoreUnavailable
from perdure.store.line import Line
from perdure.store.rows import Pause, QueueStat, ServiceTimes, WorkerRow
from perdure.task.states import Priority, Status
from tests.unit.live.scripted import ScriptedTask, World, pending_row
from tests.unit.live.virtual_time import clock, run


def test_two_thousand_watchers_are_one_query_a_tick() -> None:
    async def main() -> None:
        world = World()
        hub = Hub(world, world, clock=clock)
        tasks = [ScriptedTask(world) for _ in range(2000)]
        waits = [asyncio.create_task(hub.wait_final(task.task_id, 60)) for task in tasks]
        await asyncio.sleep(3)
        before = world.queries
        await asyncio.sleep(9)
        assert world.queries - before <= 31
        for task in tasks:
            task.queue()
            task.start()
            task.end()
        rows = await asyncio.gather(*waits)
        assert all(row is not None and row.status is Status.COMPLETED for row in rows)
        before = world.queries
        await asyncio.sleep(10)
        assert world.queries <= before + 1, "nothing is watched: nothing is asked"
        assert not hub._watches
        await hub.aclose()

    run(main)


def test_a_wait_ends_with_the_task_or_with_its_time() -> None:
    async def main() -> None:
        world = World()
        hub = Hub(world, world, clock=clock)
        task = ScriptedTask(world)
        before = clock()
        assert await hub.wait_final(task.task_id, 5) is None
        assert clock() - before == pytest.approx(5)
        assert await hub.wait_final("task_" + "0" * 32, 5) is None
        assert clock() - before < 6, "a task that is not there is not waited for"
        waiting = asyncio.create_task(hub.wait_final(task.task_id, 60))
        await asyncio.sleep(1)
        task.queue()
        task.start()
        task.end()
        ended = clock()
        row = await waiting
        assert row is not None
        assert row.status is Status.COMPLETED
        assert clock() - ended < 0.2, "a young wait is looked at often"
        await hub.aclose()

    run(main)


def test_a_poke_is_a_look_at_once() -> None:
    async def main() -> None:
        world = World()
        hub = Hub(world, world, clock=clock, tick=10)
        task = ScriptedTask(world)
        waiting = asyncio.create_task(hub.wait_final(task.task_id, 60))
        await asyncio.sleep(5.01)
        task.end(Status.CANCELLED)
        before = clock()
        hub.poke(task.task_id)
        assert await waiting
        assert clock() - before < 0.2
        await hub.aclose()

    run(main)


def test_a_wait_for_change_sees_moves_and_beats() -> None:
    async def main() -> None:
        world = World()
        hub = Hub(world, world, clock=clock)
        task = ScriptedTask(world)
        waiting = asyncio.create_task(hub.wait_change(task.task_id, 0, 60))
        await asyncio.sleep(0.5)
        task.queue()
        row = await waiting
        assert row is not None
        assert row.status is Status.QUEUED
        task.start()
        assert (await hub.wait_change(task.task_id, 1, 60)).version == 2  # type: ignore[union-attr]
        waiting = asyncio.create_task(hub.wait_change(task.task_id, 2, 60, beat=(0, 0)))
        await asyncio.sleep(1)
        task.say("x")
        assert (await waiting).version == 2  # type: ignore[union-attr]
        assert await hub.wait_change(task.task_id, 2, 3, beat=(1, 1)) is None
        task.cancel_asked()
        assert await hub.wait_change(task.task_id, 2, 3) is None
        assert await hub.wait_change(task.task_id, 2, 3, change_seq=task.row.change_seq - 1) is not None
        await hub.aclose()

    run(main)


def test_waits_end_when_the_process_stops() -> None:
    async def main() -> None:
        world = World()
        hub = Hub(world, world, clock=clock)
        task = ScriptedTask(world)
        called: list[int] = []
        forget = hub.on_drain(lambda: called.append(1))
        hub.on_drain(lambda: called.append(2))
        forget()
        waiting = asyncio.create_task(hub.wait_final(task.task_id, 60))
        await asyncio.sleep(1)
        before = clock()
        hub.drain()
        assert await waiting is None
        assert clock() == before
        assert called == [2]
        hub.on_drain(lambda: called.append(3))
        assert called == [2, 3], "who comes late is told at once"
        await hub.aclose()

    run(main)


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World()
        world.down = True
        hub = Hub(world, world, clock=clock)
        task = ScriptedTask(world)
        with caplog.at_level(logging.WARNING, "perdure.live"):
            assert await hub.wait_final(task.task_id, 20) is None
        assert len(caplog.records) == 1
        assert world.queries <= 22
        world.down = False
        task.end(Status.CANCELLED)
        assert await hub.wait_final(task.task_id, 20)
        await hub.aclose()

    run(main)


def test_beats_are_asked_for_only_while_somebody_watches_a_running_task() -> None:
    async def main() -> None:
        world = World()
        hub = Hub(world, world, clock=clock)
        task = ScriptedTask(world)
        task.queue()
        with hub.watch(task.task_id, row=task.row, beats=True):
            await asyncio.sleep(3)
            assert world.describes == []
            task.start()
            task.say("x")
            await asyncio.sleep(3)
            assert world.describes
            with hub.watch(task.task_id, text=True) as waiter:
                await asyncio.sleep(1)
                task.say("y")
                await asyncio.sleep(1.5)
                assert waiter.watch.beat is not None
                assert waiter.watch.beat.text == "xy"
            task.say("z")
            await asyncio.sleep(2.5)
            assert waiter.watch.beat.text is None, "nobody wants the text: it is not kept"
        count = len(world.describes)
        await hub.wait_final(task.task_id, 5)
        assert len(world.describes) == count, "who waits for the end needs no progress"
        await hub.aclose()

    run(main)


# Why a task waits -----------------------------------------------------------------------------------
NOW = datetime(2026, 12, 1, tzinfo=UTC)
LATELY = ServiceTimes(count=50, mean=8.0, p50=8.0, p95=9.0)


@pytest.mark.parametrize(
    ("changes", "facts", "reason", "start"),
    [
        ({}, {}, "waiting_for_slot", 6.0),
        ({}, {"ahead": 0, "running": 0}, "waiting_for_slot", 0.0),
        ({}, {"better": True}, "behind_higher_priority", 6.0),
        ({}, {"paused": True}, "waiting_for_slot", None),
        ({}, {"slots": 0, "running": 0}, "no_worker", None),
        ({}, {"service": None}, "waiting_for_slot", None),
        ({}, {"service": ServiceTimes(0, 0.0, 0.0, 0.0)}, "waiting_for_slot", None),
        ({"not_before": NOW + timedelta(seconds=90)}, {}, "not_before", 90.0),
        ({"not_before": NOW - timedelta(seconds=90)}, {}, "waiting_for_slot", 6.0),
        ({"next_attempt_at": NOW + timedelta(seconds=7)}, {"ahead": 0}, "backing_off", 7.0),
        ({"next_attempt_at": NOW + timedelta(seconds=7)}, {"ahead": 19}, "backing_off", 40.0),
        ({"next_attempt_at": NOW + timedelta(seconds=7)}, {"slots": 0}, "backing_off", None),
    ],
)
def test_why_and_how_long(
    changes: dict[str, object], facts: dict[str, object], reason: str, start: float | None
) -> None:
    """Four slots, all busy with tasks of 8 s: one comes free every 2 s."""
    row = replace(pending_row(), **changes)  # type: ignore[arg-type]
    given = {"better": False, "slots": 4, "running": 4, "service": LATELY, "ahead": 2, **facts}
    ahead = given.pop("ahead")
    info = judge(row, ahead, now=NOW, **given)  # type: ignore[arg-type]
    assert info.reason == reason
    assert info.position == ahead + 1  # type: ignore[operator]
    assert info.estimated_start_at == (None if start is None else NOW + timedelta(seconds=start))
    assert info.as_json()["estimated"] is True


class Figures:
    """The read model of a test: one pool."""

    def __init__(self) -> None:
        self.place: int | None = 2  # older tasks of the same user
        self.asked = 0
        self.looked = 0
        self.down = False

    async def queues(self) -> list[QueueStat]:
        self.looked += 1
        return [
            QueueStat("p", Priority.HIGH, 1, 1, 1, 0, 2.0),
            QueueStat("q", Priority.HIGH, 9, 9, 9, 9, 9.0),
        ]

    async def before(self, task_id: str, at_most: int = 0) -> int | None:
        self.asked += 1
        await asyncio.sleep(0.002)
        if self.down:
            raise StoreUnavailable("down")
        return self.place

    async def lines(self) -> list[Line]:
        return [Line("p", 1, "boss", 1), Line("p", 3, "u", 3), Line("q", 1, "boss", 99)]

    async def pauses(self) -> list[Pause]:
        return [Pause("model", "another", None, "op", NOW)]

    async def service_times(self, pool: str, last: int = 0) -> ServiceTimes:
        return LATELY

    async def live(self, seconds: float = 0) -> list[WorkerRow]:
        return [WorkerRow("w", "p", ("m",), 2, 1, False, NOW), WorkerRow("v", "p", ("m",), 2, 1, True, NOW)]


CATALOGUE = parse_catalogue(
    """
    [pools.p]
    [pools.w]
    scheduling = "weighted"
    [users.heavy]
    weight = 3
    """
)


def queues_of(figures: Figures) -> Queues:
    return Queues(figures, figures, figures, figures, CATALOGUE, clock=clock)


@pytest.mark.parametrize(
    ("user", "pool", "lane", "before", "expected"),
    [
        ("a", "p", 3, 0, 2),  # one of HIGH, and half a turn of each other user
        ("a", "p", 3, 9, 2 + 9 + 9 + 5),  # as many turns for b as it has tasks, for c as many as ours
        ("heavy", "p", 3, 9, 2 + 9 + 3 + 3 + 3),  # its turns come three times as often
        ("a", "p", 5, 0, 2 + 300 + 5 + 100),  # all better classes first
        ("a", "p", 1, 1, 1 + 1),
        ("a", "p", 2, 1, 1 + 1),  # it moved up to HIGH and takes turns there
        ("a", "w", 1, 0, 0),
        ("a", "w", 5, 0, 0 + 1),  # by shares: half of 6 : 4 : 2
        ("a", "w", 5, 10, 10 + 31 + 10),
    ],
)
def test_who_starts_before(user: str, pool: str, lane: int, before: int, expected: int) -> None:
    lines = [
        Line("p", 1, "b", 2),
        Line("p", 3, "b", 5),
        Line("p", 3, "c", 100),
        Line("p", 3, "a", 300),
        Line("w", 1, "b", 500),
        Line("w", 3, "b", 10),
        Line("w", 5, "a", 20),
        Line("elsewhere", 1, "b", 10_000),
    ]
    row = replace(pending_row(user_id=user), pool=pool, lane=lane)
    ahead, better = ahead_of(row, before, lines, CATALOGUE)
    assert abs(ahead - expected) <= 1
    assert better is (pool == "p" and lane > 2)


def test_figures_are_shared_by_all_who_ask() -> None:
    async def main() -> None:
        figures = Figures()
        queues = queues_of(figures)
        row = pending_row()
        found = await asyncio.gather(*(queues.info(row) for _ in range(50)))
        assert found[0] is not None
        assert (found[0].position, found[0].reason) == (4, "behind_higher_priority")
        assert figures.looked == 1
        assert await queues.info(replace(row, status=Status.PROCESSING)) is None
        figures.place = None
        await asyncio.sleep(2)
        assert await queues.info(row) is None, "it started meanwhile"

    run(main)


def test_a_waiting_task_tells_its_place_when_that_changes() -> None:
    async def main() -> None:
        world, figures = World(), Figures()
        hub = Hub(world, world, queues=queues_of(figures), clock=clock)
        task = ScriptedTask(world)
        assert hub._places is not None
        hub._places._today = lambda: task.row.created_at + timedelta(seconds=clock())
        with hub.watch(task.task_id, row=task.row, beats=True) as waiter:
            reader = Reader(hub, waiter, None, partial=False)
            first = await reader.next(1)
            assert first is not None
            assert first.queue is not None
            assert first.queue.position == 4
            assert await reader.next(3 * WAIT_STEP) is None, "nothing new is told"
            figures.down = True
            assert await reader.next(3 * WAIT_STEP) is None, "an estimate that cannot be had is no fault"
            figures.down = False
            figures.place = 0
            second = await reader.next(1 + WAIT_STEP)
            assert second is not None
            assert second.queue is not None
            assert second.queue.position == 2
            assert second.cursor > first.cursor
            task.queue()
            third = await reader.next(1)
            assert third is not None
            assert third.row.status is Status.QUEUED
            assert third.queue is not None, "a task that begins to wait says where"
        await hub.aclose()

    run(main)


def test_all_who_begin_to_watch_at_once_are_told_the_place() -> None:
    async def main() -> None:
        world, figures = World(), Figures()
        hub = Hub(world, world, queues=queues_of(figures), clock=clock)
        task = ScriptedTask(world)

        async def first() -> object:
            with hub.watch(task.task_id, row=task.row, beats=True) as waiter:
                update = await Reader(hub, waiter, None, partial=False).next(1)
                return update and update.queue and update.queue.position

        assert await asyncio.gather(*(first() for _ in range(30))) == [4] * 30
        assert figures.asked == 1
        await hub.aclose()

    run(main)


def test_places_of_many_watched_tasks_cost_twenty_questions_a_second() -> None:
    async def main() -> None:
        world, figures = World(), Figures()
        hub = Hub(world, world, queues=queues_of(figures), clock=clock)
        tasks = [ScriptedTask(world) for _ in range(500)]

        async def watch(task: ScriptedTask) -> None:
            with hub.watch(task.task_id, row=task.row, beats=True):
                await asyncio.sleep(20)

        await asyncio.gather(*(watch(task) for task in tasks))
        assert 300 <= figures.asked <= 20 * 21
        await hub.aclose()

    run(main)
