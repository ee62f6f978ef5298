"""How a repository talks to Postgres: one unit of work per call, one family of errors.

    rows = await self._one(SQL, name=value)          one statement, its own transaction, one round trip
    value = await self._unit(work)                   several statements in one transaction

A connection is held for exactly that long. What fails raises StoreUnavailable or StoreRefused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import asyncpg  # type: ignore[import-untyped]
import sqlalchemy.exc
from sqlalchemy import Executable, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from perdure.store.errors import StoreError, StoreRefused, StoreUnavailable

T = TypeVar("T")
Rows = Sequence[Any]

# Classes and codes of SQLSTATE, from Postgres' appendix A.
_REFUSED: Final = ("22", "23")  # data exception, integrity constraint
_UNAVAILABLE: Final = (
    "08",  # connection
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
DISCONNECTED: Final = frozenset({"25006", "57P01", "57P02", "57P03"})  # this connection is of no more use

ACTIVE: Final = "('PENDING', 'QUEUED', 'PROCESSING')"
# Every visible change of a task row ends with this. The sequence orders changes; the transaction's id lets a
# feed know which changes can still appear behind it.
TOUCH: Final = (
    "updated_at = now(), change_seq = nextval('task_changes'), "
    "change_xid = CAST(CAST(pg_current_xact_id() AS text) AS bigint)"
)


class Repository:
    """What every repository is made of."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._single = engine.execution_options(isolation_level="AUTOCOMMIT")

    async def _one(self, sql: Executable, **params: Any) -> Rows:
        """One statement in a transaction of its own. Its rows."""
        try:
            return await self._run_one(sql, params)
        except sqlalchemy.exc.NotSupportedError as error:
            # A migration changed the table under a prepared statement: nothing was done; caches are fresh.
            if not _is_stale_statement(error):
                raise store_error(error) from error
        except _FAULTS as error:
            raise store_error(error) from error
        try:
            return await self._run_one(sql, params)
        except _FAULTS as error:
            raise store_error(error) from error

    async def _run_one(self, sql: Executable, params: dict[str, Any]) -> Rows:
        async with self._single.connect() as connection:
            result = await connection.execute(sql, params)
            return result.all() if result.returns_rows else ()

    async def _unit(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Several statements in one transaction."""
        try:
            async with self._engine.begin() as connection:
                return await work(connection)
        except _FAULTS as error:
            raise store_error(error) from error


_FAULTS: Final = (
    sqlalchemy.exc.SQLAlchemyError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    OSError,  # refused, reset, name not found; TimeoutError is one too
    UnicodeEncodeError,  # a lone surrogate in a plain text column
)


def sql(statement: str) -> Executable:
    """A statement with :names. Casts are written CAST(… AS …): two colons would read as a name."""
    return text(statement)


def store_error(error: BaseException) -> StoreError:
    """The StoreError that a fault of driver, pool or server means to a caller."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, UnicodeEncodeError):
        return StoreRefused("text holds a lone surrogate, which UTF-8 cannot encode")
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return StoreUnavailable("no database connection came free in time")
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        cause = error.orig
        state = getattr(cause, "sqlstate", None)
        if error.connection_invalidated and not (state or "").startswith(_REFUSED):
            return StoreUnavailable(f"the database connection broke: {_line(cause)}")
        return _by_state(state, cause)
    if isinstance(error, asyncpg.PostgresError):
        return _by_state(error.sqlstate, error)
    if isinstance(error, OSError | asyncpg.InterfaceError):
        return StoreUnavailable(f"the database cannot be reached: {_line(error)}")
    return StoreError(_line(error))


def _by_state(state: str | None, cause: BaseException | None) -> StoreError:
    if state is None:  # the driver itself: a value that does not fit its type, or a connection it lost
        inner = getattr(cause, "__cause__", None)
        if isinstance(inner, ValueError | TypeError | OverflowError):
            return StoreRefused(_line(cause))
        return StoreUnavailable(_line(cause))
    if state.startswith(_REFUSED):
        return StoreRefused(_line(cause))
    if state.startswith(_UNAVAILABLE):
        return StoreUnavailable(_line(cause))
    return StoreError(_line(cause))


def _is_stale_statement(error: sqlalchemy.exc.DBAPIError) -> bool:
    return isinstance(getattr(error.orig, "__cause__", None), asyncpg.InvalidCachedStatementError)


def _line(error: BaseException | None) -> str:
    """The first line of a fault: the detail that follows may hold the caller's data."""
    words = str(error).strip().splitlines() if error is not None else []
    return words[0][:300] if words else type(error).__name__
