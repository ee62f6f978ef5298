"""API keys: how one looks, how it is kept, how it is checked. Pure, but for the helpers that take a store.

    made, token = await create_key(store, "alice", ["tasks:read"], expires_in=timedelta(days=90))
    rows = await list_keys(store)              newest first
    await revoke_key(store, key_id)            raises KeyError when there is no such live key

A key is `sk_<id>_<secret>`: 8 characters that find the row, then 43 of a 256-bit random secret. The row keeps
SHA-256 of the secret: input that random needs no slow hash. The whole key is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from perdure.store.engine import Store
from perdure.store.rows import KeyRow, NewKey

SCOPES: Final = ("tasks:read", "tasks:write", "callbacks:write", "admin")
DEFAULT_SCOPES: Final = ("tasks:read", "tasks:write", "callbacks:write")
MAX_KEY_BYTES: Final = 256  # a longer credential is no key of ours and is not looked at

USER_ID: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,64}\Z")  # it stands in logs
_ID_ALPHABET: Final = string.ascii_lowercase + string.digits
_KEY: Final = re.compile(rb"sk_([a-z0-9]{8})_([A-Za-z0-9_-]{43})\Z")
_SPAN: Final = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([dhms])\Z", re.ASCII)
_UNITS: Final = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
}
_NO_HASH: Final = bytes(32)  # what an unknown id is compared with, so that it costs the same time


@dataclass(frozen=True, slots=True)
class Credential:
    """A key as it is made: `token` goes to the user once, `key_id` and `digest` (32 bytes) to the row."""

    key_id: str
    token: str
    digest: bytes


def new_credential() -> Credential:
    """A fresh random key."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))
    secret = secrets.token_urlsafe(32)
    return Credential(key_id, f"sk_{key_id}_{secret}", hash_secret(secret.encode()))


def hash_secret(secret: bytes) -> bytes:
    """The 32 bytes kept in the row."""
    return hashlib.sha256(secret).digest()


def parse_key(token: bytes) -> tuple[str, bytes] | None:
    """(key id, secret) of a well-formed key; None for anything else: other forms, non-ASCII, too long."""
    if len(token) > MAX_KEY_BYTES:
        return None
    match = _KEY.match(token)
    return (match[1].decode("ascii"), match[2]) if match else None


def verify_secret(secret: bytes, stored_hash: bytes | None) -> bool:
    """Whether the secret is the row's, in constant time; None stands for an unknown id and is never true."""
    same = hmac.compare_digest(hash_secret(secret), _NO_HASH if stored_hash is None else stored_hash)
    return same and stored_hash is not None


def check_scopes(scopes: Sequence[str]) -> tuple[str, ...]:
    """The scopes in their fixed order, without repeats. Raises ValueError naming an unknown one."""
    for scope in scopes:
        if scope not in SCOPES:
            raise ValueError(f"unknown scope {scope!r}; the scopes are {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in scopes)


def time_left(text: str, now: datetime) -> timedelta:
    """How long a key is to live: `90d`, `12h`, `30m`, `45s`, or until a date or time (UTC where it names no
    offset). Raises ValueError in words, also for a time that has passed."""
    span = _SPAN.match(text)
    try:
        if span:
            left = float(span[1]) * _UNITS[span[2]]
        else:
            until = datetime.fromisoformat(text)
            left = (until if until.tzinfo else until.replace(tzinfo=UTC)) - now
        now + left  # a year that no calendar has
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no time: say 90d, 12h, 30m or 45s, or 2030-12-31") from None
    if left <= timedelta(0):
        raise ValueError("a key expires in the future")
    return left


async def create_key(
    store: Store,
    user_id: str,
    scopes: Sequence[str] = DEFAULT_SCOPES,
    *,
    act_as: bool = False,
    expires_in: timedelta | None = None,
    name: str | None = None,
) -> tuple[KeyRow, str]:
    """Makes and stores a key. Returns its row and the whole key, which is shown this once.

    Raises ValueError naming a wrong user, scope or time.
    """
    if not USER_ID.match(user_id):
        raise ValueError("a user has 1 to 64 printable characters")
    if expires_in is not None and expires_in <= timedelta(0):
        raise ValueError("a key expires in the future")
    made = new_credential()
    row = await store.keys.create(
        NewKey(
            key_id=made.key_id,
            user_id=user_id,
            digest=made.digest,
            scopes=frozenset(check_scopes(scopes)),
            act_as=act_as,
            expires_at=None if expires_in is None else datetime.now(UTC) + expires_in,
            name=name,
        )
    )
    return row, made.token


async def list_keys(store: Store, user_id: str | None = None) -> list[KeyRow]:
    """All keys, or one user's, newest first."""
    return list(await store.keys.list(user_id))


async def revoke_key(store: Store, key_id: str) -> None:
    """Revokes a key for good; requests with it are refused within two seconds. Raises KeyError."""
    if not await store.keys.revoke(key_id):
        raise KeyError(f"there is no live key {key_id}; see `perdure keys list`")
