"""Request headers with a meaning: `Prefer: wait`, `Idempotency-Key`."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

import orjson
from starlette.requests import Request

from api.problems import Problem
from perdure.store.rows import Idempotency

MAX_WAIT: Final = 60  # seconds
_WAIT: Final = re.compile(r"wait\s*=\s*\"?([0-9]{1,9})\"?\s*\Z", re.IGNORECASE | re.ASCII)
_KEY: Final = re.compile(rb"[\x21-\x7e]{1,255}\Z")


def prefer_wait(request: Request) -> int | None:
    """Seconds that the caller would wait, cut to MAX_WAIT; None without the preference. Junk is ignored, as
    RFC 7240 has it."""
    for header in request.headers.getlist("prefer"):
        for part in re.split(r"[,;]", header):
            match = _WAIT.match(part.strip())
            if match:
                return min(int(match[1]), MAX_WAIT)
    return None


def applied(wait: int | None) -> dict[str, str]:
    """The header that tells which preference was followed."""
    return {} if wait is None else {"Preference-Applied": f"wait={wait}"}


def idempotency_key(request: Request) -> str | None:
    """The key, or None when none is sent. Quoted (a structured-field string) or bare.

    Raises Problem 400 for an empty one, one of more than 255 characters, one with spaces or
    anything but printable ASCII, or two of them.
    """
    values = [value for name, value in request.scope["headers"] if name == b"idempotency-key"]
    if not values:
        return None
    raw: bytes = values[0].strip(b" \t")
    if len(raw) >= 2 and raw.startswith(b'"') and raw.endswith(b'"'):
        raw = raw[1:-1]
    if len(values) > 1 or not _KEY.match(raw):
        raise Problem(
            400,
            "invalid-idempotency-key",
            "One Idempotency-Key of 1 to 255 printable ASCII characters, no space.",
        )
    return raw.decode("ascii")


def idempotency(
    key: str, user_id: str, route: str, accepted: Any, *, reply: str | None = None
) -> Idempotency:
    """The row's key. `accepted` is the validated request: equal meaning gives an equal fingerprint, whatever
    the order of keys and the spacing. `reply` is kept for a replay."""
    canonical = orjson.dumps(accepted, option=orjson.OPT_SORT_KEYS)
    return Idempotency(user_id, route, key, hashlib.sha256(canonical).digest(), reply)


def key_reused() -> Problem:
    """422: the key was used for another request."""
    return Problem(
        422, "idempotency-key-reused", "This Idempotency-Key was used with another request; choose a new one."
    )
