"""The schema goes up and down, by one migrator at a time, and never waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from perdure.embedded.postgres import EmbeddedPostgres
from perdure.store import Store, StoreUnavailable, make_engine
from perdure.store.migrate import alembic_config, downgrade, migrate
from perdure.store.migrations import NEWEST
from perdure.store.tables import metadata
from tests.integration.store.helpers import created
from tests.support.postgres import postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server without a schema: these tests take schemas away."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def empty_url(server: EmbeddedPostgres) -> str:
    """Its database, with no schema in it."""
    migrate(server.dsn)
    downgrade(server.dsn, "base")
    return server.dsn


async def revision(url: str) -> str | None:
    store = Store(make_engine(url, pool_size=1, application_name="test"))
    try:
        return (await store.schema_state()).current
    finally:
        await store.aclose()


def test_newest_revision_is_the_one_the_code_expects() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == NEWEST


async def test_revisions_make_exactly_the_tables_of_the_code(empty_url: str) -> None:
    await asyncio.to_thread(migrate, empty_url)
    engine = make_engine(empty_url, pool_size=1, application_name="test")

    def differences(connection: Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection), metadata)

    try:
        async with engine.connect() as connection:
            assert await connection.run_sync(differences) == []
    finally:
        await engine.dispose()


async def test_up_down_and_up_again(empty_url: str) -> None:
    await asyncio.to_thread(migrate, empty_url)
    assert await revision(empty_url) == NEWEST
    await asyncio.to_thread(downgrade, empty_url, "base")
    connection = await asyncpg.connect(empty_url)
    tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    sequences = await connection.fetch("SELECT sequencename FROM pg_sequences")
    await connection.close()
    assert ({row[0] for row in tables}, len(sequences)) == ({"alembic_version"}, 0)
    await asyncio.to_thread(migrate, empty_url)
    assert await revision(empty_url) == NEWEST


async def test_rows_of_an_older_schema_survive_the_upgrade(empty_url: str) -> None:
    await asyncio.to_thread(migrate, empty_url)
    store = Store(make_engine(empty_url, pool_size=1, application_name="test"))
    task = await created(store)
    await asyncio.to_thread(downgrade, empty_url, "0001")
    assert not (await store.schema_state()).ok
    await asyncio.to_thread(migrate, empty_url)
    assert (await store.schema_state()).ok
    found = await store.tasks.by_id_any(task.task_id)
    assert found is not None
    assert found.params == {"messages": []}
    await store.aclose()


async def test_code_goes_on_with_a_newer_schema(empty_url: str) -> None:
    """A release that is still running meets the columns of the next one."""
    await asyncio.to_thread(migrate, empty_url)
    store = Store(make_engine(empty_url, pool_size=2, application_name="test"))
    task = await created(store)
    other = await asyncpg.connect(empty_url)
    await other.execute("ALTER TABLE tasks ADD COLUMN later text")
    await other.execute("UPDATE alembic_version SET version_num = '9999'")
    assert (await store.schema_state()).ok
    assert await store.tasks.by_id_any(task.task_id)
    assert await created(store)
    await other.execute("ALTER TABLE tasks DROP COLUMN later")
    await other.execute("UPDATE alembic_version SET version_num = $1", NEWEST)
    await other.close()
    await store.aclose()


async def test_schema_state_without_any_schema(empty_url: str) -> None:
    store = Store(make_engine(empty_url, pool_size=1, application_name="test"))
    state = await store.schema_state()
    await store.aclose()
    assert (state.current, state.expected, state.ok) == (None, NEWEST, False)


def test_five_migrators_at_once(empty_url: str) -> None:
    with ThreadPoolExecutor(5) as threads:
        for done in [threads.submit(migrate, empty_url) for _ in range(5)]:
            done.result()
    assert asyncio.run(revision(empty_url)) == NEWEST


async def test_a_held_lock_fails_the_upgrade_fast_and_it_can_be_repeated(empty_url: str) -> None:
    await asyncio.to_thread(migrate, empty_url)
    await asyncio.to_thread(downgrade, empty_url, "0001")
    holder = await asyncpg.connect(empty_url)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("SELECT count(*) FROM tasks")  # a report that runs for hours
    with pytest.raises(StoreUnavailable, match="lock timeout"):
        await asyncio.to_thread(migrate, empty_url, lock_timeout=0.2)
    assert await revision(empty_url) == "0001"
    await transaction.rollback()
    await holder.close()
    await asyncio.to_thread(migrate, empty_url)
    assert await revision(empty_url) == NEWEST


def test_no_server_is_said_so() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        migrate("postgresql://nobody:nothing@127.0.0.1:9/none")
