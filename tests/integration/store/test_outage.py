"""Postgres goes away and comes back: callers hear StoreUnavailable, and the pool mends itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import asyncpg
import pytest

from perdure.contracts import CommitReceipt
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.store import Store, StoreError, StoreUnavailable, make_engine
from perdure.store.base import Repository, sql
from perdure.task.states import Status
from tests.integration.store.helpers import (
    ANN,
    CALLBACK,
    created,
    new_task,
    now,
    outcome,
    projection,
    row,
    running,
)
from tests.support.waiting import until


@pytest.fixture
async def small(database_url: str) -> AsyncIterator[Store]:
    """A store with three connections."""
    store = Store(make_engine(database_url, pool_size=3, application_name="small"))
    yield store
    await store.aclose()


async def works(store: Store) -> bool:
    try:
        await store.ping()
    except StoreUnavailable:
        return False
    return True


async def test_a_restart_in_the_middle_of_use(own_postgres: EmbeddedPostgres) -> None:
    store = Store(make_engine(own_postgres.dsn, pool_size=5, application_name="test"))
    accepted: list[str] = []
    refused: list[BaseException] = []
    stop = asyncio.Event()

    async def submit() -> None:
        while not stop.is_set():
            try:
                result = await store.tasks.create(new_task())
            except StoreUnavailable as error:
                refused.append(error)
                await asyncio.sleep(0.01)
            else:
                assert result.task is not None
                accepted.append(result.task.task_id)

    clients = [asyncio.create_task(submit()) for _ in range(8)]
    await until(lambda: len(accepted) > 20)
    await asyncio.to_thread(own_postgres.stop)
    await until(lambda: len(refused) > 5)
    with pytest.raises(StoreUnavailable):
        await store.tasks.list(ANN)
    before = len(accepted)
    await asyncio.to_thread(own_postgres.start)
    await until(lambda: len(accepted) > before + 20)
    stop.set()
    await asyncio.gather(*clients)
    assert len(await store.tasks.summaries(ANN, accepted)) == len(set(accepted)) == len(accepted)
    await store.aclose()


async def test_after_a_quiet_restart_the_first_call_already_works(own_postgres: EmbeddedPostgres) -> None:
    """No pooled connection of the old server is given out."""
    store = Store(make_engine(own_postgres.dsn, pool_size=5, application_name="test"))
    await asyncio.gather(*(store.ping() for _ in range(5)))
    await asyncio.to_thread(own_postgres.kill)
    await asyncio.to_thread(own_postgres.start)
    task = await created(store)
    assert (await row(store, task)).status is Status.PENDING
    await asyncio.gather(*(store.ping() for _ in range(20)))
    await store.aclose()


async def test_nothing_listens() -> None:
    store = Store(make_engine("postgresql://a:b@127.0.0.1:9/none", pool_size=2, application_name="test"))
    for call in (
        store.ping(),
        store.schema_state(),
        store.tasks.list(ANN),
        store.tasks.request_cancel(ANN, "x"),
    ):
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await call
    await store.aclose()


async def test_wrong_password_and_wrong_url(own_postgres: EmbeddedPostgres) -> None:
    url = own_postgres.dsn.replace("perdure:", "perdure:wrong", 1)
    store = Store(make_engine(url, pool_size=2, application_name="test"))
    with pytest.raises(StoreError, match="password"):
        await store.ping()
    await store.aclose()
    for bad in ("mysql://a@b/c", "nonsense", ""):
        with pytest.raises(StoreError):
            make_engine(bad, pool_size=1, application_name="test")


async def test_a_pooler_that_takes_no_session_settings_is_named(unused_tcp_port: int) -> None:
    """PgBouncer in transaction mode refuses start-up parameters; its words reach the operator."""
    text = b"SFATAL\0C08P01\0Munsupported startup parameter: statement_timeout\0\0"
    refusal = b"E" + (len(text) + 4).to_bytes(4, "big") + text

    async def pooler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size == 8:  # asks for TLS
            await reader.readexactly(4)
            writer.write(b"N")
            size = int.from_bytes(await reader.readexactly(4), "big")
        await reader.readexactly(size - 4)
        writer.write(refusal)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(pooler, "127.0.0.1", unused_tcp_port)
    url = f"postgresql://a:b@127.0.0.1:{unused_tcp_port}/c"
    store = Store(make_engine(url, pool_size=1, application_name="t"))
    with pytest.raises(StoreUnavailable, match="unsupported startup parameter: statement_timeout"):
        await store.ping()
    await store.aclose()
    server.close()
    await server.wait_closed()


async def test_a_kill_among_commits_leaves_whole_outcomes(own_postgres: EmbeddedPostgres) -> None:
    """Row, result and callback of an outcome are all there or none is, and it can be committed again."""
    store = Store(make_engine(own_postgres.dsn, pool_size=5, application_name="test"))
    news = [new_task(callback_url=CALLBACK) for _ in range(60)]
    tasks = [task for task in (await store.tasks.create_many(news)).tasks if task]
    ends = [outcome(task, 2) for task in tasks]
    first = asyncio.gather(*(store.tasks.commit(end) for end in ends), return_exceptions=True)

    async def some_are_in() -> bool:
        return (await store.deliveries.counts())["PENDING"] > 5

    await until(some_are_in, every=0)
    own_postgres.kill()
    answers = await first
    assert all(isinstance(answer, CommitReceipt | StoreUnavailable) for answer in answers)
    await asyncio.to_thread(own_postgres.start)
    for task, answer in zip(tasks, answers, strict=True):
        seen = await row(store, task)
        final = seen.status is Status.COMPLETED
        assert final or not isinstance(answer, CommitReceipt), "what was answered is kept"
        assert (seen.result is not None) == final
        assert len(await store.deliveries.list_for_task(ANN, task.task_id) or []) == final
    again = await asyncio.gather(*(store.tasks.commit(end) for end in ends))
    assert {receipt.kind for receipt in again} == {"committed"}
    assert len({receipt.delivery_id for receipt in again}) == 60
    assert (await store.deliveries.counts())["PENDING"] == 60
    await store.aclose()


async def test_a_database_without_schema_is_unavailable_not_broken(own_postgres: EmbeddedPostgres) -> None:
    url = own_postgres.dsn.rsplit("/", 1)[0] + "/postgres"
    store = Store(make_engine(url, pool_size=1, application_name="test"))
    with pytest.raises(StoreUnavailable, match="tasks"):
        await store.tasks.list(ANN)
    await store.aclose()


async def test_a_connection_that_the_server_ends_is_replaced(small: Store, database_url: str) -> None:
    await asyncio.gather(*(small.ping() for _ in range(3)))
    await terminate(database_url, "small")
    assert (await created(small)).status is Status.PENDING


async def terminate(url: str, application: str) -> None:
    admin = await asyncpg.connect(url)
    ended = "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE application_name = $1"
    assert await admin.fetchval(ended, application)
    await admin.close()


async def test_a_server_that_became_read_only_is_left(small: Store, database_url: str) -> None:
    """After a failover the old primary takes no writes: its connections are given up for new ones."""
    admin = await asyncpg.connect(database_url)
    database = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    try:
        with pytest.raises(StoreUnavailable, match="read-only"):
            await small.tasks.create(new_task())
    finally:
        await admin.execute("SET default_transaction_read_only = off")
        await admin.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
        await admin.close()
    assert (await small.tasks.create(new_task())).kind == "created"


async def test_no_connection_comes_free(small: Store, database_url: str) -> None:
    holder = await asyncpg.connect(database_url)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("LOCK TABLE tasks IN ACCESS EXCLUSIVE MODE")
    stuck = [asyncio.create_task(small.tasks.list(ANN)) for _ in range(3)]
    await until(lambda: small.engine.pool.checkedout() == 3)  # type: ignore[attr-defined]
    with pytest.raises(StoreUnavailable, match="came free"):
        await small.ping()
    await transaction.rollback()
    await holder.close()
    assert all(page.tasks == [] for page in await asyncio.gather(*stuck))
    await small.ping()


async def test_a_lock_that_does_not_come_is_not_waited_for_long(database_url: str) -> None:
    engine = make_engine(
        database_url, pool_size=2, application_name="test", server_settings={"lock_timeout": "100"}
    )
    store = Store(engine)
    task = await created(store)
    holder = await asyncpg.connect(database_url)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("SELECT 1 FROM tasks FOR UPDATE")
    for call in (
        store.tasks.project(projection(task, 1, Status.QUEUED)),
        store.tasks.commit(outcome(task, 2)),
        store.tasks.request_cancel(ANN, task.task_id),
    ):
        with pytest.raises(StoreUnavailable, match="lock"):
            await call
    assert await store.dispatch.claim("local", 3, 5, 5, "x") == [], "dispatch passes locked rows over"
    await transaction.rollback()
    await holder.close()
    assert (await store.tasks.commit(outcome(task, 2))).kind == "committed"
    await store.aclose()


async def test_callers_that_go_away_take_no_connection_with_them(small: Store, database_url: str) -> None:
    task = await running(small)
    calls = (
        lambda: small.tasks.list(ANN),
        lambda: small.tasks.create(new_task()),
        lambda: small.tasks.request_cancel(ANN, task.task_id),
        lambda: small.dispatch.claim("local", 3, 2, 0.01, "x"),
        lambda: small.dispatch.lanes(),
    )

    async def impatient() -> None:
        one = asyncio.ensure_future(random.choice(calls)())
        await asyncio.sleep(random.random() * 0.01)
        one.cancel()
        try:
            await one
        except (asyncio.CancelledError, StoreUnavailable):
            pass

    for _ in range(10):
        await asyncio.gather(*(impatient() for _ in range(20)))
    await asyncio.gather(*(small.ping() for _ in range(20)))
    assert small.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    admin = await asyncpg.connect(database_url)

    async def all_idle() -> bool:
        states = await admin.fetch("SELECT state FROM pg_stat_activity WHERE application_name = 'small'")
        return len(states) <= 3 and {row[0] for row in states} == {"idle"}

    await until(all_idle)
    await admin.close()


async def test_connections_are_given_out_in_the_order_of_asking(database_url: str) -> None:
    """Who asks again at once does not pass those that wait."""
    store = Store(make_engine(database_url, pool_size=1, application_name="test"))
    order: list[int] = []

    async def client(number: int) -> None:
        for _ in range(5):
            await store.ping()
            order.append(number)

    await asyncio.gather(*(client(number) for number in range(6)))
    await store.aclose()
    assert order == [*range(6)] * 5


async def test_a_schema_change_under_a_prepared_statement(small: Store, database_url: str) -> None:
    task = await created(small)
    for _ in range(3):
        await asyncio.gather(*(row(small, task) for _ in range(3)))
    admin = await asyncpg.connect(database_url)
    await admin.execute("ALTER TABLE tasks ALTER COLUMN error_message TYPE varchar")
    try:
        assert (await row(small, task)).task_id == task.task_id
        assert (await small.tasks.request_cancel(ANN, task.task_id)).kind == "cancelled"
    finally:
        await admin.execute("ALTER TABLE tasks ALTER COLUMN error_message TYPE text")
        await admin.close()


async def test_times_are_utc_whatever_the_zones(small: Store, database_url: str) -> None:
    admin = await asyncpg.connect(database_url)
    database = await admin.fetchval("SELECT current_database()")
    await admin.execute(f"ALTER DATABASE {database} SET timezone = 'America/New_York'")
    try:
        task = await created(small, not_before=now().replace(microsecond=7))
        assert task.created_at.utcoffset() is not None
        assert abs((task.created_at - now()).total_seconds()) < 60
        assert task.not_before is not None
        assert task.not_before.microsecond == 7
    finally:
        await admin.execute(f"ALTER DATABASE {database} RESET timezone")
        await admin.close()


async def test_what_the_session_is_told(small: Store) -> None:
    class Ask(Repository):
        async def setting(self, name: str) -> str:
            return str((await self._one(sql("SELECT current_setting(:name)"), name=name))[0][0])

    ask = Ask(small._database)
    names = (
        "TimeZone",
        "statement_timeout",
        "lock_timeout",
        "idle_in_transaction_session_timeout",
        "application_name",
    )
    assert [await ask.setting(name) for name in names] == ["UTC", "15s", "5s", "15s", "small"]
