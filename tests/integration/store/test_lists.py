"""Lists: a stable order, cursors that survive what comes and goes, and nothing of anybody else's."""

from __future__ import annotations

import base64
import random
from datetime import timedelta

import pytest

from perdure.store import InvalidCursor, Store
from perdure.store.rows import Page, Principal, TaskFilter, TaskRow
from perdure.task.states import Priority, Status
from tests.integration.store.helpers import ADMIN, ANN, BOB, created, finished, new_task, now, row


async def walk(
    store: Store, principal: Principal, filter: TaskFilter = TaskFilter(), limit: int = 3
) -> list[str]:
    """Every page of a list."""
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.tasks.list(principal, filter, cursor=cursor, limit=limit)
        assert len(page.tasks) <= limit
        assert page.has_more == (page.next_cursor is not None)
        seen += [task.task_id for task in page.tasks]
        cursor = page.next_cursor
        if cursor is None:
            return seen


def in_order(tasks: list[TaskRow]) -> list[str]:
    """Newest first; ids in order where the time is the same."""
    return [task.task_id for task in sorted(tasks, key=lambda t: (-t.created_at.timestamp(), t.task_id))]


async def test_pages_hold_every_row_once_in_order(store: Store) -> None:
    bulk = await store.tasks.create_many([new_task() for _ in range(7)])  # one creation time for all
    tasks = [task for task in bulk.tasks if task] + [await created(store) for _ in range(6)]
    await created(store, user_id="bob")
    for limit in (1, 2, 3, 13, 14):
        assert await walk(store, ANN, limit=limit) == in_order(tasks)


async def test_a_page_that_just_fits_has_no_next(store: Store) -> None:
    for _ in range(3):
        await created(store)
    page = await store.tasks.list(ANN, limit=3)
    assert (len(page.tasks), page.next_cursor) == (3, None)
    assert await store.tasks.list(BOB) == Page([], None)


async def test_cursors_survive_inserts_and_deletes(store: Store) -> None:
    tasks = [await finished(store) for _ in range(10)]
    expected = in_order(tasks)
    first = await store.tasks.list(ANN, limit=4)
    await created(store)  # newer: belongs before the first page
    assert await store.tasks.delete(ANN, expected[3]) == "deleted"  # the very row of the cursor
    assert await store.tasks.delete(ANN, expected[5]) == "deleted"
    second = await store.tasks.list(ANN, limit=4, cursor=first.next_cursor)
    assert [task.task_id for task in second.tasks] == [expected[4], *expected[6:9]]
    third = await store.tasks.list(ANN, limit=4, cursor=second.next_cursor)
    assert [task.task_id for task in third.tasks] == expected[9:]


async def test_an_admin_sees_everybody_in_the_same_order(store: Store) -> None:
    tasks = [await created(store, user_id=random.choice(["ann", "bob", "eve"])) for _ in range(8)]
    tasks += [
        await finished(store, user_id="bob", status=status) for status in (Status.FAILED, Status.COMPLETED)
    ]
    assert await walk(store, ADMIN) == in_order(tasks)
    bobs = [task for task in tasks if task.user_id == "bob"]
    assert await walk(store, ADMIN, TaskFilter(user_id="bob")) == in_order(bobs)
    assert await walk(store, ADMIN, TaskFilter(statuses=(Status.FAILED,))) == [tasks[8].task_id]
    assert await walk(store, ANN, TaskFilter(user_id="bob")) == await walk(store, ANN), (
        "only an admin may choose"
    )


async def test_filters(store: Store) -> None:
    plain = await created(store)
    high = await created(
        store, priority=Priority.HIGH, task_type="document", metadata={"team": "a", "n": "1"}
    )
    other = await created(store, model_id="other", metadata={"team": "b"})
    done = await finished(store, metadata={"team": "a"})
    for filter, expected in [
        (TaskFilter(), [plain, high, other, done]),
        (TaskFilter(statuses=(Status.COMPLETED,)), [done]),
        (TaskFilter(statuses=(Status.COMPLETED, Status.PENDING)), [plain, high, other, done]),
        (TaskFilter(statuses=(Status.FAILED,)), []),
        (TaskFilter(model_id="other"), [other]),
        (TaskFilter(task_type="document"), [high]),
        (TaskFilter(priority=Priority.HIGH), [high]),
        (TaskFilter(metadata=(("team", "a"),)), [high, done]),
        (TaskFilter(metadata=(("team", "a"), ("n", "1"))), [high]),
        (TaskFilter(metadata=(("absent", ""),)), []),
        (TaskFilter(created_after=high.created_at), [other, done]),
        (TaskFilter(created_before=high.created_at), [plain]),
        (TaskFilter(created_after=now() + timedelta(days=1)), []),
        (TaskFilter(model_id="model", statuses=(Status.PENDING,), metadata=(("n", "1"),)), [high]),
    ]:
        fresh = [await row(store, task) for task in expected]
        assert await walk(store, ANN, filter, limit=2) == in_order(fresh), filter
        assert await walk(store, ADMIN, filter, limit=2) == in_order(fresh), filter


