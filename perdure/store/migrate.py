"""Brings the schema up or down. One migrator works at a time; a lock that does not come fails the run."""

from __future__ import annotations


def migrate(url: str, *, lock_timeout: float = 5.0) -> None:
    """Upgrades to the newest revision. Blocking: call it from no event loop (or by asyncio.to_thread). Safe when
    several start at once. Raises StoreUnavailable when Postgres or a lock cannot be had; nothing is half done
    then, and it can be run again."""
    raise NotImplementedError


def downgrade(url: str, revision: str, *, lock_timeout: float = 5.0) -> None:
    """Goes back to `revision` ("base" for nothing). Loses data; for tests and emergencies."""
    raise NotImplementedError
