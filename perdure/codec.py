"""Payload codec: compression above 4 KiB, AES-GCM when a key is set.

Encodings (metadata `encoding`): `binary/zlib` and `binary/aes-gcm`; the wrapped payload is the serialised
original. The nonce (12 bytes) stands before the ciphertext; the key's id is in the metadata.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import zlib
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec

COMPRESS_ABOVE: Final = 4 * 1024
_MAX_INFLATED: Final = 32 * 1024 * 1024  # far above any payload that Temporal takes
_ZLIB: Final = b"binary/zlib"
_AES: Final = b"binary/aes-gcm"


class PayloadKeyError(ValueError):
    """PERDURE_PAYLOAD_KEY is not usable, or a payload needs a key that is not here."""


def parse_keys(text: str) -> list[bytes]:
    """Keys from PERDURE_PAYLOAD_KEY: base64 of 16, 24 or 32 bytes, comma separated, the first encrypts."""
    keys = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        try:
            key = base64.b64decode(part, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) not in (16, 24, 32):
            raise PayloadKeyError(
                "PERDURE_PAYLOAD_KEY: each key is base64 of 16, 24 or 32 bytes; "
                "make one with: openssl rand -base64 32"
            )
        keys.append(key)
    return keys


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"perdure key id" + key).hexdigest()[:12].encode()


class Codec(PayloadCodec):
    """Compresses, then encrypts. Decodes whatever any of its keys, or none, encoded."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._ciphers = {_key_id(key): AESGCM(key) for key in keys}
        self._first = _key_id(keys[0]) if keys else None

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._encode(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self.decode_one(payload) for payload in payloads]

    def _encode(self, payload: Payload) -> Payload:
        if len(payload.data) > COMPRESS_ABOVE:
            packed = zlib.compress(payload.SerializeToString(), 1)
            if len(packed) < len(payload.data):
                payload = Payload(metadata={"encoding": _ZLIB}, data=packed)
        if self._first is None:
            return payload
        nonce = os.urandom(12)
        sealed = self._ciphers[self._first].encrypt(nonce, payload.SerializeToString(), self._first)
        return Payload(metadata={"encoding": _AES, "key-id": self._first}, data=nonce + sealed)

    def decode_one(self, payload: Payload) -> Payload:
        """One payload as it was. Raises PayloadKeyError where its key is missing, ValueError where broken."""
        if payload.metadata.get("encoding") == _AES:
            payload = self._open(payload)
        if payload.metadata.get("encoding") == _ZLIB:
            inflate = zlib.decompressobj()
            raw = inflate.decompress(payload.data, _MAX_INFLATED)
            if inflate.unconsumed_tail or not inflate.eof:
                raise ValueError("a compressed payload is broken or larger than any that Perdure writes")
            payload = Payload.FromString(raw)
        return payload

    def _open(self, payload: Payload) -> Payload:
        key_id = payload.metadata.get("key-id", b"")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise PayloadKeyError(
                "a payload was encrypted with a key that this process does not have; "
                "list retired keys after the current one in PERDURE_PAYLOAD_KEY"
            )
        try:
            plain = cipher.decrypt(payload.data[:12], payload.data[12:], key_id)
        except InvalidTag as error:
            raise ValueError("an encrypted payload was changed or cut") from error
        return Payload.FromString(plain)
