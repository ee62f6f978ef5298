"""The GPU worker: generation for one pool. It knows Temporal and its model servers, and no database.

    worker = GpuWorker(client, catalogue, pool, slots, metrics, drain_seconds)
    await worker.run(asked, hurried)        until `asked` is set and its attempts are over
    await worker.aclose()

When it is asked to stop it takes no new work and gives running attempts `drain_seconds`; then, or as soon as
it is hurried, they hand over: each returns its checkpoint as an ordinary result, and another worker goes on
from there at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from activities.generate import GenerateActivities
from perdure import names
from perdure.contracts import ModelNews, WorkerNews
from perdure.llm.breaker import BreakerState, State
from perdure.llm.drain import DrainState
from perdure.llm.executors import BrokenExecutor, build_executors
from perdure.llm.openai import OpenAIExecutor
from perdure.models import Catalogue, CatalogueError
from perdure.observability.metrics import Metrics
from workers.news import Teller

log = logging.getLogger(__name__)

_BEATS: Final = timedelta(seconds=1)  # heartbeats reach the server at most this often
_AFTER_DRAIN: Final = timedelta(seconds=30)  # after that the SDK cancels what still runs
# Enough for hundreds of attempts a second. A worker that freezes keeps its open polls for a minute, and each
# swallows one task until the heartbeat time-out, so there are not more.
_MOST_POLLERS: Final = 2
_JITTER: Final = timedelta(seconds=0.5)
_SHOWN: Final[dict[State, Literal["closed", "half_open", "open"]]] = {
    "closed": "closed",
    "open": "open",
    "probing": "half_open",
    "recovering": "half_open",
}


class GpuWorker:
    """Serves the models of one pool. `slots`: attempts at once; the pool's own number where None.

    `env` holds base URLs and API keys by the names that models.toml gives. Raises CatalogueError for a pool
    that is not in the catalogue. A model that cannot be served is logged, and its tasks fail with the reason.
    """

    def __init__(
        self,
        client: Client,
        catalogue: Catalogue,
        pool: str,
        slots: int | None,
        metrics: Metrics | None,
        drain_seconds: float,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        if pool not in catalogue.pools:
            known = ", ".join(sorted(catalogue.pools)) or "none"
            raise CatalogueError(f"there is no [pools.{pool}] in models.toml; its pools are: {known}")
        self._client = client
        self._pool = pool
        self._slots = slots or catalogue.pools[pool].slots
        self._drain_seconds = drain_seconds
        self._drain = DrainState()
        self._moved: dict[str, datetime] = {}  # when each breaker closed, or left that state
        self._executors = build_executors(catalogue, pool, env)
        self._activities = GenerateActivities(self._executors, catalogue, client, metrics, self._drain)

    def states(self) -> dict[str, BreakerState]:
        """The breaker of each model that has one, by model id."""
        return {
            name: executor.state()
            for name, executor in self._executors.items()
            if isinstance(executor, OpenAIExecutor)
        }

    def news(self) -> WorkerNews:
        """What it serves, and how the breakers stand, as of now."""
        now = datetime.now(UTC)
        states = self.states()
        models = []
        for name, executor in self._executors.items():
            state = states.get(name)
            models.append(
                ModelNews(
                    model_id=name,
                    error_code=executor.code if isinstance(executor, BrokenExecutor) else None,
                    breaker=_SHOWN[state.state] if state else None,
                    since=self._since(name, now - timedelta(seconds=state.age)) if state else None,
                    refusals=state.refusals if state else 0,
                )
            )
        return WorkerNews(
            worker=self._client.identity, pool=self._pool, slots=self._slots, models=models, at=now
        )

    def _since(self, model_id: str, moment: datetime) -> datetime:
        """The moment, as first told: two clocks never agree to the microsecond."""
        known = self._moved.get(model_id)
        if known is None or abs(known - moment) > _JITTER:
            known = self._moved[model_id] = moment
        return known

    async def run(self, asked: asyncio.Event, hurried: asyncio.Event) -> None:
        """Works until `asked`, then drains; `hurried` ends the drain. A fatal error of the SDK is raised."""
        worker = self._worker()
        working = asyncio.create_task(worker.run())
        telling = asyncio.create_task(Teller(self._client, self.news).run())
        log.info(
            "worker ready",
            extra={"pool": self._pool, "slots": self._slots, "models": sorted(self._executors)},
        )
        try:
            await _first(working, asked)
            if not working.done():
                self._drain.begin(self._drain_seconds)
                log.info("worker drains", extra={"pool": self._pool, "seconds": self._drain_seconds})
                stopping = asyncio.create_task(worker.shutdown())
                await _first(working, hurried)
                self._drain.now()
                await stopping
            await working
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        log.info("worker stopped", extra={"pool": self._pool})

    def _worker(self) -> Worker:
        return Worker(
            self._client,
            task_queue=names.pool_queue(self._pool),
            activities=[self._activities.generate],
            max_concurrent_activities=self._slots,
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(min(self._slots, _MOST_POLLERS)),
            max_heartbeat_throttle_interval=_BEATS,
            default_heartbeat_throttle_interval=_BEATS,
            graceful_shutdown_timeout=timedelta(seconds=self._drain_seconds) + _AFTER_DRAIN,
            disable_eager_activity_execution=True,
        )

    async def aclose(self) -> None:
        """Closes every connection to model servers."""
        for executor in self._executors.values():
            await executor.aclose()


async def _first(working: asyncio.Task[None], event: asyncio.Event) -> None:
    """Waits for the worker's end or for the event."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
