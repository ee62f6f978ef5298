"""The engine and the store built on it. Made in the composition roots, closed by them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import URL, event, make_url
from sqlalchemy.exc import ArgumentError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from perdure.store.base import Database, Repository, sql
from perdure.store.deliveries import DeliveryRepository
from perdure.store.dispatch import DispatchRepository
from perdure.store.errors import StoreError
from perdure.store.keys import KeyRepository
from perdure.store.line import LineRepository
from perdure.store.maintenance import MaintenanceRepository
from perdure.store.migrations import NEWEST
from perdure.store.news import NewsRepository
from perdure.store.rows import SchemaState
from perdure.store.secrets import SecretRepository
from perdure.store.stats import StatsRepository
from perdure.store.tasks import TaskRepository
from perdure.store.workers import WorkerRepository

CONNECT_TIMEOUT: Final = 3.0
_SERVER_SETTINGS: Final = {
    "timezone": "UTC",
    "statement_timeout": "15000",
    "lock_timeout": "5000",
    "idle_in_transaction_session_timeout": "15000",
    "jit": "off",
}


def database_url(url: str) -> URL:
    """The URL with our driver. Raises StoreError for what is no Postgres URL."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(
            "the database URL must look like postgresql://user:password@host:port/name"
        ) from error
    if parsed.drivername not in ("postgresql", "postgres", "postgresql+asyncpg"):
        raise StoreError(f"the database must be Postgres, not {parsed.drivername}")
    return parsed.set(drivername="postgresql+asyncpg")


def make_engine(
    url: str,
    *,
    pool_size: int,
    application_name: str,
    server_settings: dict[str, str] | None = None,
    command_timeout: float | None = 20,  # the server's own limit comes first, unless it is gone
) -> AsyncEngine:
    """An engine for postgresql:// or postgresql+asyncpg:// URLs. Connects on first use, never more than
    `pool_size` times. Session settings travel as start-up parameters: a pooler in transaction mode refuses
    them at the first connection, with their name in the message."""
    engine = create_async_engine(
        database_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_recycle=1800,
        connect_args={
            "timeout": CONNECT_TIMEOUT,
            "command_timeout": command_timeout,
            "statement_cache_size": 250,  # all of ours
            "max_cached_statement_lifetime": 0,
            "server_settings": {
                **_SERVER_SETTINGS,
                "application_name": application_name,
                **(server_settings or {}),
            },
        },
    )
    event.listen(engine.sync_engine, "checkout", _leave_dead_connections)
    return engine


def _leave_dead_connections(_: object, entry: ConnectionPoolEntry, __: object) -> None:
    """After a restart of Postgres the driver knows that its sockets are closed: no question is needed."""
    driver = entry.driver_connection
    if driver is not None and driver.is_closed():
        raise DisconnectionError


class Store(Repository):
    """The repositories over one engine. Every method is one unit of work; none holds a connection after."""

    def __init__(self, engine: AsyncEngine) -> None:
        database = Database(engine)
        super().__init__(database)
        self.engine = engine
        self.tasks = TaskRepository(database)
        self.dispatch = DispatchRepository(database)
        self.news = NewsRepository(database)
        self.lines = LineRepository(database)
        self.deliveries = DeliveryRepository(database)
        self.keys = KeyRepository(database)
        self.secrets = SecretRepository(database)
        self.workers = WorkerRepository(database)
        self.maintenance = MaintenanceRepository(database)
        self.stats = StatsRepository(database)

    async def ping(self) -> None:
        """Asks Postgres for an answer. Raises StoreUnavailable."""
        await self._one(_PING)

    async def schema_state(self) -> SchemaState:
        """Which revision the database has, and which this code expects. Raises StoreUnavailable."""
        if not (await self._one(_HAS_REVISION))[0][0]:
            return SchemaState(None, NEWEST, ok=False)
        rows = await self._one(_REVISION)
        current = str(rows[0][0]) if rows else None
        return SchemaState(current, NEWEST, ok=current is not None and current >= NEWEST)

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._database.aclose()


_PING = sql("SELECT 1")
_HAS_REVISION = sql("SELECT to_regclass('alembic_version') IS NOT NULL")
_REVISION = sql("SELECT version_num FROM alembic_version")
