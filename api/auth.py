"""Who asks: keys, scopes, and the one user of a machine without keys.

    principal = await authenticate(request, "tasks:read")     raises Problem 401, 403, 503

With PERDURE_AUTH=none there is one user, `dev`, who may do everything; that mode starts on loopback only.
A key with `act-as` may name the user it acts for in `Perdure-User`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from starlette.requests import Request

from api.problems import FieldError, Problem, invalid
from perdure.keys import SCOPES, USER_ID, parse_key, verify_secret
from perdure.settings import ApiSettings
from perdure.store.engine import Store
from perdure.store.rows import Principal

CACHE_SECONDS: Final = 2.0  # a revoked key dies within that
TOUCH_SECONDS: Final = 60.0  # `last_used_at` is written at most that often
_MAX_CACHED: Final = 10_000
_DEV: Final = Principal(user_id="dev", scopes=frozenset(SCOPES), admin=True, act_as=True, key_id=None)


class UnsafeAuth(ValueError):  # noqa: N818 - says what is, not that we erred
    """PERDURE_AUTH=none on an address that others can reach."""


def check_host(settings: ApiSettings) -> None:
    """Refuses to start without keys anywhere but on loopback. Raises UnsafeAuth."""
    if settings.auth == "none" and not is_loopback(settings.host):
        raise UnsafeAuth(
            f"PERDURE_AUTH=none opens the service to everybody who reaches {settings.host}; "
            "set PERDURE_HOST=127.0.0.1, or PERDURE_AUTH=keys and make a key with `perdure keys create`"
        )


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether a listening address reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Authenticator:
    """Finds the principal of a request. Checked keys are kept for CACHE_SECONDS, by their hash."""

    def __init__(
        self, settings: ApiSettings, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open = settings.auth == "none"
        self._store = store
        self._clock = clock
        self._checked: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()
        self._touched: OrderedDict[str, float] = OrderedDict()

    async def principal(self, request: Request) -> Principal:
        """Who asks. Raises Problem 401, and StoreUnavailable."""
        if self._open:
            return _acting(_DEV, request)
        return _acting(await self._of_token(_token(request)), request)

    async def _of_token(self, token: bytes) -> Principal:
        digest = hashlib.sha256(token).digest()
        now = self._clock()
        known = self._checked.get(digest)
        if known is not None and now < known[1]:
            return known[0]
        parts = parse_key(token)
        if parts is None:
            raise _unauthorized()
        key_id, secret = parts
        row = await self._store.keys.by_id(key_id)
        if not verify_secret(secret, row.digest if row else None) or row is None or not row.live:
            raise _unauthorized()
        principal = Principal(
            user_id=row.user_id,
            scopes=row.scopes,
            admin="admin" in row.scopes,
            act_as=row.act_as,
            key_id=row.key_id,
        )
        self._checked[digest] = (principal, now + CACHE_SECONDS)
        self._checked.move_to_end(digest)
        if len(self._checked) > _MAX_CACHED:
            self._checked.popitem(last=False)
        await self._touch(key_id, now)
        return principal

    async def _touch(self, key_id: str, now: float) -> None:
        if now - self._touched.get(key_id, float("-inf")) >= TOUCH_SECONDS:
            self._touched[key_id] = now
            self._touched.move_to_end(key_id)
            if len(self._touched) > _MAX_CACHED:
                self._touched.popitem(last=False)
            await self._store.keys.touch([key_id])


async def authenticate(request: Request, scope: str) -> Principal:
    """The principal of this request, who holds `scope`. Sets `request.state.principal`.

    Raises Problem 401 without a good key, 403 without the scope.
    """
    authenticator: Authenticator = request.app.state.resources.authenticator
    principal = await authenticator.principal(request)
    if scope not in principal.scopes and not principal.admin:
        raise Problem(403, "scope-missing", f"This key lacks the scope {scope}.", scope=scope)
    request.state.principal = principal
    return principal


def _token(request: Request) -> bytes:
    """The credential's bytes, from one `Authorization: Bearer` or one `X-API-Key`. Raises Problem 401."""
    values = [value for name, value in request.scope["headers"] if name == b"authorization"]
    if values:
        scheme, _, token = values[0].strip().partition(b" ")
        if len(values) > 1 or scheme.lower() != b"bearer" or not token:
            raise _unauthorized()
        return bytes(token.strip())
    keys = [value for name, value in request.scope["headers"] if name == b"x-api-key"]
    if len(keys) != 1:
        raise _unauthorized()
    return bytes(keys[0].strip())


def _acting(principal: Principal, request: Request) -> Principal:
    """The principal, or the user it acts for."""
    user = request.headers.get("perdure-user")
    if user is None:
        return principal
    if not principal.act_as:
        raise Problem(403, "act-as-refused", "This key may not act for another user.")
    if not user.isascii() or not USER_ID.match(user):
        why = "1 to 64 printable ASCII characters"
        raise invalid([FieldError(None, "user-id", why, parameter="Perdure-User")])
    return dataclasses.replace(principal, user_id=user, admin=False)


def _unauthorized() -> Problem:
    return Problem(
        401,
        "unauthorized",
        "A valid API key is needed: Authorization: Bearer sk_….",
        headers={"WWW-Authenticate": "Bearer"},
    )
