"""The dispatcher: owns PENDING rows and starts their workflows, in every API process and control worker.

It wakes at a submit, else at the next due time, one second at most. It claims only what it can start now,
so a crash leaves a lease of a few seconds and nothing else. While Temporal is down it keeps expiring rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from perdure.models import Catalogue
from perdure.observability.ends import ended_in_place
from perdure.observability.metrics import Metrics
from perdure.start import task_input
from perdure.store.engine import Store
from perdure.store.errors import StoreError
from perdure.store.rows import Lane, TaskRow
from perdure.task.errors import ErrorCode
from perdure.task.policy import priority_key
from perdure.task.states import Status
from perdure.temporal import EngineRefused, EngineUnavailable, TemporalGate

log = logging.getLogger(__name__)

_LEASE: Final = 5.0  # seconds
_IDLE: Final = 1.0  # seconds between looks when nothing wakes us
_BLOCKED: Final = 0.1  # the same while due rows wait for room in a window
_SLOW_START: Final = 0.05  # seconds: above that parallel starts are halved
_MAX_PARALLEL: Final = 32
_MAX_PAUSE: Final = 5.0  # seconds between tries while Temporal does not answer
_HIGH_LANE: Final = 1
_ATTRIBUTE_CHECK: Final = 60.0  # seconds between looks for missing search attributes


class Pace:
    """How many starts may run at once: 2 at first, more after quick starts, half after a slow one."""

    def __init__(self) -> None:
        self.limit = 2.0
        self._halved_at = 0.0

    def took(self, seconds: float, now: float) -> None:
        if seconds <= _SLOW_START:
            self.limit = min(_MAX_PARALLEL, self.limit + 1 / max(1.0, self.limit))
        elif now - self._halved_at > _SLOW_START:  # the starts of one slow moment count once
            self._halved_at = now
            self.limit = max(1.0, self.limit / 2)


class Dispatcher:
    """`run` until the task is cancelled; `wake` after a submit."""

    def __init__(
        self, store: Store, gate: TemporalGate, catalogue: Catalogue, metrics: Metrics, owner: str
    ) -> None:
        self._store, self._gate, self._catalogue = store, gate, catalogue
        self._metrics, self._owner = metrics, owner
        self._woken = asyncio.Event()
        self._pace = Pace()
        self._starts: set[asyncio.Task[None]] = set()
        self._high_starts = 0
        self._started: list[tuple[str, datetime]] = []
        self._flush_wanted = asyncio.Event()
        self._pause_until = 0.0
        self._pause = 0.0
        self._upkeep_at = 0.0
        self._attributes = False
        self._attributes_at = -_ATTRIBUTE_CHECK
        self._blocked = False  # due rows wait for room
        self._class_users: dict[tuple[str, int], float] = {}  # weighted pools: weights of who waits
        self._max_running = {
            user: known.max_running for user, known in catalogue.users.items() if known.max_running
        }

    def wake(self) -> None:
        """Something new may be due."""
        self._woken.set()

    @property
    def engine_paused(self) -> bool:
        """Whether starts wait because Temporal did not answer."""
        return time.monotonic() < self._pause_until

    async def run(self) -> None:
        """Dispatches until cancelled. Starts under way are finished or left to their lease."""
        flusher = asyncio.create_task(self._flush_forever(), name="dispatcher-flush")
        try:
            while True:
                self._woken.clear()
                try:
                    more = await self._tick()
                except StoreError:
                    log.warning("dispatcher waits for Postgres")
                    more = False
                except Exception:  # whatever it is, dispatch must not end with it
                    log.exception("dispatcher stumbled; it looks again")
                    more = False
                if not more:
                    await self._sleep()
        finally:
            if self._starts:
                await asyncio.wait(self._starts, timeout=2.0)
            flusher.cancel()
            for start in self._starts:
                start.cancel()
            await asyncio.gather(flusher, *self._starts, return_exceptions=True)

    async def _sleep(self) -> None:
        pause = _BLOCKED if self._blocked else _IDLE
        try:
            due = await self._store.dispatch.next_due()
            if due is not None:
                pause = max(0.01, min(pause, (due - datetime.now(UTC)).total_seconds()))
            await asyncio.wait_for(self._woken.wait(), pause)
        except TimeoutError:
            pass
        except StoreError:
            await asyncio.sleep(_IDLE)

    # One look ------------------------------------------------------------------------------------

    async def _tick(self) -> bool:
        """One look at what is due. True when there may be more to do at once."""
        await self._upkeep()
        if self.engine_paused:
            return False
        free = int(self._pace.limit) - (len(self._starts) - self._high_starts)
        high_free = max(0, 1 - self._high_starts)
        if free <= 0 and not high_free:
            await asyncio.wait(self._starts, return_when=asyncio.FIRST_COMPLETED)
            return True
        lanes = await self._store.dispatch.lanes()
        claimed = await self._claim(lanes, max(0, free), high_free)
        for row in claimed:
            self._begin(row)
        if claimed:
            return True
        if self._starts:
            await self._any_start_or_wake()
            return True
        return False

    async def _any_start_or_wake(self) -> None:
        waker = asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait([*self._starts, waker], return_when=asyncio.FIRST_COMPLETED, timeout=_IDLE)
        finally:
            waker.cancel()

    async def _upkeep(self) -> None:
        now = time.monotonic()
        if now < self._upkeep_at:
            return
        self._upkeep_at = now + _IDLE
        for ended in await self._store.dispatch.expire():
            ended_in_place(self._metrics, ended.task)
            log.info("task expired before its start", extra={"task_id": ended.task.task_id})
        for name, pool in self._catalogue.pools.items():
            if pool.scheduling == "strict":
                await self._store.dispatch.age(name, pool.max_wait)

    async def _claim(self, lanes: Iterable[Lane], free: int, high_free: int) -> list[TaskRow]:
        claimed: list[TaskRow] = []
        self._blocked = False
        for lane in self._ordered(lanes):
            if lane.pool not in self._catalogue.pools:
                continue
            slots = free + (high_free if lane.lane == _HIGH_LANE else 0)
            window = self._window(lane.pool) - lane.waiting
            self._blocked = self._blocked or window <= 0
            room = min(slots, window, lane.pending)
            if room <= 0:
                continue
            rows = await self._store.dispatch.claim(
                pool=lane.pool,
                lane=lane.lane,
                limit=room,
                lease_seconds=_LEASE,
                owner=self._owner,
                max_running=self._max_running,
                default_max_running=self._catalogue.max_running_per_user,
            )
            if rows and self._catalogue.pools[lane.pool].scheduling == "weighted":
                await self._note_users(lane)
            claimed.extend(row.task for row in rows)
            if lane.lane == _HIGH_LANE:
                own = min(high_free, len(rows))
                high_free -= own
                free -= len(rows) - own
            else:
                free -= len(rows)
            if free <= 0 and not high_free:
                break
        return claimed

    async def _note_users(self, lane: Lane) -> None:
        """Sums the weights of the users who wait in a class: each gets its part of the class's share."""
        users = await self._store.dispatch.users(lane.pool, lane.lane)
        self._class_users[lane.pool, lane.lane] = sum(map(self._catalogue.weight_of, users))

    def _ordered(self, lanes: Iterable[Lane]) -> list[Lane]:
        """Best class first; in a weighted pool the class that is furthest behind its share."""
        return sorted(lanes, key=self._rank)

    def _rank(self, lane: Lane) -> tuple[float, int]:
        pool = self._catalogue.pools.get(lane.pool)
        if pool is None or pool.scheduling == "strict":
            return (float(lane.lane), lane.lane)
        by_key = {priority_key(name): weight for name, weight in pool.weights.items()}
        return (lane.waiting / by_key.get(lane.lane, 1.0), lane.lane)

    def _window(self, pool: str) -> int:
        configured = self._catalogue.pools[pool]
        return configured.window or max(32, 8 * configured.slots)

    # Starts --------------------------------------------------------------------------------------

    def _begin(self, row: TaskRow) -> None:
        high = row.lane == _HIGH_LANE and self._high_starts == 0
        self._high_starts += high
        start = asyncio.create_task(self._start(row), name=f"start-{row.task_id}")
        self._starts.add(start)

        def over(task: asyncio.Task[None]) -> None:
            self._starts.discard(task)
            self._high_starts -= high
            if not task.cancelled() and task.exception():
                log.error("a start failed unexpectedly", exc_info=task.exception())

        start.add_done_callback(over)

    async def _start(self, row: TaskRow) -> None:
        """Starts one row's workflow. An unknown outcome leaves the row to its lease."""
        try:
            attributes = await self._attributes_known()
            task = task_input(
                row,
                self._catalogue,
                search_attributes=attributes,
                class_users=self._class_users.get((row.pool, row.lane), 1.0),
            )
        except KeyError:
            await self._model_gone(row)
            return
        except EngineUnavailable:
            self._pause_starts()
            return
        began = time.monotonic()
        try:
            await self._gate.start_task(task)
        except EngineUnavailable:
            self._pause_starts()
            return
        except Exception as error:  # refused, or an input that cannot even be encoded: the row's own fault
            await self._refused(row, error)
            return
        self._pause = 0.0
        now = time.monotonic()
        self._pace.took(now - began, now)
        self._started.append((row.task_id, datetime.now(UTC)))
        self._flush_wanted.set()

    async def _attributes_known(self) -> bool:
        """Whether search attributes may be carried; looked up again once a minute while they are missing."""
        now = time.monotonic()
        if not self._attributes and now - self._attributes_at > _ATTRIBUTE_CHECK:
            self._attributes_at = now
            try:
                self._attributes = await self._gate.search_attributes_registered()
            except EngineUnavailable:
                self._attributes_at = -_ATTRIBUTE_CHECK
                raise
            if not self._attributes:
                log.warning("Temporal lacks our search attributes; run: perdure migrate")
        return self._attributes

    def _pause_starts(self) -> None:
        self._pause = min(_MAX_PAUSE, self._pause * 2 or 0.25)
        self._pause_until = time.monotonic() + self._pause
        log.warning("Temporal does not answer; starts wait", extra={"seconds": self._pause})

    async def _refused(self, row: TaskRow, error: Exception) -> None:
        failures = await self._store.dispatch.refuse(
            row.task_id, "the workflow engine refused to start this task; see the log of the dispatcher"
        )
        log.error(
            "a start is refused",
            extra={"task_id": row.task_id, "failures": failures, "reason": type(error).__name__},
        )
        if failures >= 3:
            self._failed(row)

    async def _model_gone(self, row: TaskRow) -> None:
        receipt = await self._store.maintenance.fail(
            row.task_id,
            row.version,
            ErrorCode.MODEL_UNKNOWN,
            f"model '{row.model_id}' is no longer configured; submit the task again with another model_id",
        )
        if receipt.kind == "committed":
            self._failed(row)

    def _failed(self, row: TaskRow) -> None:
        ended_in_place(self._metrics, row, Status.FAILED)

    # Transition 1 --------------------------------------------------------------------------------

    async def _flush_forever(self) -> None:
        while True:
            await self._flush_wanted.wait()
            self._flush_wanted.clear()
            batch, self._started = self._started, []
            try:
                flagged = await self._store.dispatch.queued(batch)
            except StoreError:
                # The lease runs out, the same ids are started again ("already started") and written then.
                log.warning("transition to QUEUED waits for Postgres", extra={"rows": len(batch)})
                continue
            except Exception:  # whatever it is, the next batch is written
                log.exception("transition to QUEUED stumbled; the leases bring it again")
                continue
            for found in flagged:
                if found.cancel_requested:
                    await self._signal_cancel(found.task_id, found.cancel_reason)

    async def _signal_cancel(self, task_id: str, reason: str | None) -> None:
        try:
            await self._gate.signal_cancel(task_id, reason)
        except (EngineUnavailable, EngineRefused):
            log.warning("cancel is left to the reconciler", extra={"task_id": task_id})
