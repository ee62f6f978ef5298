"""Callback secrets, sealed by the caller: one current per user, older ones while a rotation overlaps."""

from __future__ import annotations

from perdure.store.rows import SecretRow


class SecretRepository:
    """Sealed blobs only; this module cannot read them."""

    async def active(self, user_id: str) -> list[SecretRow]:
        """The current secret first, then those whose overlap runs, newest first. Empty when there is none."""
        raise NotImplementedError

    async def ensure(self, secret_id: str, user_id: str, sealed: bytes) -> SecretRow:
        """The user's current secret; the given one becomes it when there is none. One winner among racers."""
        raise NotImplementedError

    async def rotate(self, secret_id: str, user_id: str, sealed: bytes, overlap_seconds: float) -> SecretRow:
        """Makes a new current secret; the one before retires after `overlap_seconds`."""
        raise NotImplementedError

    async def users(self) -> list[str]:
        """Users that have a secret."""
        raise NotImplementedError
