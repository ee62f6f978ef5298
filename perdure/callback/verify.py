"""For receivers: is this callback from Perdure, and is it fresh?

    from perdure.callback import InvalidSignature, verify

    verify(body, headers, secret)          # raises InvalidSignature, nothing else

Standard library only, so that a receiver may copy this file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Mapping
from typing import Final

PREFIX: Final = "whsec_"
TOLERANCE: Final = 300  # seconds
_MAX_SIGNATURES: Final = 10


class InvalidSignature(Exception):  # noqa: N818 - receivers catch it; the name says what happened
    """The request is not a callback signed with one of the secrets, or it is too old or too new."""


def key_of(secret: str | bytes) -> bytes:
    """The HMAC key of a secret in either rendering: the plain text itself, or base64 after `whsec_`.

    Raises ValueError for `whsec_` with something else behind it, and for an empty secret.
    """
    text = secret.decode("utf-8", "surrogateescape") if isinstance(secret, bytes) else secret
    if not text.startswith(PREFIX):
        key = text.encode("utf-8", "surrogateescape")
    else:
        encoded = text[len(PREFIX) :]
        padded = encoded + "=" * (-len(encoded) % 4)
        try:
            key = base64.b64decode(padded.encode(), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise ValueError("a secret that starts with whsec_ goes on in base64") from None
    if not key:
        raise ValueError("the secret is empty")
    return key


def verify(
    body: bytes,
    headers: Mapping[str, str],
    secrets: str | bytes | Iterable[str | bytes],
    *,
    tolerance: float = TOLERANCE,
    now: float | None = None,
    allow_legacy: bool = False,
) -> None:
    """Checks one received callback. Returns nothing when it is genuine.

    `body`: the raw bytes as received, before any parsing. `headers`: any mapping, names in any case.
    `secrets`: one secret or several (plain or `whsec_…`), any of which may have signed. `tolerance`: seconds
    that `webhook-timestamp` may be away from `now` (Unix seconds; the clock where None).
    `allow_legacy` also accepts `X-Callback-Signature` alone, which proves the sender but not the time.
    Raises InvalidSignature, whatever is wrong.
    """
    keys = _keys(secrets)
    given = {str(name).lower(): str(value) for name, value in headers.items()}
    standard = [given.get(name) for name in ("webhook-id", "webhook-timestamp", "webhook-signature")]
    message_id, timestamp, signatures = standard
    if message_id is None or timestamp is None or signatures is None:
        if allow_legacy and "x-callback-signature" in given:
            return _compare([_mac(key, body) for key in keys], [given["x-callback-signature"].strip()])
        raise InvalidSignature("webhook-id, webhook-timestamp or webhook-signature is missing")
    if re.fullmatch(r"[0-9]{1,12}", timestamp) is None:
        raise InvalidSignature("webhook-timestamp is not a number of seconds")
    if not abs((time.time() if now is None else now) - int(timestamp)) <= tolerance:
        raise InvalidSignature(f"webhook-timestamp is more than {tolerance:g} s away from this clock")
    signed = f"{message_id}.{timestamp}.".encode("utf-8", "replace") + body
    parts = [part[3:] for part in signatures.split(" ")[:_MAX_SIGNATURES] if part.startswith("v1,")]
    return _compare([_mac(key, signed) for key in keys], parts)


def _keys(secrets: str | bytes | Iterable[str | bytes]) -> list[bytes]:
    several = [secrets] if isinstance(secrets, str | bytes) else list(secrets)
    try:
        keys = [key_of(secret) for secret in several]
    except ValueError as error:
        raise InvalidSignature(str(error)) from None
    if not keys:
        raise InvalidSignature("no secret to verify with")
    return keys


def _mac(key: bytes, signed: bytes) -> bytes:
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest())


def _compare(wanted: list[bytes], given: list[str]) -> None:
    """Every pair is compared, so that the time taken tells nothing."""
    found = False
    for want in wanted:
        for got in given:
            found |= hmac.compare_digest(want, got.encode("utf-8", "replace"))
    if not found:
        raise InvalidSignature("no signature matches the body and the secret")
