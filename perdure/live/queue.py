"""Why a task waits, and about how long: estimates from the read model, shared by all who ask.

    info = await queues.info(row)      QueueInfo for a PENDING or QUEUED row, else None

Position and time are estimates: other tasks end sooner or later than the pool's usual, and better classes
come in between. Figures of a pool are read once a second, a task's place once in PLACE_SECONDS.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol

from perdure.store.rows import Principal, QueueStat, ServiceTimes, TaskRow, WorkerRow
from perdure.task.states import CLASSES, Status

Reason = Literal["waiting_for_slot", "behind_higher_priority", "no_worker", "backing_off", "not_before"]

POOL_SECONDS: Final = 1.0
PLACE_SECONDS: Final = 1.0
SERVICE_SECONDS: Final = 10.0
WORKER_SECONDS: Final = 30.0  # a worker not seen for so long serves nothing
MAX_AHEAD: Final = 10_000  # counted no further
_MAX_PLACES: Final = 10_000


class Figures(Protocol):
    """What is asked of the store's figures (`StatsRepository`)."""

    async def queues(self) -> list[QueueStat]: ...
    async def ahead(self, principal: Principal, task_id: str, at_most: int = ...) -> int | None: ...
    async def service_times(self, pool: str, last: int = ...) -> ServiceTimes: ...


class Workers(Protocol):
    """What is asked of the table of workers seen (`WorkerRepository`)."""

    async def live(self, seconds: float = ...) -> Sequence[WorkerRow]: ...


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """Where a waiting task stands. `estimated_start_at` is None without a worker or without any history."""

    position: int
    ahead: int
    reason: Reason
    estimated_start_at: datetime | None

    def as_json(self) -> dict[str, Any]:
        """The member `queue` of a task."""
        return {
            "position": self.position,
            "ahead": self.ahead,
            "reason": self.reason,
            "estimated_start_at": self.estimated_start_at,
            "estimated": True,
        }


@dataclass(frozen=True, slots=True)
class _Pools:
    """One look at all pools."""

    stats: list[QueueStat]
    workers: Sequence[WorkerRow]

    def slots(self, pool: str) -> int:
        return sum(worker.slots for worker in self.workers if worker.pool == pool and not worker.draining)

    def running(self, pool: str) -> int:
        return sum(stat.running for stat in self.stats if stat.pool == pool)

    def better(self, row: TaskRow) -> int:
        """Tasks of better classes that wait in the row's pool."""
        above = CLASSES[: CLASSES.index(row.priority)]
        return sum(stat.waiting for stat in self.stats if stat.pool == row.pool and stat.priority in above)


def judge(
    row: TaskRow,
    ahead: int,
    *,
    better: int,
    slots: int,
    running: int,
    service: ServiceTimes | None,
    now: datetime,
) -> QueueInfo:
    """The place of a waiting row: `ahead` tasks start before it, `better` of better classes; the pool has
    `slots`, of which `running` are taken, and tasks lately took `service`. Pure."""
    held: datetime | None = None
    reason: Reason
    if row.not_before and row.not_before > now:
        reason, held = "not_before", row.not_before
    elif row.next_attempt_at and row.next_attempt_at > now:
        reason, held = "backing_off", row.next_attempt_at
    elif slots == 0:
        reason = "no_worker"
    elif better:
        reason = "behind_higher_priority"
    else:
        reason = "waiting_for_slot"
    start: datetime | None = None
    if slots and service and service.count:
        turns = max(0, ahead + 1 - max(0, slots - running))
        start = now + timedelta(seconds=min(turns * service.mean / slots, 365 * 86_400.0))
    if held is not None and slots:
        start = max(held, start) if start and ahead >= slots else held
    return QueueInfo(ahead + 1, ahead, reason, start)


class Queues:
    """Places of waiting tasks. One per process."""

    def __init__(
        self, figures: Figures, workers: Workers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._figures = figures
        self._workers = workers
        self._clock = clock
        self._pools: tuple[float, _Pools] | None = None
        self._services: dict[str, tuple[float, ServiceTimes]] = {}
        self._places: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def info(self, row: TaskRow) -> QueueInfo | None:
        """The row's place; None when it does not wait (any more). Raises StoreError."""
        if row.status not in (Status.PENDING, Status.QUEUED):
            return None
        ahead = await self._ahead(row)
        if ahead is None:
            return None
        async with self._lock:  # of many who ask at once, one reads
            pools = await self._look()
            service = await self._service(row.pool)
        return judge(
            row,
            ahead,
            better=pools.better(row),
            slots=pools.slots(row.pool),
            running=pools.running(row.pool),
            service=service,
            now=datetime.now(UTC),
        )

    async def _ahead(self, row: TaskRow) -> int | None:
        now = self._clock()
        known = self._places.get(row.task_id)
        if known and now - known[0] < PLACE_SECONDS:
            return known[1]
        ahead = await self._figures.ahead(Principal(user_id=row.user_id), row.task_id, MAX_AHEAD)
        if ahead is None:
            self._places.pop(row.task_id, None)
            return None
        self._places[row.task_id] = (now, ahead)
        self._places.move_to_end(row.task_id)
        if len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)
        return ahead

    async def _look(self) -> _Pools:
        now = self._clock()
        if self._pools is None or now - self._pools[0] >= POOL_SECONDS:
            pools = _Pools(await self._figures.queues(), await self._workers.live(WORKER_SECONDS))
            self._pools = (now, pools)
        return self._pools[1]

    async def _service(self, pool: str) -> ServiceTimes:
        now = self._clock()
        known = self._services.get(pool)
        if known is None or now - known[0] >= SERVICE_SECONDS:
            known = self._services[pool] = (now, await self._figures.service_times(pool))
        return known[1]
