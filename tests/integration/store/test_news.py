"""Changes of many tasks, each told exactly once, in whatever order transactions commit."""

from __future__ import annotations

import asyncio

import asyncpg

from perdure.store import Store
from perdure.store.base import TOUCH
from perdure.store.news import News, Snapshot
from perdure.task.states import Status
from tests.integration.store.helpers import ADMIN, ANN, BOB, created, finished, projection, queued

_TOUCH = f"UPDATE tasks SET {TOUCH} WHERE task_id = $1"


async def since(store: Store, told: Snapshot | None, **values: object) -> News:
    return await store.news.since([ANN], told, **values)  # type: ignore[arg-type]


def ids(news: News) -> list[str]:
    return [each.row.task_id for each in news.rows]


async def test_at_first_all_that_is_not_over(store: Store) -> None:
    open_task = await created(store)
    await finished(store)
    await created(store, user_id="bob")
    first = await since(store, None)
    assert (ids(first), first.more) == ([open_task.task_id], False)
    assert ids(await since(store, first.now)) == []
    everybody = await store.news.since([ADMIN], None)
    assert len(everybody.rows) == 2
    assert len((await store.news.since([ANN, BOB], None)).rows) == 2


async def test_a_change_is_told_once(store: Store) -> None:
    task = await created(store)
    start = await since(store, None)
    await store.tasks.request_cancel(ANN, task.task_id)
    other = await queued(store)
    news = await since(store, start.now)
    assert [(each.row.task_id, each.row.status) for each in news.rows] == [
        (task.task_id, Status.CANCELLED),
        (other.task_id, Status.QUEUED),
    ]
    assert ids(await since(store, news.now)) == []


async def test_commits_out_of_order_are_neither_lost_nor_doubled(store: Store, database_url: str) -> None:
    """The earlier change commits later: a reader of "above the highest seen" would miss it."""
    slow, quick = await created(store), await created(store)
    start = await since(store, None)
    writer = await asyncpg.connect(database_url)
    transaction = writer.transaction()
    await transaction.start()
    await writer.execute(_TOUCH, slow.task_id)
    await store.tasks.project(projection(quick, 1, Status.QUEUED))
    first = await since(store, start.now)
    assert ids(first) == [quick.task_id]
    assert ids(await since(store, first.now)) == []
    await transaction.commit()
    await writer.close()
    second = await since(store, first.now)
    assert ids(second) == [slow.task_id]
    assert ids(await since(store, second.now)) == []


async def test_pages_of_one_answer(store: Store) -> None:
    start = await since(store, None)
    tasks = [await created(store) for _ in range(7)]
    first = await since(store, start.now, limit=3)
    told, page = ids(first), first
    while page.more:
        await store.tasks.project(projection(tasks[0], 1, Status.QUEUED))  # belongs to the next answer
        page = await since(store, start.now, upto=first.now, after=page.rows[-1].row.change_seq, limit=3)
        told += ids(page)
    assert told == [task.task_id for task in tasks]
    assert ids(await since(store, first.now)) == [tasks[0].task_id]


async def test_many_writers_and_a_reader(store: Store) -> None:
    tasks = [await created(store) for _ in range(10)]
    told = (await since(store, None)).now
    heard: dict[str, list[int]] = {task.task_id: [] for task in tasks}
    done = asyncio.Event()

    async def write(number: int) -> None:
        for version in range(1, 16):
            await store.tasks.project(projection(tasks[number], version, Status.PROCESSING))

    async def read() -> None:
        nonlocal told
        last = False
        while not last:
            last = done.is_set()  # one more answer after the last write
            news = await since(store, told)
            told = news.now
            for each in news.rows:
                heard[each.row.task_id].append(each.row.version)

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(number) for number in range(10)))
    done.set()
    await reader
    for versions in heard.values():
        assert versions == sorted(set(versions)), "each change once, none after a later one"
        assert versions[-1] == 15
