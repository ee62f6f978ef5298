"""Brings the schema up or down. One migrator works at a time; a lock that does not come fails the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from perdure.store.base import FAULTS, store_error
from perdure.store.engine import make_engine

_MIGRATOR: Final = 7_246_001  # key of the advisory lock; any number, always this one
_PATIENCE: Final = "120s"  # for another migrator to end


def migrate(url: str, *, lock_timeout: float = 5.0) -> None:
    """Upgrades to the newest revision. Safe when several start at once.

    Blocking: call it outside an event loop, or by asyncio.to_thread. Raises StoreUnavailable when Postgres or
    a lock cannot be had within `lock_timeout` seconds; the revision that failed is undone as a whole, and the
    call can be repeated.
    """
    asyncio.run(_apply(url, lambda config: command.upgrade(config, "head"), lock_timeout))


def downgrade(url: str, revision: str, *, lock_timeout: float = 5.0) -> None:
    """Goes back to `revision` ("base" for nothing). Loses data: for tests and emergencies. Blocking."""
    asyncio.run(_apply(url, lambda config: command.downgrade(config, revision), lock_timeout))


def alembic_config() -> Config:
    """Alembic's configuration without an ini file: the revisions are part of the package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    return config


async def _apply(url: str, step: Callable[[Config], None], lock_timeout: float) -> None:
    engine = make_engine(
        url,
        pool_size=1,
        application_name="perdure-migrate",
        server_settings={"statement_timeout": "0", "lock_timeout": _PATIENCE},
        command_timeout=None,
    )

    def work(connection: Connection) -> None:
        config = alembic_config()
        config.attributes["connection"] = connection
        step(config)

    try:
        async with engine.connect() as connection:
            await _run(connection, text("SELECT pg_advisory_lock(:key)"), key=_MIGRATOR)
            await _run(
                connection,
                text("SELECT set_config('lock_timeout', :limit, false)"),
                limit=f"{round(lock_timeout * 1000)}ms",
            )
            try:
                await connection.run_sync(work)
                await connection.commit()
            finally:
                await connection.rollback()
                await _run(connection, text("SELECT pg_advisory_unlock(:key)"), key=_MIGRATOR)
    except FAULTS as error:
        raise store_error(error) from error
    finally:
        await engine.dispose()


async def _run(connection: AsyncConnection, statement: TextClause, **params: object) -> None:
    await connection.execute(statement, params)
    await connection.commit()
