"""Taking tasks in: what is written, what a key replays, and what Postgres refuses."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import asyncpg
import pytest

from perdure import names
from perdure.store import Store, StoreRefused, make_engine
from perdure.store.rows import CreateResult, Idempotency, NewTask
from perdure.task.states import Priority, Status
from tests.integration.store.helpers import ADMIN, ANN, BOB, created, finished, new_task, now, row
from tests.support.waiting import until


def key(fingerprint: bytes = b"body", **values: object) -> Idempotency:
    defaults: dict[str, object] = {"user_id": "ann", "route": "POST /v1/tasks", "key": "k-1"}
    return Idempotency(fingerprint=fingerprint, **(defaults | values))  # type: ignore[arg-type]


async def test_every_field_comes_back(store: Store) -> None:
    new = new_task(
        task_type="document",
        priority=Priority.LOW,
        max_retries=7,
        callback_url="https://receiver.example/hook",
        callback_events=(Status.FAILED,),
        metadata={"zebra": "1", "apple": "ä \U0001f600 \u2028 \\ \" '"},
        queue_timeout_seconds=60.5,
        timeout_seconds=99,
        deadline_seconds=3600,
        rerun_of="task_" + "0" * 32,
        traceparent="00-abc",
        params_json='{"seed":123456789012345678901234567890,"b":1.0,"a":[],"text":"\\u0000é"}',
    )
    result = await store.tasks.create(new)
    assert (result.kind, result.task and result.task.status) == ("created", Status.PENDING)
    task = await store.tasks.get(ANN, new.task_id)
    assert task is not None
    for name in NewTask.__dataclass_fields__:
        assert getattr(task, name) == getattr(new, name), name
    assert list(task.metadata) == ["zebra", "apple"]
    assert task.params == {"seed": 123456789012345678901234567890, "b": 1.0, "a": [], "text": "\0é"}
    assert (task.lane, task.version, task.progress, task.retry_count, task.attempts) == (5, 0, 0, 0, [])
    assert task.queue_deadline == task.created_at + timedelta(seconds=60.5)
    assert task.total_deadline == task.created_at + timedelta(hours=1)


async def test_defaults(store: Store) -> None:
    task = await created(store)
    assert (task.priority, task.lane, task.max_retries, task.discarded_tokens) == (Priority.NORMAL, 3, 3, 0)
    assert (task.queue_deadline, task.total_deadline, task.error_code, task.completed_at) == (None,) * 4
    assert task.created_at == task.updated_at


async def test_deadlines_count_from_not_before(store: Store) -> None:
    later = now() + timedelta(hours=2)
    task = await created(store, not_before=later, deadline_seconds=10, queue_timeout_seconds=5)
    assert task.total_deadline == later + timedelta(seconds=10)
    assert task.queue_deadline == later + timedelta(seconds=5)
    passed = await created(store, not_before=now() - timedelta(hours=2), deadline_seconds=10)
    assert passed.total_deadline == passed.created_at + timedelta(seconds=10)


async def test_a_bulk_is_in_order_and_all_or_nothing(store: Store) -> None:
    news = [new_task(params_json=f'{{"n":{n}}}') for n in range(40)]
    result = await store.tasks.create_many(news)
    assert [task and task.task_id for task in result.tasks] == [new.task_id for new in news]
    for new in news[:3]:
        assert (await row(store, await must(store, new.task_id))).params_json == new.params_json
    more = [new_task(), news[0], new_task()]
    with pytest.raises(StoreRefused):
        await store.tasks.create_many(more)
    assert await store.tasks.get(ANN, more[0].task_id) is None
    assert (await store.tasks.create_many([])).tasks == []


async def must(store: Store, task_id: str):  # type: ignore[no-untyped-def]
    task = await store.tasks.by_id_any(task_id)
    assert task is not None
    return task


async def test_a_key_replays_the_task_as_it_is_now(store: Store) -> None:
    first = await store.tasks.create(new_task(), key())
    assert (first.kind, first.task is not None) == ("created", True)
    assert first.task is not None
    await store.tasks.request_cancel(ANN, first.task.task_id)
    again = await store.tasks.create(new_task(), key())
    assert again.kind == "replayed"
    assert again.task is not None
    assert (again.task.task_id, again.task.status) == (first.task.task_id, Status.CANCELLED)
    assert again.task.params == {"messages": []}
    assert (await store.tasks.create(new_task(), key(b"another"))) == CreateResult("conflict", None)
    assert await count(store) == 1


async def test_keys_belong_to_a_user_and_a_route(store: Store) -> None:
    for other in (key(), key(user_id="bob"), key(route="POST /v1/tasks/bulk"), key(key="k-2")):
        assert (await store.tasks.create(new_task(), other)).kind == "created"
    assert await count(store) == 4


async def test_an_expired_key_is_free(store: Store) -> None:
    first = await store.tasks.create(new_task(), key(ttl_seconds=-1))
    again = await store.tasks.create(new_task(), key(b"another"))
    assert (first.kind, again.kind) == ("created", "created")
    assert (await store.tasks.create(new_task(), key(b"another"))).kind == "replayed"


async def test_the_key_of_a_deleted_task_is_free(store: Store) -> None:
    first = await store.tasks.create(new_task(), key())
    assert first.task is not None
    await store.tasks.request_cancel(ANN, first.task.task_id)
    assert await store.tasks.delete(ANN, first.task.task_id) == "deleted"
    again = await store.tasks.create(new_task(), key(b"another"))
    assert again.kind == "created"
    assert (await store.tasks.create(new_task(), key(b"another"))).kind == "replayed"


async def test_a_bulk_replays_in_order_with_its_reply(store: Store) -> None:
    news = [new_task() for _ in range(3)]
    await store.tasks.create_many(news, key(reply='["problem"]'))
    await store.tasks.request_cancel(ANN, news[1].task_id)
    await store.tasks.delete(ANN, news[1].task_id)
    again = await store.tasks.create_many([new_task()], key(reply="ignored"))
    assert (again.kind, again.reply) == ("replayed", '["problem"]')
    assert [task and task.task_id for task in again.tasks] == [news[0].task_id, None, news[2].task_id]


async def test_fifty_equal_submits_at_once_make_one_task(store: Store, database_url: str) -> None:
    other = Store(make_engine(database_url, pool_size=5, application_name="second-process"))
    results = await asyncio.gather(
        *((store if n % 2 else other).tasks.create(new_task(), key()) for n in range(50))
    )
    await other.aclose()
    assert sorted(result.kind for result in results) == ["created"] + ["replayed"] * 49
    assert len({result.task.task_id for result in results if result.task}) == 1
    assert await count(store) == 1


async def test_racing_for_an_expired_key_makes_one_task(store: Store) -> None:
    await store.tasks.create(new_task(), key(ttl_seconds=-1))
    results = await asyncio.gather(*(store.tasks.create(new_task(), key()) for _ in range(20)))
    assert sorted(result.kind for result in results) == ["created"] + ["replayed"] * 19


async def test_a_submit_that_fails_keeps_no_key(store: Store) -> None:
    taken = await created(store)
    with pytest.raises(StoreRefused):
        await store.tasks.create(new_task(task_id=taken.task_id), key())
    assert (await store.tasks.create(new_task(), key())).kind == "created"


async def test_a_submit_waits_for_the_owner_of_its_key(store: Store, database_url: str) -> None:
    """The first writer dies before its commit: the second makes the task. No mark outlives a crash."""
    owner = await asyncpg.connect(database_url)
    transaction = owner.transaction()
    await transaction.start()
    await owner.execute(
        "INSERT INTO idempotency_keys (user_id, route, key, fingerprint, task_ids, expires_at) "
        "VALUES ('ann', 'POST /v1/tasks', 'k-1', 'body', '{x}', now() + interval '1 day')"
    )
    submit = asyncio.create_task(store.tasks.create(new_task(), key()))
    await until(lambda: somebody_waits_for_a_lock(database_url))
    assert not submit.done()
    owner.terminate()
    assert (await submit).kind == "created"


async def somebody_waits_for_a_lock(url: str) -> bool:
    watch = await asyncpg.connect(url)
    try:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        return bool(await watch.fetchval(waiting))
    finally:
        await watch.close()


@pytest.mark.parametrize(
    "values",
    [
        {"user_id": "a\0b"},
        {"user_id": "a\ud83d"},
        {"metadata": {"k": "a\0b"}},
        {"metadata": {"a\0": "v"}},
        {"metadata": {"k": "\ude00"}},
        {"params_json": '{"a": "\ud83d"}'},
        {"callback_url": "https://x/" + "y" * 2048},
        {"user_id": "u" * 65},
        {"model_id": ""},
        {"task_type": ""},
        {"max_retries": 2**40},
        {"max_retries": -1},
        {"deadline_seconds": 1e300},
        {"traceparent": "\0"},
    ],
)
async def test_what_postgres_cannot_hold_is_refused_and_leaves_nothing(
    store: Store, values: dict[str, object]
) -> None:
    with pytest.raises(StoreRefused):
        await store.tasks.create(new_task(**values), key())
    assert await count(store) == 0
    assert (await store.tasks.create(new_task(), key())).kind == "created"


async def test_others_tasks_do_not_exist(store: Store) -> None:
    task = await created(store)
    for unknown in (task.task_id, names.new_task_id(), "", "junk", "a\0b", "é", "x" * 10_000, "\ud83d"):
        assert await store.tasks.get(BOB, unknown) is None
    assert await store.tasks.get(ADMIN, task.task_id) is not None
    assert await store.tasks.delete(BOB, task.task_id) == "unknown"
    assert (await store.tasks.request_cancel(BOB, task.task_id)).kind == "unknown"
    assert (await store.tasks.set_priority(BOB, task.task_id, Priority.HIGH)).kind == "unknown"
    assert await store.deliveries.list_for_task(BOB, task.task_id) is None
    assert await store.tasks.summaries(BOB, [task.task_id]) == []
    assert (await row(store, task)).change_seq == task.change_seq


async def test_parts_come_only_when_asked_for(store: Store) -> None:
    task = await finished(store)
    bare = await store.tasks.get(ANN, task.task_id, include=())
    assert bare is not None
    assert (bare.params, bare.result, bare.attempts) == (None, None, [])
    whole = await store.tasks.get(ANN, task.task_id)
    assert whole is not None
    assert whole.result is not None
    assert (whole.params, whole.result["text"], len(whole.attempts)) == ({"messages": []}, "the answer", 1)


async def count(store: Store) -> int:
    return sum((await store.tasks.count_by_state()).values())
