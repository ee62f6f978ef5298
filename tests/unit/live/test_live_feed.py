"""A stream of many tasks: each change once, whatever the order of commits, on whichever process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.live import feed
from perdure.live.feed import Feeds
from perdure.live.follower import FeedUpdate, Follower
from perdure.live.hub import Hub
from perdure.live.mark import Mark
from perdure.store.errors import StoreUnavailable
from perdure.store.news import News, NewsRow, Snapshot
from perdure.store.rows import Principal, TaskRow
from perdure.task.states import Status
from tests.unit.live.scripted import ScriptedTask, World, pending_row
from tests.unit.live.virtual_time import clock, run

ME = Principal(user_id="u")
OTHER = Principal(user_id="v")
ADMIN = Principal(user_id="root", admin=True)


class Log:
    """A database of rows with transactions that commit in any order."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.seq = 0
        self.next_xid = 100
        self.open: set[int] = set()
        self.written: dict[int, TaskRow] = {}  # by open transaction
        self.committed: dict[str, NewsRow] = {}
        self.questions = 0
        self.down = False

    def begin(self, row: TaskRow, **changes: object) -> int:
        """A transaction writes a row and stays open."""
        xid, self.next_xid, self.seq = self.next_xid, self.next_xid + 1, self.seq + 1
        self.open.add(xid)
        self.written[xid] = replace(row, change_seq=self.seq, **changes)  # type: ignore[arg-type]
        return xid

    def commit(self, xid: int) -> None:
        self.open.discard(xid)
        row = self.written.pop(xid)
        self.committed[row.task_id] = NewsRow(row, xid)
        self.world.rows[row.task_id] = row

    def write(self, row: TaskRow, **changes: object) -> None:
        self.commit(self.begin(row, **changes))

    def now(self) -> Snapshot:
        return Snapshot(min(self.open, default=self.next_xid), self.next_xid, frozenset(self.open))

    async def since(
        self,
        principals: Sequence[Principal],
        told: Snapshot | None,
        *,
        upto: Snapshot | None = None,
        after: int = 0,
        limit: int = 500,
    ) -> News:
        self.questions += 1
        await asyncio.sleep(0)
        if self.down:
            raise StoreUnavailable("down")
        users = {principal.user_id for principal in principals}
        everyone = any(principal.admin for principal in principals)
        rows = sorted(
            (
                entry
                for entry in self.committed.values()
                if (everyone or entry.row.user_id in users)
                and entry.row.change_seq > after
                and (not entry.row.status.final if told is None else not told.sees(entry.xid))
                and (upto is None or upto.sees(entry.xid))
            ),
            key=lambda entry: entry.row.change_seq,
        )
        now = self.now()
        await asyncio.sleep(0)
        return News(rows[:limit], now, len(rows) > limit)


@asynccontextmanager
async def process(log: Log) -> AsyncIterator[Feeds]:
    hub = Hub(log.world, log.world, clock=clock)
    feeds = Feeds(log, hub)
    try:
        yield feeds
    finally:
        await feeds.aclose()
        await hub.aclose()


async def read(
    feeds: Feeds,
    who: Principal = ME,
    last: str | None = None,
    *,
    at_most: int = 10**6,
    patience: float = 2.0,
    choose: Callable[[TaskRow], bool] = lambda _: True,
) -> list[FeedUpdate]:
    """What a stream tells until it has nothing new for `patience` seconds."""
    found: list[FeedUpdate] = []
    with ExitStack() as stack:
        member = stack.enter_context(feeds.join(who))
        follower = Follower(feeds, member, Mark.parse(who.user_id, last), choose, stack)
        while len(found) < at_most and (update := await follower.next(patience)):
            found.append(update)
    return found


def told(updates: list[FeedUpdate]) -> list[tuple[str, int]]:
    return [(update.row.task_id, update.row.change_seq) for update in updates]


def test_what_is_not_final_first_then_each_change() -> None:
    async def main() -> None:
        log = Log()
        active, done, foreign = pending_row(), pending_row(), pending_row(user_id="v")
        log.write(active)
        log.write(done, status=Status.COMPLETED)
        log.write(foreign)
        async with process(log) as feeds:
            watcher = asyncio.create_task(read(feeds))
            await asyncio.sleep(0.5)
            log.write(active, status=Status.QUEUED)
            await asyncio.sleep(0.5)
            log.write(active, status=Status.FAILED)
            fresh = pending_row()
            log.write(fresh)
            updates = await watcher
            assert [(u.row.task_id, u.row.status) for u in updates] == [
                (active.task_id, Status.PENDING),
                (active.task_id, Status.QUEUED),
                (active.task_id, Status.FAILED),
                (fresh.task_id, Status.PENDING),
            ]
            assert len({update.event_id for update in updates}) == 4
            assert len(await read(feeds, ADMIN)) == 2

    run(main)


def test_a_late_commit_with_a_lower_number_is_told() -> None:
    async def main() -> None:
        log = Log()
        async with process(log) as feeds:
            watcher = asyncio.create_task(read(feeds))
            await asyncio.sleep(0.5)
            slow = log.begin(pending_row())
            log.write(pending_row())
            await asyncio.sleep(1)
            log.commit(slow)
            updates = await watcher
            assert [seq for _, seq in told(updates)] == [2, 1]

    run(main)


def test_filters_choose_rows() -> None:
    async def main() -> None:
        log = Log()
        rows = [pending_row() for _ in range(4)]
        for number, row in enumerate(rows):
            log.write(row, model_id="a" if number % 2 else "b")
        async with process(log) as feeds:
            updates = await read(feeds, choose=lambda row: row.model_id == "a")
            assert [update.row.task_id for update in updates] == [rows[1].task_id, rows[3].task_id]

    run(main)


