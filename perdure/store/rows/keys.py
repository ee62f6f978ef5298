"""API keys and callback secrets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class NewKey:
    """An API key to store: its hash, never itself."""

    key_id: str
    user_id: str
    digest: bytes
    scopes: frozenset[str]
    act_as: bool = False
    expires_at: datetime | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A stored API key. `live` is the database's view at reading: neither revoked nor expired."""

    key_id: str
    user_id: str
    digest: bytes
    scopes: frozenset[str]
    act_as: bool
    name: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    live: bool


@dataclass(frozen=True, slots=True)
class SecretRow:
    """A callback secret, sealed. `retires_at` is None for the current one."""

    secret_id: str
    user_id: str
    sealed: bytes
    created_at: datetime
    retires_at: datetime | None