async def test_includes(store: Store) -> None:
    await finished(store)
    [bare] = (await store.tasks.list(ANN)).tasks
    assert (bare.params, bare.result, bare.attempts) == (None, None, [])
    [whole] = (await store.tasks.list(ANN, include=("params", "result", "attempts"))).tasks
    assert whole.result is not None
    assert (whole.params, whole.result["text"], len(whole.attempts)) == ({"messages": []}, "the answer", 1)
    [whole] = (await store.tasks.list(ADMIN, include=("result",))).tasks
    assert (whole.params, whole.result is None, whole.attempts) == (None, False, [])


async def test_cursors_of_another_list_are_refused(store: Store) -> None:
    for _ in range(3):
        await created(store)
    cursor = (await store.tasks.list(ANN, limit=1)).next_cursor
    assert cursor is not None
    for principal, filter in (
        (BOB, TaskFilter()),
        (ADMIN, TaskFilter()),
        (ANN, TaskFilter(statuses=(Status.PENDING,))),
        (ANN, TaskFilter(metadata=(("a", "b"),))),
    ):
        with pytest.raises(InvalidCursor):
            await store.tasks.list(principal, filter, cursor=cursor)
    own = TaskFilter(user_id="ann")
    theirs = (await store.tasks.list(ADMIN, own, limit=1)).next_cursor
    assert len((await store.tasks.list(ADMIN, own, cursor=theirs)).tasks) == 2


async def test_junk_cursors_are_refused(store: Store) -> None:
    for _ in range(2):
        await created(store)
    good = (await store.tasks.list(ANN, limit=1)).next_cursor
    assert good is not None
    raw = base64.urlsafe_b64decode(good + "==")
    changed = [
        base64.urlsafe_b64encode(part).decode().rstrip("=")
        for part in (
            raw[:-1] + b"\0",
            raw[:17],
            raw[:5],
            b"\2" + raw[1:],
            raw[:1] + b"\x7f" + raw[2:],
            raw[:-1] + b"\xff",
        )
    ]
    for junk in [
        "",
        "a",
        "%%%",
        "é",
        "\0",
        good[:-5] + "=====",
        good + "A" * 400,
        "-" * 80,
        "null",
        *changed,
    ]:
        with pytest.raises(InvalidCursor):
            await store.tasks.list(ANN, cursor=junk)


async def test_summaries_and_states(store: Store) -> None:
    mine, theirs = await created(store), await finished(store, user_id="bob", status=Status.FAILED)
    ids = [mine.task_id, theirs.task_id, "nobody"]
    assert [task.task_id for task in await store.tasks.summaries(ANN, ids)] == [mine.task_id]
    assert len(await store.tasks.summaries(None, ids)) == len(await store.tasks.summaries(ADMIN, ids)) == 2
    counts = await store.tasks.count_by_state()
    assert {status: n for status, n in counts.items() if n} == {Status.PENDING: 1, Status.FAILED: 1}
    assert set(counts) == set(Status)
    assert await store.tasks.older_than(Status.PENDING, 60) == []
    assert [task.task_id for task in await store.tasks.older_than(Status.PENDING, 0)] == [mine.task_id]


async def test_changes_for_the_hub(store: Store) -> None:
    still, moved = await created(store), await created(store)
    await store.tasks.request_cancel(ANN, moved.task_id)
    known = {still.task_id: still.change_seq, moved.task_id: moved.change_seq, "gone": 1}
    changes = await store.tasks.changes(known)
    assert [(task.task_id, task.status) for task in changes.rows] == [(moved.task_id, Status.CANCELLED)]
    assert changes.gone == ["gone"]
    assert (await store.tasks.changes({})).rows == []
