"""Rate limits per key, in this process: submits and request bodies a minute. Off where auth is off.

    limits.take_body(principal)           before a body is read
    limits.take_submits(principal, n)     before tasks are written
    limits.take_stream(principal)         a context manager around one open event stream

Each raises Problem 429 with `Retry-After`. A limit is a bucket that holds one minute's worth and refills
evenly, so a burst passes and a flood does not. Several API processes each keep their own: the sum is the
processes' number times the limit, which a gateway in front can tighten.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from api.problems import too_many
from perdure.settings import ApiSettings
from perdure.store.rows import Principal

_MAX_BUCKETS: Final = 20_000  # keys remembered; a forgotten one starts with a full bucket


class Buckets:
    """Token buckets by name: `per_minute` tokens at most, refilled evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = float(per_minute)
        self._rate = per_minute / 60.0
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (tokens, as of)

    def take(self, name: str, amount: int = 1) -> float:
        """Takes tokens and returns 0, or takes none and returns the seconds until they are there.

        An amount beyond the bucket's size passes when the bucket is full, and leaves a debt.
        """
        now = self._clock()
        tokens, then = self._levels.pop(name, (self._size, now))
        tokens = min(self._size, tokens + (now - then) * self._rate)
        missing = min(float(amount), self._size) - tokens
        self._levels[name] = (tokens if missing > 0 else tokens - amount, now)
        if len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)
        return max(0.0, missing) / self._rate


class Limits:
    """The limits of the HTTP edge."""

    def __init__(self, settings: ApiSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._apply = settings.limits_apply
        self._submits = Buckets(settings.submits_per_minute, clock)
        self._bodies = Buckets(settings.bodies_per_minute, clock)
        self._max_streams = settings.max_streams_per_user
        self._streams: dict[str, int] = {}

    def take_body(self, principal: Principal) -> None:
        """One request with a body. Raises Problem 429."""
        if self._apply and (wait := self._bodies.take(_name(principal))):
            raise too_many("rate-limited", "This key sends too many requests with a body.", wait)

    def take_submits(self, principal: Principal, tasks: int = 1) -> None:
        """`tasks` new tasks. Raises Problem 429."""
        if self._apply and (wait := self._submits.take(_name(principal), tasks)):
            raise too_many("rate-limited", "This key submits too many tasks a minute.", wait)

    @contextmanager
    def take_stream(self, principal: Principal) -> Iterator[None]:
        """Holds one of the user's event streams. Raises Problem 429."""
        user = principal.user_id
        held = self._streams.get(user, 0)
        if self._apply and held >= self._max_streams:
            raise too_many("too-many-streams", f"There are {held} open streams; close one.", 5)
        self._streams[user] = held + 1
        try:
            yield
        finally:
            left = self._streams[user] - 1
            if left:
                self._streams[user] = left
            else:
                del self._streams[user]


def _name(principal: Principal) -> str:
    return principal.key_id or principal.user_id
