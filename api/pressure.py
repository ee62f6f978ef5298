"""How much may wait: `max_waiting` of a pool's class, and tasks of one user. Beyond it 429 with a reason.

A class is refused when the tasks of its own and better classes that wait reach its bound, so under pressure
LOW is refused first. Counts come from rows and are kept for a few seconds, with what this process has let in
since; near a bound they are read again, and what is being written just then counts beside them. Several
processes together may pass a bound by what they admit within these seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from api.problems import Problem, too_many
from perdure.models import Catalogue
from perdure.settings import ApiSettings
from perdure.store.stats import StatsRepository
from perdure.task.states import CLASSES, Priority

_FRESH: Final = 5.0  # seconds that a count serves while it is far from its bound
_NEAR: Final = 0.25  # seconds between two reads of a count at its bound
_RETRY_AFTER: Final = 5.0
_MAX_USERS: Final = 20_000

Counts = dict[Priority, int]


class _Count:
    """One count per class: what was read, and what was let in since. `_flying` is let in and not yet written:
    a reading cannot know of it."""

    def __init__(self, read: Callable[[], Awaitable[Counts]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._counts: Counts = {}
        self._flying: Counts = {}
        self._read_at = float("-inf")

    async def waiting(self, classes: tuple[Priority, ...], room_for: int, bound: int) -> int:
        """How many wait in these classes, as exact as the nearness of the bound asks for."""
        if time.monotonic() - self._read_at > _FRESH:
            await self._refresh(_FRESH)
        if self._sum(classes) + room_for > bound:
            await self._refresh(_NEAR)
        return self._sum(classes)

    def admit(self, priority: Priority, amount: int) -> None:
        self._add(self._counts, priority, amount)
        self._add(self._flying, priority, amount)

    def settle(self, priority: Priority, *, kept: bool) -> None:
        """One that was let in is written, or will not be."""
        self._flying[priority] = max(0, self._flying.get(priority, 0) - 1)
        if not kept:
            self._add(self._counts, priority, -1)

    @staticmethod
    def _add(counts: Counts, priority: Priority, amount: int) -> None:
        counts[priority] = counts.get(priority, 0) + amount

    def _sum(self, classes: tuple[Priority, ...]) -> int:
        return sum(self._counts.get(each, 0) for each in classes)

    async def _refresh(self, older_than: float) -> None:
        async with self._lock:
            if time.monotonic() - self._read_at > older_than:
                flying = dict(self._flying)
                self._counts = dict(await self._read())
                for priority, amount in flying.items():
                    self._add(self._counts, priority, amount)
                self._read_at = time.monotonic()


class Pressure:
    """Judges submits against what waits already."""

    def __init__(self, settings: ApiSettings, catalogue: Catalogue, stats: StatsRepository) -> None:
        self._stats = stats
        self._catalogue = catalogue
        self._max_of_user = settings.max_waiting_per_user if settings.limits_apply else None
        self._pools: dict[str, _Count] = {}
        self._users: OrderedDict[str, _Count] = OrderedDict()

    async def admit(self, user_id: str, pool: str, priority: Priority, amount: int = 1) -> Problem | None:
        """Lets `amount` tasks in, or returns the 429 that refuses them. Raises StoreUnavailable.

        Each that was let in must be settled.
        """
        of_pool = self._pool_count(pool)
        bound = self._catalogue.pools[pool].max_waiting.get(priority)
        if of_pool is not None and bound is not None:
            ahead = CLASSES[: CLASSES.index(priority) + 1]
            waiting = await of_pool.waiting(ahead, amount, bound)
            if waiting + amount > bound:
                return too_many(
                    "pool-full",
                    f"In pool {pool} {waiting} tasks of {priority} and better wait; the bound is {bound}.",
                    _RETRY_AFTER,
                    pool=pool,
                    priority=priority,
                )
        if self._max_of_user is not None:
            of_user = self._user_count(user_id, self._max_of_user)
            waiting = await of_user.waiting(CLASSES, amount, self._max_of_user)
            if waiting + amount > self._max_of_user:
                return too_many(
                    "too-many-waiting",
                    f"{waiting} of this user's tasks wait; the bound is {self._max_of_user}.",
                    _RETRY_AFTER,
                )
            of_user.admit(priority, amount)
        if of_pool is not None:
            of_pool.admit(priority, amount)
        return None

    def settle(self, user_id: str, pool: str, priority: Priority, *, kept: bool) -> None:
        """A task that was let in is written (`kept`), or will not be."""
        if pool in self._pools:
            self._pools[pool].settle(priority, kept=kept)
        if user_id in self._users:
            self._users[user_id].settle(priority, kept=kept)

    def _pool_count(self, pool: str) -> _Count | None:
        """The pool's count; None where no class of it has a bound."""
        bounds = self._catalogue.pools[pool].max_waiting
        if bounds and pool not in self._pools:
            at_most = max(bounds.values()) + 1
            self._pools[pool] = _Count(lambda: self._stats.waiting(pool, at_most))
        return self._pools.get(pool)

    def _user_count(self, user_id: str, bound: int) -> _Count:
        count = self._users.pop(user_id, None)
        if count is None:

            async def read() -> Counts:
                return {Priority.NORMAL: await self._stats.waiting_of(user_id, bound + 1)}

            count = _Count(read)
        self._users[user_id] = count
        if len(self._users) > _MAX_USERS:
            self._users.popitem(last=False)
        return count
