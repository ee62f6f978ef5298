"""Why a task waits, and about how long: estimates from the read model, shared by all who ask.

    info = await queues.info(row)      QueueInfo for a PENDING or QUEUED row, else None

The place follows the order in which tasks start: better classes first (or by shares), users in turn within a
class. Both are estimates: tasks end sooner or later than the pool's usual, and others come in between.
Figures of all pools are read once in LINE_SECONDS, a task's own place once in PLACE_SECONDS.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol

from perdure.models import Catalogue, Pool
from perdure.store.line import Line
from perdure.store.rows import Pause, QueueStat, ServiceTimes, TaskRow, WorkerRow
from perdure.task.policy import lane_key
from perdure.task.states import CLASSES, Priority, Status

Reason = Literal["waiting_for_slot", "behind_higher_priority", "no_worker", "backing_off", "not_before"]

LINE_SECONDS: Final = 2.0
PLACE_SECONDS: Final = 1.0
SERVICE_SECONDS: Final = 10.0
MAX_BEFORE: Final = 10_000  # counted no further
_MAX_PLACES: Final = 10_000


class Figures(Protocol):
    """What is asked of the store's figures (`StatsRepository`)."""

    async def queues(self) -> list[QueueStat]: ...
    async def service_times(self, pool: str, last: int = ...) -> ServiceTimes: ...


class Workers(Protocol):
    """What is asked of the table of workers seen (`WorkerRepository`)."""

    async def live(self, seconds: float = ...) -> Sequence[WorkerRow]: ...


class Lines(Protocol):
    """What is asked of who waits (`LineRepository`)."""

    async def lines(self) -> Sequence[Line]: ...
    async def before(self, task_id: str, at_most: int = ...) -> int | None: ...


class Pauses(Protocol):
    """What is asked of pauses (`DispatchRepository`)."""

    async def pauses(self) -> Sequence[Pause]: ...


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


def ahead_of(row: TaskRow, before: int, lines: Sequence[Line], catalogue: Catalogue) -> tuple[int, bool]:
    """How many tasks start before this one, of whose user `before` wait ahead of it on its lane; and whether
    some of them are of better classes. Pure.

    Users take turns within a class, by their weights: when this one's turn number `before` has come, each
    other user had as many, if it has so many. Under `strict` all better classes go first, and what moved up
    to a class takes turns in it as a user of its own; under `weighted` classes take turns by their shares.
    """
    key = lane_key(row.lane)
    mine = [line for line in lines if line.pool == row.pool]
    turns = before + 0.5  # the next one's turn comes before or after ours, as it may be
    weight = catalogue.weight_of(row.user_id)
    beside = sum(
        min(line.waiting, turns * catalogue.weight_of(line.user_id) / weight)
        for line in mine
        if lane_key(line.lane) == key and (line.lane, line.user_id) != (row.lane, row.user_id)
    )
    in_lane = before + beside
    pool = catalogue.pools.get(row.pool, Pool())
    if pool.scheduling == "strict":
        better = sum(line.waiting for line in mine if lane_key(line.lane) < key)
        return int(better + in_lane), better > 0
    own = _class_of(row.lane)
    waiting = dict.fromkeys(CLASSES, 0)
    for line in mine:
        waiting[_class_of(line.lane)] += line.waiting
    share = pool.weights.get(own, 1.0)
    others = sum(
        min(waiting[name], (in_lane + 0.5) * pool.weights.get(name, 1.0) / share)
        for name in CLASSES
        if name is not own
    )
    return int(in_lane + others), False


def _class_of(lane: int) -> Priority:
    """The class whose share a lane counts to."""
    return CLASSES[0] if lane <= 1 else CLASSES[1] if lane <= 3 else CLASSES[2]


def judge(
    row: TaskRow,
    ahead: int,
    *,
    better: bool,
    slots: int,
    running: int,
    service: ServiceTimes | None,
    now: datetime,
    paused: bool = False,
) -> QueueInfo:
    """The place of a waiting row: `ahead` tasks start before it, some of `better` classes; `running` of the
    pool's `slots` are taken, and its tasks lately took `service`. What is `paused` has no time. Pure."""
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
    if slots and service and service.count and not paused:
        turns = max(0, ahead + 1 - max(0, slots - running))
        start = now + timedelta(seconds=min(turns * service.mean / slots, 365 * 86_400.0))
    if held is not None and slots and not paused:
        start = max(held, start) if start and ahead >= slots else held
    return QueueInfo(ahead + 1, ahead, reason, start)


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at all pools."""

    stats: Sequence[QueueStat]
    workers: Sequence[WorkerRow]
    lines: Sequence[Line]
    pauses: Sequence[Pause]

    def slots(self, row: TaskRow) -> int:
        """Slots of the workers that serve the row's model."""
        here = [worker for worker in self.workers if worker.pool == row.pool]
        return sum(worker.slots for worker in here if worker.serves(row.model_id))

    def running(self, pool: str) -> int:
        return sum(stat.running for stat in self.stats if stat.pool == pool)

    def paused(self, row: TaskRow) -> bool:
        """Whether this row stays where it is: a pause holds what no workflow has taken."""
        held = {("pool", row.pool), ("model", row.model_id)}
        return row.status is Status.PENDING and any((pause.kind, pause.name) in held for pause in self.pauses)


class Queues:
    """Places of waiting tasks. One per process."""

    def __init__(
        self,
        figures: Figures,
        workers: Workers,
        lines: Lines,
        pauses: Pauses,
        catalogue: Catalogue,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._figures = figures
        self._workers = workers
        self._lines = lines
        self._pauses = pauses
        self._catalogue = catalogue
        self._clock = clock
        self._last: tuple[float, _Look] | None = None
        self._services: dict[str, tuple[float, ServiceTimes]] = {}
        self._before: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def info(self, row: TaskRow) -> QueueInfo | None:
        """The row's place; None when it does not wait (any more). Raises StoreError."""
        if row.status not in (Status.PENDING, Status.QUEUED):
            return None
        before = await self._place(row.task_id)
        if before is None:
            return None
        async with self._lock:  # of many who ask at once, one reads
            look = await self._look()
            service = await self._service(row.pool)
        ahead, better = ahead_of(row, before, look.lines, self._catalogue)
        return judge(
            row,
            ahead,
            better=better,
            slots=look.slots(row),
            running=look.running(row.pool),
            service=service,
            now=datetime.now(UTC),
            paused=look.paused(row),
        )

    async def _place(self, task_id: str) -> int | None:
        now = self._clock()
        known = self._before.get(task_id)
        if known and now - known[0] < PLACE_SECONDS:
            return known[1]
        before = await self._lines.before(task_id, MAX_BEFORE)
        if before is None:
            self._before.pop(task_id, None)
            return None
        self._before[task_id] = (now, before)
        self._before.move_to_end(task_id)
        if len(self._before) > _MAX_PLACES:
            self._before.popitem(last=False)
        return before

    async def _look(self) -> _Look:
        now = self._clock()
        if self._last is None or now - self._last[0] >= LINE_SECONDS:
            look = _Look(
                await self._figures.queues(),
                await self._workers.live(),
                await self._lines.lines(),
                await self._pauses.pauses(),
            )
            self._last = (now, look)
        return self._last[1]

    async def _service(self, pool: str) -> ServiceTimes:
        now = self._clock()
        known = self._services.get(pool)
        if known is None or now - known[0] >= SERVICE_SECONDS:
            known = self._services[pool] = (now, await self._figures.service_times(pool))
        return known[1]
