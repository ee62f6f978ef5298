"""A real Postgres for tests: one server per xdist worker, one migrated database, emptied for each test.

Fixtures: `postgres` (the process), `database_url` (migrated, empty), `store`, and `own_postgres`, a server of
the test's own to stop and kill.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from perdure.embedded.postgres import EmbeddedPostgres
from perdure.store import Store, make_engine
from perdure.store.migrate import migrate
from perdure.store.tables import metadata

# Safe when the server's processes are killed, which tests do; only the machine must not fail.
FAST = {"fsync": "off", "full_page_writes": "off", "autovacuum_naptime": "60s"}
_EMPTY = f"TRUNCATE {', '.join(metadata.tables)} CASCADE"


@contextmanager
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """A server in a temporary folder, where the account that Postgres runs under can reach it."""
    root = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
    server = EmbeddedPostgres(root, settings=FAST)
    try:
        yield server.start()
    finally:
        server.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """The server of this xdist worker. Do not stop it: take `own_postgres` for that."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated_url(postgres: EmbeddedPostgres) -> str:
    """The URL of the migrated database. It is as the test before left it: prefer `database_url`."""
    migrate(postgres.dsn)
    return postgres.dsn


@pytest.fixture
async def database_url(migrated_url: str) -> str:
    """The URL of the migrated database, emptied."""
    connection = await asyncpg.connect(migrated_url)
    try:
        await connection.execute(_EMPTY)
    finally:
        await connection.close()
    return migrated_url


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    """A store on the emptied database."""
    store = Store(make_engine(database_url, pool_size=10, application_name="perdure-test"))
    yield store
    await store.aclose()


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A migrated server of the test's own, to stop, kill and start."""
    with postgres_server() as server:
        migrate(server.dsn)
        yield server
