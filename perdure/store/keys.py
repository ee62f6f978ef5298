"""API keys: found by id, compared by the caller, never stored in clear."""

from __future__ import annotations

from collections.abc import Collection

from perdure.store.rows import KeyRow, NewKey


class KeyRepository:
    """Hashed API keys."""

    async def create(self, new: NewKey) -> KeyRow:
        """Stores a key. Raises StoreRefused when the id exists."""
        raise NotImplementedError

    async def by_id(self, key_id: str) -> KeyRow | None:
        """The key, live or not; None when unknown."""
        raise NotImplementedError

    async def list(self, user_id: str | None = None) -> list[KeyRow]:
        """All keys, or one user's, newest first."""
        raise NotImplementedError

    async def revoke(self, key_id: str) -> bool:
        """Revokes a key for good. False when unknown or revoked before."""
        raise NotImplementedError

    async def touch(self, key_ids: Collection[str]) -> None:
        """Notes that keys were used; written at most once a minute per key."""
        raise NotImplementedError
