"""Gauges from rows: what the API's page shows of tasks, queues, slots and waiting callbacks.

Every API process reads the same rows, so each shows the whole; rules take the maximum over processes, never
the sum.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from perdure.observability.metrics import OTHER, SLOT_STATES, BoundedGauge, Metrics
from perdure.store import Store
from perdure.store.rows import QueueStat, WorkerRow
from perdure.task.states import CLASSES, Status

log = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 1.0  # several scrapers, and anybody who asks, cost one reading a second
_READ_SECONDS: Final = 3.0  # below Prometheus' time-out, so that the page answers while Postgres does not


class StatsGauges:
    """Reads the figures at a scrape, at most once a second, one reading at a time."""

    def __init__(self, metrics: Metrics, store: Store) -> None:
        self._metrics = metrics
        self._store = store
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._up = True  # so that the first failure is logged

    async def refresh(self) -> None:
        """Brings the gauges up to date. While Postgres is away they keep their last values, `stats_up` is 0
        and the page still answers."""
        async with self._lock:
            if time.monotonic() - self._read_at < _FRESH_SECONDS:
                return
            try:
                await asyncio.wait_for(self._read(), _READ_SECONDS)
            except Exception as error:  # whatever it is, the other families must still be served
                if self._up:
                    log.warning("gauges cannot be read", extra={"error": f"{type(error).__name__}: {error}"})
                self._up = False
            else:
                self._up = True
            self._metrics.stats_up.set(self._up)
            self._read_at = time.monotonic()

    async def _read(self) -> None:
        states = await self._store.stats.by_state()
        queues = await self._store.stats.queues()
        workers = await self._store.workers.live()
        waiting = await self._store.stats.callbacks_waiting()
        by_model = await self._store.stats.waiting_by_model()
        for status in Status:
            self._metrics.tasks.labels(status=status).set(states.get(status, 0))
        self._metrics.callbacks_waiting.set(waiting)
        self._show_queues(queues)
        self._show_slots(workers)
        self._show_models(by_model, workers)

    def _show_queues(self, queues: list[QueueStat]) -> None:
        depth, oldest, running = (self._zeros(CLASSES) for _ in range(3))
        for one in queues:
            key = (self._pool(one.pool), one.priority.value)
            depth[key] += one.waiting
            oldest[key] = max(oldest[key], one.oldest_wait)
            running[key] += one.running
        _show(self._metrics.queue_depth, depth)
        _show(self._metrics.queue_oldest_wait, oldest)
        _show(self._metrics.queue_running, running)

    def _show_slots(self, workers: list[WorkerRow]) -> None:
        slots = self._zeros(SLOT_STATES)
        for worker in workers:
            pool, busy = self._pool(worker.pool), min(worker.in_use, worker.slots)
            slots[pool, "busy"] += busy
            slots[pool, "free"] += 0 if worker.draining else worker.slots - busy  # it takes nothing new
        _show(self._metrics.pool_slots, slots)

    def _show_models(self, waiting: dict[str, int], workers: list[WorkerRow]) -> None:
        for name, model in self._metrics.catalogue.models.items():
            serving = [one for one in workers if one.pool == model.pool and one.serves(name)]
            told = [news for one in serving for news in one.told or () if news.model_id == name]
            self._metrics.model_waiting.labels(model=name).set(waiting.get(name, 0))
            self._metrics.model_workers.labels(model=name).set(len(serving))
            self._metrics.model_breakers_open.labels(model=name).set(
                sum(news.breaker in ("open", "half_open") for news in told)
            )

    def _pool(self, pool: str) -> str:
        """The pool's label: pools that the configuration no longer knows add up under one."""
        return pool if pool in self._metrics.catalogue.pools else OTHER

    def _zeros(self, second: tuple[str, ...]) -> dict[tuple[str, str], float]:
        """Every pair at zero, so that a queue that emptied shows it."""
        pools = [*self._metrics.catalogue.pools, OTHER]
        return {(pool, str(one)): 0.0 for pool in pools for one in second}


def _show(gauge: BoundedGauge, values: dict[tuple[str, str], float]) -> None:
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
