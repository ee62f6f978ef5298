"""What a watcher of one task is told: everything, once, in order, wherever it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.live.cursor import FINAL_CURSOR, Cursor
from perdure.live.hub import Hub
from perdure.live.reader import MAX_PART, Reader, Update
from perdure.task.states import Status
from tests.unit.live.scripted import ScriptedTask, World
from tests.unit.live.virtual_time import clock, run


@asynccontextmanager
async def hub_of(world: World) -> AsyncIterator[Hub]:
    """One API process."""
    hub = Hub(world, world, clock=clock)
    try:
        yield hub
    finally:
        await hub.aclose()


async def read(
    hub: Hub,
    world: World,
    task_id: str,
    last: str | None = None,
    *,
    partial: bool = True,
    at_most: int = 10**6,
) -> list[Update]:
    """What a reader is told until it has nothing new for 2 seconds."""
    found: list[Update] = []
    with hub.watch(task_id, row=world.rows[task_id], beats=True, text=partial) as waiter:
        reader = Reader(hub, waiter, Cursor.parse(task_id, last), partial=partial)
        while not reader.ended and len(found) < at_most:
            update = await reader.next(2.0)
            if update is None:
                break
            found.append(update)
    return found


def states(updates: list[Update]) -> list[str]:
    """The moves, without what only repeats the state."""
    found: list[tuple[int, str]] = []
    for update in updates:
        here = (update.cursor.stage, update.row.status.value)
        if not found or found[-1] != here:
            found.append(here)
    return [status for _, status in found]


def text_of(updates: list[Update], text: str = "") -> str:
    """The text as a client puts it together. Fails on a gap or a repeat."""
    for update in updates:
        if update.restarted:
            text = ""
        if update.part:
            assert update.part.offset == len(text), "a gap, or a repeat"
            text += update.part.text
    return text


def a_whole_life(world: World) -> ScriptedTask:
    task = ScriptedTask(world)
    task.queue()
    task.start()
    task.say("one ")
    task.fault()
    task.start()
    task.say("two ")
    task.say("three")
    return task


def test_a_live_watcher_sees_every_move_beat_and_text() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            watcher = asyncio.create_task(read(hub, world, task.task_id))
            for step in (task.queue, task.start, lambda: task.say("ab"), lambda: task.say("c"), task.end):
                await asyncio.sleep(1.3)
                step()
            updates = await watcher
            assert states(updates) == ["PENDING", "QUEUED", "PROCESSING", "COMPLETED"]
            assert [update.cursor for update in updates] == sorted({update.cursor for update in updates})
            assert text_of(updates) == "abc"
            beats = [update.beat.seq for update in updates if update.beat]
            assert beats == [1, 2]
            assert updates[-1].row.progress == 100
            assert updates[-1].beat is None
            assert updates[-1].cursor == FINAL_CURSOR

    run(main)


def test_moves_between_two_looks_are_told_all_the_same() -> None:
    """A task that runs through between two ticks leaves no hole in what watchers see."""

    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            watcher = asyncio.create_task(read(hub, world, task.task_id))
            await asyncio.sleep(0.5)
            task.queue()
            task.start()
            task.say("x")
            task.fault()
            task.start()
            task.say("y")
            task.end()
            updates = await watcher
            assert states(updates) == task.moves
            versions = [update.row.version for update in updates]
            assert versions == [0, 1, 2, 3, 4, 5]
            assert updates[3].row.error_code == "token_timeout"
            assert updates[3].row.retry_count == 1
            assert [update.attempt for update in updates] == [0, 0, 1, 1, 2, 2]
            assert text_of(updates) == "xy"
            assert [update.row.progress for update in updates] == [0, 0, 0, 0, 0, 100]
            assert all(update.row.completed_at is None for update in updates[:-1])

    run(main)


def test_a_snapshot_comes_first_and_alone() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = a_whole_life(world)
            updates = await read(hub, world, task.task_id)
            assert len(updates) == 1
            assert updates[0].row.status is Status.PROCESSING
            assert updates[0].beat is not None
            assert text_of(updates) == "one two three"
            assert not updates[0].restarted
            task.end()
            updates = await read(hub, world, task.task_id)
            assert [update.cursor for update in updates] == [FINAL_CURSOR]
            assert text_of(updates) == "one two three"
            updates = await read(hub, world, task.task_id, partial=False)
            assert [update.cursor for update in updates] == [FINAL_CURSOR]
            assert updates[0].part is None

    run(main)


def test_an_end_that_was_told_is_not_told_again() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = a_whole_life(world)
            task.end()
            (final,) = await read(hub, world, task.task_id)
            assert await read(hub, world, task.task_id, final.event_id) == []

    run(main)


def test_an_attempt_that_starts_over_says_so() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            for partial in (True, False):
                task = ScriptedTask(world)
                task.queue()
                task.start()
                task.say("first text")
                watcher = asyncio.create_task(read(hub, world, task.task_id, partial=partial))
                await asyncio.sleep(0.5)
                task.fault()
                task.start(restarted=True)
                await asyncio.sleep(0.5)
                task.say("fresh")
                await asyncio.sleep(1.5)
                task.say(" text")
                await asyncio.sleep(1.5)
                task.end()
                updates = await watcher
                assert [update.restarted for update in updates].count(True) == 1
                over = next(update for update in updates if update.restarted)
                assert over.row.status is Status.PROCESSING
                assert over.attempt == 2
                if partial:
                    assert over.part is not None
                    assert over.part.offset == 0
                    assert text_of(updates) == "fresh text"

    run(main)


def test_a_text_that_changed_behind_a_watcher_is_told_anew() -> None:
    """The same place in another text is no place: the id knows which text was sent."""

    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            task.queue()
            task.start()
            task.say("aaaa")
            (first,) = await read(hub, world, task.task_id)
            task.fault()
            task.start(restarted=True)
            task.say("bbbbbbbb")
            task.fault()
            task.start()  # goes on from the second text: this attempt itself restarted nothing
            task.say("cc")
            updates = await read(hub, world, task.task_id, first.event_id)
            assert text_of(updates, "aaaa") == "bbbbbbbbcc"
            assert any(update.restarted for update in updates)

    run(main)


def test_long_text_comes_in_pieces() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            task.queue()
            task.start()
            whole = "".join(chr(97 + number % 26) for number in range(3 * MAX_PART + 5))
            task.say(whole)
            updates = await read(hub, world, task.task_id)
            assert text_of(updates) == whole
            assert max(len(update.part.text) for update in updates if update.part) == MAX_PART
            task.text += "the end"
            task.end()
            updates = await read(hub, world, task.task_id)
            assert text_of(updates) == whole + "the end"
            assert len({update.event_id for update in updates}) == len(updates) == 4
            assert updates[-1].cursor == FINAL_CURSOR
            for at in range(1, 4):
                later = await read(hub, world, task.task_id, updates[at - 1].event_id)
                assert text_of(later, text_of(updates[:at])) == whole + "the end"

    run(main)


def test_a_request_to_cancel_is_news() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = a_whole_life(world)
            watcher = asyncio.create_task(read(hub, world, task.task_id))
            await asyncio.sleep(0.5)
            task.cancel_asked()
            await asyncio.sleep(0.5)
            task.end(Status.CANCELLED)
            updates = await watcher
            assert [update.row.cancel_requested for update in updates] == [False, True, True]
            assert states(updates) == ["PROCESSING", "CANCELLED"]

    run(main)


def test_a_cancel_in_place_has_no_other_move() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            (first,) = await read(hub, world, task.task_id)
            task.end(Status.CANCELLED)
            updates = await read(hub, world, task.task_id, first.event_id)
            assert states(updates) == ["CANCELLED"]

    run(main)


def test_a_store_that_is_away_delays_and_loses_nothing() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = ScriptedTask(world)
            with hub.watch(task.task_id, row=task.row, beats=True, text=True) as waiter:
                reader = Reader(hub, waiter, None, partial=True)
                updates = [await reader.next(1)]
                world.down = True
                task.queue()
                task.start()
                task.say("x")
                assert await reader.next(5) is None
                assert not reader.ended
                world.down = False
                while not reader.ended and (update := await reader.next(3)):
                    updates.append(update)
                    if update.beat:
                        task.end()
                        world.down = True
                        asyncio.get_running_loop().call_later(2, setattr, world, "down", False)
                found = [update for update in updates if update]
                assert states(found) == task.moves
                assert text_of(found) == "x"

    run(main)


def test_a_row_that_is_deleted_ends_the_stream() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = a_whole_life(world)
            watcher = asyncio.create_task(read(hub, world, task.task_id))
            await asyncio.sleep(0.5)
            del world.rows[task.task_id]
            await asyncio.wait_for(watcher, 1)

    run(main)


def test_a_process_that_stops_ends_its_streams_at_once() -> None:
    async def main() -> None:
        world = World()
        async with hub_of(world) as hub:
            task = a_whole_life(world)
            with hub.watch(task.task_id, row=task.row, beats=True) as waiter:
                reader = Reader(hub, waiter, None, partial=False)
                assert await reader.next(1)
                waiting = asyncio.create_task(reader.next(60))
                await asyncio.sleep(0.01)
                before = clock()
                hub.drain()
                assert await waiting is None
                assert clock() == before
                assert reader.ended
                assert not reader.finished

    run(main)


steps = st.lists(
    st.sampled_from(["say", "say", "fault", "quick fault", "restart", "cancel", "pause"]),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from([Status.COMPLETED, Status.FAILED, Status.CANCELLED]), st.integers(0, 2**32))
def test_whoever_comes_and_goes_on_any_process_sees_the_whole_story(
    script: list[str], end: Status, seed: int
) -> None:
    """Any life of a task, any processes, any drops: each move once, ids that grow, the text whole."""
    chance = Random(seed)

    async def main() -> None:
        world = World()
        task = ScriptedTask(world)

        async def live() -> None:
            await asyncio.sleep(0.4)
            task.queue()
            await asyncio.sleep(chance.choice([0.0, 0.2, 0.7]))
            task.start()
            for step in script:
                if step == "say":
                    task.say(chance.choice(["a", "bc", "\u00e4\U0001f600", "\n\n", " "]))
                elif step == "cancel":
                    task.cancel_asked()
                elif step != "pause":
                    task.fault(write=step != "quick fault")
                    task.start(restarted=step == "restart", write=step != "quick fault")
                await asyncio.sleep(chance.choice([0.0, 0.1, 0.5, 1.2]))
            task.end(end)

        async with hub_of(world) as first, hub_of(world) as second, hub_of(world) as third:
            living = asyncio.create_task(live())
            updates: list[Update] = []
            text = ""
            while not (updates and updates[-1].cursor.final):
                hub = chance.choice([first, second, third])
                last = updates[-1].event_id if updates else None
                more = await read(hub, world, task.task_id, last, at_most=chance.randint(1, 4))
                text = text_of(more, text)
                updates += more
                await asyncio.sleep(chance.choice([0.0, 0.3, 1.5]))
            await living
        assert states(updates) == task.moves
        assert text == task.text
        ids = [update.event_id for update in updates]
        assert len(set(ids)) == len(ids)
        cursors = [update.cursor[:3] for update in updates]
        assert cursors == sorted(cursors)

    run(main)
