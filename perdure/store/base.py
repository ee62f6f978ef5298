"""How a repository talks to Postgres: one unit of work per call, one family of errors.

    rows = await self._one(SQL, name=value)          one statement, its own transaction, one round trip
    value = await self._unit(work)                   several statements in one transaction

A connection is held for exactly that long. What fails raises StoreUnavailable or StoreRefused.

Connections come from SQLAlchemy's pool and statements are compiled by it, once; they run on the driver
itself, since the layer between costs three times what the driver does (measured: 235 against 75 µs).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Final, TypeVar

import asyncpg  # type: ignore[import-untyped]
import sqlalchemy.exc
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import asyncpg as dialect
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import greenlet_spawn

from perdure.store.errors import StoreError, StoreRefused, StoreUnavailable

T = TypeVar("T")
Rows = Sequence[Any]  # of the driver's records: by position, and sliceable

# Classes and codes of SQLSTATE, from Postgres' appendix A.
_REFUSED: Final = ("22", "23")  # data exception, integrity constraint
_UNAVAILABLE: Final = (
    "08",  # connection
    "0A000",  # a migration changed the result of a statement that this transaction had prepared
    "25006",  # read-only: an old primary after a failover
    "25P03",  # idle in transaction for too long
    "40",  # serialization, deadlock
    "42P01",  # the schema is not there yet
    "42703",
    "53",  # no connections, disk or memory left
    "55P03",  # a lock did not come
    "57",  # shutting down, starting up, cancelled by a timeout
    "58",  # system error
)
_OF_NO_USE: Final = frozenset({"25006", "57P01", "57P02", "57P03"})  # this connection will not get better

ACTIVE: Final = "('PENDING', 'QUEUED', 'PROCESSING')"
# Every visible change of a task row ends with this. The sequence orders changes; the transaction's id lets a
# feed know which changes can still appear behind it.
TOUCH: Final = (
    "updated_at = now(), change_seq = nextval('task_changes'), "
    "change_xid = CAST(CAST(pg_current_xact_id() AS text) AS bigint)"
)


class Statement:
    """SQL with :names. Casts are written CAST(… AS …): two colons would read as a name."""

    def __init__(self, words: str) -> None:
        self.words = words

    @cached_property
    def _compiled(self) -> tuple[str, tuple[str, ...]]:
        compiled = text(self.words).compile(dialect=dialect.dialect())  # type: ignore[no-untyped-call]
        return str(compiled), tuple(compiled.positiontup or ())

    async def run(self, driver: Any, params: dict[str, Any]) -> Rows:
        """Runs on a driver's connection. A missing parameter is a KeyError."""
        words, names = self._compiled
        rows: Rows = await driver.fetch(words, *(params[name] for name in names))
        return rows


