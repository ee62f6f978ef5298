"""Stream tokens: a minute's right to open a stream, for browsers, whose `EventSource` sends no key.

The key is derived from the deployment's secret, so that any API process takes what another gave. A token is
bound to its user, reads and nothing more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final

LIFETIME: Final = 60  # seconds
_CONTEXT: Final = b"perdure stream token v1"
_MAX_LENGTH: Final = 512


class StreamTokens:
    """Makes and checks tokens.

    `secret` is the deployment's (PERDURE_SECRET_KEY, decoded). Without one the key is this process's own, and
    another process refuses its tokens.
    """

    def __init__(self, secret: bytes | None, *, clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(secret or secrets.token_bytes(32), _CONTEXT, "sha256")
        self._clock = clock

    def issue(self, user_id: str) -> str:
        """A token for this user, good for LIFETIME seconds."""
        body = f"{int(self._clock()) + LIFETIME}.{user_id}".encode()
        return _b64(self._mac(body) + body)

    def user_of(self, token: str) -> str | None:
        """The user whose token this is; None when it is forged, junk or too old. Never raises."""
        if len(token) > _MAX_LENGTH or not token.isascii():
            return None
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        mac, body = raw[:32], raw[32:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        expires, _, user_id = body.decode().partition(".")
        return user_id if self._clock() < int(expires) else None

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
