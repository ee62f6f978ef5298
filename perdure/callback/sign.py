"""The headers of one try: both families of signature, from one secret.

    headers = signed_headers(delivery_id=…, event=…, body=…, keys=…, at=…, number=…)

`webhook-signature` (Standard Webhooks) lists every key that is valid now; `X-Callback-Signature` holds one
value only, so it keeps the oldest valid key until its overlap ends: a receiver that still has the old
secret goes on working, whichever family it reads.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

USER_AGENT: Final = f"perdure-webhook/{version('perdure')}"


def signature(key: bytes, signed: bytes) -> str:
    """base64 of HMAC-SHA256, as ASCII."""
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode("ascii")


def signed_headers(
    *, delivery_id: str, event: str, body: bytes, keys: Sequence[bytes], at: int, number: int
) -> dict[str, str]:
    """All headers of a try.

    `keys`: the valid keys, newest first, at least one. `at`: Unix seconds of this try. `number`: the try's
    number from 1 (not signed, for the receiver's information). Raises ValueError without a key.
    """
    if not keys:
        raise ValueError("a callback needs a key to be signed with")
    signed = f"{delivery_id}.{at}.".encode() + body
    return {
        "Content-Type": "application/json",
        "User-Agent": USER_AGENT,
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
        "X-Callback-Event": event,
        "X-Callback-Attempt": str(number),
        "X-Callback-Signature": signature(keys[-1], body),
        "webhook-id": delivery_id,
        "webhook-timestamp": str(at),
        "webhook-signature": " ".join(f"v1,{signature(key, signed)}" for key in keys),
    }


def signatures_in(headers: dict[str, str]) -> list[str]:
    """The secret-bearing values of `headers`: none of them may stand in a log or a stored sample."""
    values = [headers["X-Callback-Signature"]]
    values += [part.removeprefix("v1,") for part in headers["webhook-signature"].split(" ")]
    return values
