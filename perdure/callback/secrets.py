"""Callback secrets: made by us, sealed at rest, one current per user, more while a rotation overlaps.

    secrets = CallbackSecrets.from_settings(settings, store.secrets)     raises SecretsUnavailable
    keys = await secrets.keys(user_id)                                   newest first, at least one
    issued = await secrets.rotate(user_id, overlap_hours=24)             shown once, in both renderings

A user who never rotated has a secret too: it is derived from PERDURE_SECRET_KEY, nobody has seen it, and it
ends with the first rotation. PERDURE_CALLBACK_SECRET replaces them all.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import secrets as stdlib_secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

import uuid_utils
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from perdure.callback.verify import PREFIX, key_of
from perdure.settings import DatabaseSettings
from perdure.store.secrets import SecretRepository

OVERLAP_HOURS: Final = 24
MAX_OVERLAP_HOURS: Final = 168
MAX_ACTIVE: Final = 5  # receivers read a bounded number of signatures
MIN_SECRET_BYTES: Final = 24  # what Standard Webhooks asks for
_FORMAT: Final = b"\x01"  # of a sealed secret: format, nonce (12 bytes), ciphertext
_NONCE: Final = 12

log = logging.getLogger(__name__)


class SecretsUnavailable(Exception):  # noqa: N818 - a state of the installation
    """No secret can be had: a setting is missing or wrong. The message names it and the remedy."""


class SecretsFixed(Exception):  # noqa: N818 - a state of the installation
    """The operator set one secret for all users, so no user rotates."""


class TooManySecrets(Exception):  # noqa: N818 - said of the caller's secrets
    """MAX_ACTIVE secrets are valid at once; one has to retire first."""


def new_secret() -> str:
    """A fresh secret as plain text: 43 characters, 256 random bits."""
    return stdlib_secrets.token_urlsafe(32)


def whsec(key: bytes) -> str:
    """The rendering for Standard Webhooks libraries."""
    return PREFIX + base64.b64encode(key).decode("ascii")


@dataclass(frozen=True)
class Issued:
    """A secret at the one moment when it is shown."""

    secret_id: str
    plain: str
    whsec: str
    created_at: datetime


@dataclass(frozen=True)
class SecretInfo:
    """What is told of a secret later on. `retires_at` is None for the current one."""

    secret_id: str
    created_at: datetime
    retires_at: datetime | None


class SecretBox:
    """AES-256-GCM for secrets at rest. The first key seals; any of them opens."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = [AESGCM(key) for key in keys]
        self._derivation = keys[0]

    @classmethod
    def from_text(cls, text: str) -> Self:
        """From PERDURE_SECRET_KEY: base64 of 32 bytes; a comma separates retired keys that still open.
        Raises SecretsUnavailable."""
        keys: list[bytes] = []
        for part in text.split(","):
            try:
                key = base64.b64decode(part.strip(), validate=True)
            except (binascii.Error, ValueError):
                key = b""
            if len(key) != 32:
                raise SecretsUnavailable(
                    "PERDURE_SECRET_KEY is not base64 of 32 bytes; make one with: openssl rand -base64 32"
                )
            keys.append(key)
        return cls(keys)

    def seal(self, secret: str, user_id: str, secret_id: str) -> bytes:
        """Ciphertext bound to its user and id, so that a row moved to another user does not open."""
        nonce = os.urandom(_NONCE)
        bound = _bound(user_id, secret_id)
        return _FORMAT + nonce + self._ciphers[0].encrypt(nonce, secret.encode(), bound)

    def open(self, sealed: bytes, user_id: str, secret_id: str) -> str:
        """The plain secret. Raises SecretsUnavailable when no key opens it."""
        if sealed[:1] == _FORMAT:
            nonce, text = sealed[1 : 1 + _NONCE], sealed[1 + _NONCE :]
            for cipher in self._ciphers:
                try:
                    return cipher.decrypt(nonce, text, _bound(user_id, secret_id)).decode()
                except (InvalidTag, ValueError):
                    continue
        raise SecretsUnavailable(
            f"callback secret {secret_id} cannot be opened: it was sealed with another PERDURE_SECRET_KEY; "
            "add that key behind a comma"
        )

    def derive(self, user_id: str) -> bytes:
        """The key of a user who never rotated."""
        return hmac.new(self._derivation, b"perdure callback\x00" + user_id.encode(), hashlib.sha256).digest()