def test_running_tasks_tell_their_progress() -> None:
    async def main() -> None:
        world = World()
        log = Log(world)
        task = ScriptedTask(world)
        task.queue()
        task.start()
        log.write(task.row)
        async with process(log) as feeds:
            watcher = asyncio.create_task(read(feeds, patience=3))
            for word in ("one ", "two ", "three "):
                await asyncio.sleep(1)
                task.say(word)
            await asyncio.sleep(1.2)
            task.end()
            log.write(task.row)
            updates = await watcher
            assert [update.beat.seq for update in updates if update.beat] == [1, 2, 3]
            assert [update.row.status for update in updates] == [Status.PROCESSING] * 4 + [Status.COMPLETED]
            assert all(update.beat.text is None for update in updates if update.beat), "texts stay out of it"
            ids = [update.event_id for update in updates]
            assert len(set(ids)) == len(ids)
            for event_id in ids[:-1]:
                (final,) = await read(feeds, last=event_id)
                assert final.row.status is Status.COMPLETED

    run(main)


def test_two_hundred_streams_are_one_question_a_tick() -> None:
    async def main() -> None:
        log = Log()
        async with process(log) as feeds:
            watchers = [
                asyncio.create_task(read(feeds, Principal(user_id=f"u{number}"), patience=10))
                for number in range(200)
            ]
            await asyncio.sleep(1)
            before = log.questions
            await asyncio.sleep(6)
            assert log.questions - before <= 21
            log.write(pending_row(user_id="u7"))
            found = await asyncio.gather(*watchers)
            assert [len(updates) for updates in found] == [int(number == 7) for number in range(200)]
            await asyncio.sleep(2)
            before = log.questions
            await asyncio.sleep(5)
            assert log.questions == before, "nobody listens: nobody asks"

    run(main)


def test_a_stream_that_fell_behind_reads_on_by_itself() -> None:
    async def main() -> None:
        log = Log()
        async with process(log) as feeds:
            with ExitStack() as stack:
                member = stack.enter_context(feeds.join(ME))
                follower = Follower(feeds, member, None, lambda _: True, stack)
                assert await follower.next(0.5) is None
                rows = 0
                while rows <= 2 * feed.MAX_ROWS:
                    for _ in range(2500):
                        log.write(pending_row())
                    rows += 2500
                    await asyncio.sleep(0.5)
                assert feeds._kept <= feed.MAX_ROWS, "a reader that takes nothing costs no memory"
                seen = set()
                while update := await follower.next(2):
                    assert update.row.task_id not in seen
                    seen.add(update.row.task_id)
                assert len(seen) == rows

    run(main)


def test_an_id_of_another_database_gives_a_snapshot() -> None:
    async def main() -> None:
        log = Log()
        log.write(pending_row())
        ahead = Mark(Snapshot(10**9, 10**9), None, 0).event_id(ME.user_id)
        async with process(log) as feeds:
            assert len(await read(feeds, last=ahead)) == 1
            assert len(await read(feeds, last="junk")) == 1

    run(main)


def test_a_store_that_is_away_delays_and_loses_nothing() -> None:
    async def main() -> None:
        log = Log()
        log.down = True
        async with process(log) as feeds:
            watcher = asyncio.create_task(read(feeds, patience=10))
            await asyncio.sleep(2)
            log.down = False
            log.write(pending_row())
            await asyncio.sleep(2)
            log.down = True
            log.write(pending_row())
            await asyncio.sleep(2)
            log.down = False
            assert [seq for _, seq in told(await watcher)] == [1, 2]

    run(main)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_each_change_is_told_once_over_any_drops(seed: int) -> None:
    """Transactions that overlap at random, a reader that comes and goes between three processes."""
    chance = Random(seed)

    async def main() -> None:
        log = Log()
        rows = [pending_row() for _ in range(chance.randint(1, 6))]

        async def write() -> None:
            pending: list[tuple[int, TaskRow]] = []
            states = [Status.PENDING, Status.QUEUED, Status.COMPLETED]
            for _ in range(chance.randint(1, 40)):
                busy = {row.task_id for _, row in pending}
                free = [row for row in rows if row.task_id not in busy]
                if free and chance.random() < 0.6:
                    row = chance.choice(free)
                    pending.append((log.begin(row, status=chance.choice(states)), row))
                elif pending:
                    log.commit(pending.pop(chance.randrange(len(pending)))[0])
                await asyncio.sleep(chance.choice([0, 0, 0.05, 0.2, 0.5]))
            for xid, _ in pending:
                log.commit(xid)

        async with process(log) as first, process(log) as second, process(log) as third:
            processes = [first, second, third]
            log.write(rows[0])
            updates: list[FeedUpdate] = await read(first, patience=0.4)
            writing = asyncio.create_task(write())
            quiet = 0
            while quiet < 2:
                last = updates[-1].event_id if updates else None
                more = await read(
                    chance.choice(processes),
                    last=last,
                    at_most=chance.randint(1, 5),
                    patience=chance.choice([0.2, 1]),
                )
                updates += more
                quiet = quiet + 1 if writing.done() and not more else 0
            await writing
        seen = told(updates)
        assert len(set(seen)) == len(seen), "told twice"
        newest = dict(seen)
        assert newest == {task_id: entry.row.change_seq for task_id, entry in log.committed.items()}

    run(main)
