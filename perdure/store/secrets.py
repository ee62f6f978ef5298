"""Callback secrets, sealed by the caller: one current per user, older ones while a rotation overlaps."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from typing import Final

from perdure.store.base import Repository, Unit, sql
from perdure.store.errors import StoreUnavailable
from perdure.store.rows import SecretRow

_COLUMNS: Final = "secret_id, user_id, sealed, created_at, retires_at"
_ACTIVE: Final = sql(
    f"SELECT {_COLUMNS} FROM callback_secrets "
    "WHERE user_id = :user AND (retires_at IS NULL OR retires_at > now()) "
    "ORDER BY retires_at IS NULL DESC, created_at DESC, secret_id"
)
_INSERT: Final = sql(
    "INSERT INTO callback_secrets (secret_id, user_id, sealed) VALUES (:id, :user, :sealed) "
    f"ON CONFLICT (user_id) WHERE retires_at IS NULL DO NOTHING RETURNING {_COLUMNS}"
)
_CURRENT: Final = sql(f"SELECT {_COLUMNS} FROM callback_secrets WHERE user_id = :user AND retires_at IS NULL")
# Users rotate one after the other: the lock is theirs alone and ends with the transaction.
_LOCK: Final = sql("SELECT pg_advisory_xact_lock(7246003, hashtext(:user))")
_RETIRE: Final = sql(
    "UPDATE callback_secrets SET retires_at = now() + make_interval(secs => :seconds) "
    "WHERE user_id = :user AND retires_at IS NULL"
)
_USERS: Final = sql("SELECT DISTINCT user_id FROM callback_secrets ORDER BY user_id")


class SecretRepository(Repository):
    """Sealed blobs only; this module cannot read them."""

    async def active(self, user_id: str) -> list[SecretRow]:
        """The current secret first, then those whose overlap runs, newest first. Empty when there is none."""
        return [SecretRow(*row) for row in await self._one(_ACTIVE, user=user_id)]

    async def ensure(self, secret_id: str, user_id: str, sealed: bytes) -> SecretRow:
        """The user's current secret; the given one becomes it when there is none. One winner among racers."""
        for _ in range(3):
            rows = await self._one(_CURRENT, user=user_id)
            rows = rows or await self._one(_INSERT, id=secret_id, user=user_id, sealed=sealed)
            if rows:
                return SecretRow(*rows[0])
        raise StoreUnavailable("the callback secret changes hands too fast; try again")

    async def rotate(self, secret_id: str, user_id: str, sealed: bytes, overlap_seconds: float) -> SecretRow:
        """Makes a new current secret; the one before retires after `overlap_seconds`.

        A secret that retires already keeps its time: rotating twice fast cuts no overlap short.
        """

        async def work(unit: Unit) -> SecretRow:
            await unit.run(_LOCK, user=user_id)
            await unit.run(_RETIRE, user=user_id, seconds=float(overlap_seconds))
            values = {"id": secret_id, "user": user_id, "sealed": sealed}
            rows = await unit.run(_INSERT, **values)
            if not rows:  # `ensure` of another process came in between
                raise StoreUnavailable("the callback secret is being made; try again")
            return SecretRow(*rows[0])

        return await self._unit(work)

    async def users(self) -> list[str]:
        """Users that have a secret."""
        return [row[0] for row in await self._one(_USERS)]