def _bound(user_id: str, secret_id: str) -> bytes:
    return f"{user_id}\x00{secret_id}".encode()


class CallbackSecrets:
    """The secrets of all users."""

    def __init__(
        self, repository: SecretRepository, box: SecretBox | None, fixed: Sequence[str] = ()
    ) -> None:
        self._repository = repository
        self._box = box
        self._fixed = [key_of(secret) for secret in fixed]

    @classmethod
    def from_settings(cls, settings: DatabaseSettings, repository: SecretRepository) -> Self:
        """Raises SecretsUnavailable when neither PERDURE_SECRET_KEY nor PERDURE_CALLBACK_SECRET is usable."""
        fixed: list[str] = []
        if settings.callback_secret:
            given = (settings.callback_secret, settings.callback_secret_previous)
            fixed = [secret.get_secret_value() for secret in given if secret]
        if not settings.secret_key and not fixed:
            raise SecretsUnavailable(
                "callbacks cannot be signed: set PERDURE_SECRET_KEY (openssl rand -base64 32), "
                "or PERDURE_CALLBACK_SECRET for one secret for all users"
            )
        box = SecretBox.from_text(settings.secret_key.get_secret_value()) if settings.secret_key else None
        try:
            made = cls(repository, box, fixed)
        except ValueError as error:
            raise SecretsUnavailable(f"PERDURE_CALLBACK_SECRET: {error}") from None
        if any(len(key) < MIN_SECRET_BYTES for key in made._fixed):
            log.warning("PERDURE_CALLBACK_SECRET is shorter than 24 bytes; make a longer one")
        return made

    @property
    def fixed(self) -> bool:
        """Whether the operator set one secret for all."""
        return bool(self._fixed)

    async def keys(self, user_id: str) -> list[bytes]:
        """The HMAC keys that are valid now, newest first, at least one.

        Raises SecretsUnavailable for a row that no key opens, and StoreError.
        """
        if self._fixed:
            return list(self._fixed)
        box = self._need_box()
        rows = await self._repository.active(user_id)
        if not rows:
            return [box.derive(user_id)]
        return [key_of(box.open(row.sealed, user_id, row.secret_id)) for row in rows]

    async def describe(self, user_id: str) -> list[SecretInfo]:
        """The user's secrets without themselves, the current one first."""
        rows = [] if self._fixed else await self._repository.active(user_id)
        return [SecretInfo(row.secret_id, row.created_at, row.retires_at) for row in rows]

    async def rotate(self, user_id: str, overlap_hours: float = OVERLAP_HOURS) -> Issued:
        """Makes a new current secret; the one before stays valid for `overlap_hours`.

        Raises SecretsFixed, TooManySecrets, SecretsUnavailable, StoreError.
        """
        if self._fixed:
            raise SecretsFixed
        box = self._need_box()
        if overlap_hours > 0 and len(await self._repository.active(user_id)) >= MAX_ACTIVE:
            raise TooManySecrets
        secret, secret_id = new_secret(), f"csec_{uuid_utils.uuid7().hex}"
        sealed = box.seal(secret, user_id, secret_id)
        row = await self._repository.rotate(secret_id, user_id, sealed, overlap_hours * 3600)
        log.info("callback secret rotated", extra={"user_id": user_id, "secret_id": secret_id})
        return Issued(secret_id, secret, whsec(secret.encode()), row.created_at)

    def _need_box(self) -> SecretBox:
        if self._box is None:
            raise SecretsUnavailable("set PERDURE_SECRET_KEY; make one with: openssl rand -base64 32")
        return self._box