class Unit:
    """A transaction under way."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    async def run(self, statement: Statement, **params: Any) -> Rows:
        """One statement of it. Its rows."""
        return await statement.run(self._driver, params)


class Database:
    """The connections of one engine, given out in the order of asking.

    The pool alone would let whoever asks at the right moment pass those that wait; under load some wait for
    seconds then.
    """

    def __init__(self, engine: AsyncEngine, patience: float = 2.0) -> None:
        self.engine = engine
        self._places = asyncio.Semaphore(engine.pool.size())  # type: ignore[attr-defined]
        self._patience = patience
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """The driver's connection of a pooled one, for one unit of work.

        Raises StoreUnavailable when none comes free within `patience` seconds. A caller that is cancelled
        leaves at once; what it was doing is cancelled on the server too, and its connection closed.
        """
        await self._take_place()
        try:
            pooled = await greenlet_spawn(self.engine.sync_engine.pool.connect)
        except BaseException as error:
            self._places.release()
            if isinstance(error, FAULTS):
                raise store_error(error) from error
            raise
        driver: Any = pooled.driver_connection
        try:
            yield driver
        except Exception as error:
            if _is_the_end_of(error):
                driver.terminate()
            await self._give_back(pooled)
            if isinstance(error, FAULTS):
                raise store_error(error) from error
            raise
        except BaseException:
            leaving = asyncio.create_task(self._leave(pooled, driver))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            raise
        await self._give_back(pooled)

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._places.acquire()
        except TimeoutError as error:
            raise StoreUnavailable("no database connection came free in time") from error

    async def _give_back(self, pooled: PoolProxiedConnection) -> None:
        await greenlet_spawn(pooled.close)  # asks nothing of the server: it cannot be interrupted
        self._places.release()

    async def _leave(self, pooled: PoolProxiedConnection, driver: Any) -> None:
        """Closes a connection in the middle of something. Nobody can know how much of it was done."""
        try:
            await driver.close(timeout=2)  # has the server cancel the statement first
        except (*FAULTS, asyncio.CancelledError):
            driver.terminate()
        finally:
            await self._give_back(pooled)

    async def aclose(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*self._leaving)
        await self.engine.dispose()


class Repository:
    """What every repository is made of."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _one(self, statement: Statement, **params: Any) -> Rows:
        """One statement in a transaction of its own. Its rows."""
        async with self._database.connection() as driver:
            return await statement.run(driver, params)

    async def _unit(self, work: Callable[[Unit], Awaitable[T]]) -> T:
        """Several statements in one transaction."""
        async with self._database.connection() as driver:
            # In words: the driver's own transactions lose count when cancelled while they begin or end.
            await driver.execute("BEGIN")
            try:
                value = await work(Unit(driver))
            except Exception:
                if not driver.is_closed():
                    await driver.execute("ROLLBACK")
                raise
            await driver.execute("COMMIT")
            return value


FAULTS: Final = (
    sqlalchemy.exc.SQLAlchemyError,
    dialect.AsyncAdapt_asyncpg_dbapi.Error,  # what the pool raises when the server refuses a connection
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the driver met the server's farewell in the middle of a statement
    OSError,  # refused, reset, name not found; TimeoutError is one too
    UnicodeEncodeError,  # a lone surrogate in a plain text column
)


def sql(words: str) -> Statement:
    """A statement. It is compiled when it first runs."""
    return Statement(words)


# For the transaction: read indexes in their order, row by row. A queue fills and empties faster than the
# planner's statistics follow; judging by them it reads and sorts 50,000 rows (165 ms) to find 32 (1 ms).
INDEX_ORDER: Final = sql(
    "SELECT set_config('enable_sort', 'off', true), set_config('enable_seqscan', 'off', true), "
    "set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true), "
    "set_config('enable_mergejoin', 'off', true)"
)


def store_error(error: BaseException) -> StoreError:
    """The StoreError that a fault of driver, pool or server means to a caller."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig is not None:
        error = error.orig  # migrations run through SQLAlchemy, which wraps
    if isinstance(error, dialect.AsyncAdapt_asyncpg_dbapi.Error) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, asyncpg.PostgresError):
        return _by_state(error.sqlstate or "", error)
    if isinstance(error, ValueError | TypeError | OverflowError):  # the driver's: no value of that type
        return StoreRefused(_line(error))
    if isinstance(error, OSError | asyncpg.InterfaceError | asyncpg.InternalClientError):
        return StoreUnavailable(f"the database cannot be reached: {_line(error)}")
    return StoreError(_line(error))


def _is_the_end_of(error: Exception) -> bool:
    """Whether the connection is of no more use. A value that the driver cannot encode does it no harm."""
    if isinstance(error, asyncpg.InternalClientError):
        return True
    if isinstance(error, asyncpg.InterfaceError):
        return not isinstance(error, ValueError)
    return getattr(error, "sqlstate", None) in _OF_NO_USE


def _by_state(state: str, error: BaseException) -> StoreError:
    if state.startswith(_REFUSED):
        return StoreRefused(_line(error))
    if state.startswith(_UNAVAILABLE):
        return StoreUnavailable(_line(error))
    return StoreError(_line(error))


def _line(error: BaseException) -> str:
    """The first line of a fault: the detail that follows may hold the caller's data."""
    words = str(error).strip().splitlines()
    return words[0][:300] if words else type(error).__name__
