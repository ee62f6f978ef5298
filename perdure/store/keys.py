"""API keys: found by id, compared by the caller, never stored in clear."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from perdure.store.base import Repository, sql
from perdure.store.rows import KeyRow, NewKey

_COLUMNS: Final = (
    "key_id, user_id, digest, scopes, act_as, name, created_at, expires_at, revoked_at, last_used_at, "
    "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())"
)
_CREATE: Final = sql(
    "INSERT INTO api_keys (key_id, user_id, digest, scopes, act_as, name, expires_at) "
    f"VALUES (:key_id, :user_id, :digest, :scopes, :act_as, :name, :expires_at) RETURNING {_COLUMNS}"
)
_BY_ID: Final = sql(f"SELECT {_COLUMNS} FROM api_keys WHERE key_id = :id")
_LIST: Final = sql(
    f"SELECT {_COLUMNS} FROM api_keys WHERE CAST(:user AS text) IS NULL OR user_id = :user "
    "ORDER BY created_at DESC, key_id"
)
_REVOKE: Final = sql(
    "UPDATE api_keys SET revoked_at = now() WHERE key_id = :id AND revoked_at IS NULL RETURNING 1"
)
_TOUCH: Final = sql(
    """
UPDATE api_keys SET last_used_at = now() FROM (
    SELECT key_id FROM api_keys WHERE key_id = ANY (:ids)
        AND (last_used_at IS NULL OR last_used_at < now() - interval '1 minute')
    ORDER BY key_id FOR NO KEY UPDATE SKIP LOCKED
) used WHERE api_keys.key_id = used.key_id
"""
)


class KeyRepository(Repository):
    """Hashed API keys."""

    async def create(self, new: NewKey) -> KeyRow:
        """Stores a key. Raises StoreRefused when the id exists."""
        rows = await self._one(
            _CREATE,
            key_id=new.key_id,
            user_id=new.user_id,
            digest=new.digest,
            scopes=sorted(new.scopes),
            act_as=new.act_as,
            name=new.name,
            expires_at=new.expires_at,
        )
        return _key(rows[0])

    async def by_id(self, key_id: str) -> KeyRow | None:
        """The key, live or not; None when unknown."""
        if "\x00" in key_id or not key_id.isascii():
            return None
        rows = await self._one(_BY_ID, id=key_id)
        return _key(rows[0]) if rows else None

    async def list(self, user_id: str | None = None) -> Sequence[KeyRow]:
        """All keys, or one user's, newest first."""
        return [_key(row) for row in await self._one(_LIST, user=user_id)]

    async def revoke(self, key_id: str) -> bool:
        """Revokes a key for good. False when unknown or revoked before."""
        return bool(await self._one(_REVOKE, id=key_id))

    async def touch(self, key_ids: Collection[str]) -> None:
        """Notes that keys were used; written at most once a minute per key."""
        await self._one(_TOUCH, ids=[*key_ids])


def _key(row: Sequence[Any]) -> KeyRow:
    key_id, user_id, digest, scopes, *rest = row
    return KeyRow(key_id, user_id, bytes(digest), frozenset(scopes), *rest)
