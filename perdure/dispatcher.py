"""The dispatcher: owns PENDING rows and starts their workflows, in every API process and control worker.

It wakes at a submit, else at the next due time, one second at most. It claims only what it can start now,
so a crash leaves a lease of a few seconds and nothing else. While Temporal is down it keeps expiring rows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from perdure.models import Catalogue
from perdure.observability.ends import ended_in_place
from perdure.observability.metrics import Metrics
from perdure.starts import HIGH_LANE, Starts
from perdure.store.engine import Store
from perdure.store.errors import StoreError
from perdure.store.rows import Lane, TaskRow, WorkerRow
from perdure.task.policy import lane_key, priority_key
from perdure.temporal import TemporalGate

log = logging.getLogger(__name__)

_LEASE: Final = 5.0  # seconds
_IDLE: Final = 1.0  # seconds between looks when nothing wakes us
_BLOCKED: Final = 0.1  # the same while due rows wait for room in a window
_WORKER_CHECK: Final = 5.0  # seconds between looks at what live workers serve


class Dispatcher:
    """`run` until the task is cancelled; `wake` after a submit."""

    def __init__(
        self, store: Store, gate: TemporalGate, catalogue: Catalogue, metrics: Metrics, owner: str
    ) -> None:
        self._store, self._catalogue = store, catalogue
        self._metrics, self._owner = metrics, owner
        self._starts = Starts(store, gate, catalogue, metrics)
        self._woken = asyncio.Event()
        self._upkeep_at = 0.0
        self._workers_at = 0.0
        self._held: frozenset[str] = frozenset()  # models that no live worker has
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
        return self._starts.paused

    async def run(self) -> None:
        """Dispatches until cancelled. Starts under way are finished or left to their lease."""
        flusher = asyncio.create_task(self._starts.flush_forever(), name="dispatcher-flush")
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
            try:
                await self._starts.aclose()
            finally:
                while not flusher.done():  # again: a query that breaks just now can swallow a cancel
                    flusher.cancel()
                    await asyncio.wait({flusher}, timeout=0.5)

    async def _sleep(self) -> None:
        pause = _BLOCKED if self._blocked else _IDLE
        try:
            due = await self._store.dispatch.next_due()
            if due is not None:
                pause = max(0.01, min(pause, (due - datetime.now(UTC)).total_seconds()))
            async with asyncio.timeout(pause):  # wait_for would lose a cancel that meets a wake
                await self._woken.wait()
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
        free, high_free = self._starts.free, self._starts.high_free
        if not free and not high_free:
            await asyncio.wait(self._starts.running, return_when=asyncio.FIRST_COMPLETED)
            return True
        lanes = await self._store.dispatch.lanes(self._held)
        claimed = await self._claim(lanes, free, high_free)
        for row in claimed:
            self._starts.begin(row, self._class_users.get((row.pool, row.lane), 1.0))
        if claimed:
            return True
        if self._starts.running:
            await self._any_start_or_wake()
            return True
        return False

    async def _any_start_or_wake(self) -> None:
        waker = asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait(
                [*self._starts.running, waker], return_when=asyncio.FIRST_COMPLETED, timeout=_IDLE
            )
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
        if now >= self._workers_at:
            self._workers_at = now + _WORKER_CHECK
            held = unserved(self._catalogue, await self._store.workers.live())
            for model in held - self._held:
                log.warning("no worker of its pool serves this model: its tasks wait", extra={"model": model})
            self._held = held

    async def _claim(self, lanes: Iterable[Lane], free: int, high_free: int) -> list[TaskRow]:
        claimed: list[TaskRow] = []
        self._blocked = False
        for lane in self._ordered(lanes):
            if lane.pool not in self._catalogue.pools:
                continue
            slots = free + (high_free if lane.lane == HIGH_LANE else 0)
            window, last_turn = self._window(lane.pool), None
            left = window - lane.waiting
            if left <= 0:  # those who fill it do not keep others out: each user has some places of its own
                self._blocked = True
                left += window
                last_turn = min(window, self._catalogue.pools[lane.pool].slots)
            room = min(slots, left, lane.pending)
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
                held=self._held,
                last_turn=last_turn,
            )
            if rows and self._catalogue.pools[lane.pool].scheduling == "weighted":
                await self._note_users(lane)
            claimed.extend(row.task for row in rows)
            if lane.lane == HIGH_LANE:
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
        """Best class first, taking turns with what has moved up to it; in a weighted pool the class that is
        furthest behind its share."""
        return sorted(lanes, key=self._rank)

    def _rank(self, lane: Lane) -> tuple[float, ...]:
        pool = self._catalogue.pools.get(lane.pool)
        if pool is None or pool.scheduling == "strict":
            return (lane_key(lane.lane), lane.waiting, lane.lane)
        by_key = {priority_key(name): weight for name, weight in pool.weights.items()}
        return (lane.waiting / by_key.get(lane.lane, 1.0), lane.lane)

    def _window(self, pool: str) -> int:
        """How many tasks of a lane wait in the engine. Users with fewer than `slots` of them go beyond it, up
        to twice as many in all."""
        configured = self._catalogue.pools[pool]
        return configured.window or max(32, 8 * configured.slots)


def unserved(catalogue: Catalogue, workers: Sequence[WorkerRow]) -> frozenset[str]:
    """Models that no worker of their pool has, though it has workers: an attempt could only be turned away.

    A pool without workers holds nothing back (what waits in the engine starts with the next worker), and a
    worker that has not told its models yet may have any.
    """
    found: set[str] = set()
    for pool in catalogue.pools:
        here = [worker for worker in workers if worker.pool == pool and not worker.draining]
        told = [worker.told for worker in here if worker.told is not None]
        if here and len(told) == len(here):
            had = {model.model_id for models in told for model in models}
            found |= set(catalogue.models_of(pool)) - had
    return frozenset(found)
