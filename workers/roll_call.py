"""Which GPU workers live: asked of Temporal, noted in the store, since GPU workers have no database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from temporalio.api.enums.v1 import WorkerStatus
from temporalio.api.worker.v1 import WorkerHeartbeat
from temporalio.api.workflowservice.v1 import ListWorkersRequest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure import names
from perdure.models import Catalogue
from perdure.store.engine import Store
from perdure.store.errors import StoreError
from perdure.store.rows import WorkerReport
from perdure.store.workers import LIVE_SECONDS
from perdure.temporal import EngineRefused, EngineUnavailable, bounded

log = logging.getLogger(__name__)

EVERY: Final = 5.0  # seconds
_PAGE: Final = 200
_FORGOTTEN: Final = 600.0  # seconds after which a heartbeat that Temporal no longer lists is dropped


class Pulse:
    """How long workers have been silent.

    Temporal keeps a dead worker's last heartbeat for minutes, as it was. Its time is the worker's own clock,
    so after the first look only a change of it counts, which needs no clocks that agree.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall = clock, wall
        self._seen: dict[str, tuple[float, float]] = {}  # worker: (its heartbeat's time, when it was made)

    def silent(self, worker: str, beat: float) -> float:
        """Seconds since the heartbeat that says `beat` (Unix time)."""
        now = self._clock()
        known = self._seen.get(worker)
        if known is None:
            made = now - max(0.0, self._wall() - beat)
        elif known[0] != beat:
            made = now
        else:
            made = known[1]
        self._seen[worker] = (beat, made)
        return now - made

    def forget(self) -> None:
        """Drops workers that were silent for long."""
        now = self._clock()
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] < _FORGOTTEN}


class RollCall:
    """Asks every few seconds; several control workers may ask at once."""

    def __init__(self, client: Client, store: Store, catalogue: Catalogue) -> None:
        self._client, self._store, self._catalogue = client, store, catalogue
        self._pulse = Pulse()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._store.workers.report(await self.ask())
            except (EngineUnavailable, EngineRefused, StoreError, RPCError) as error:
                log.debug("roll call missed", extra={"reason": type(error).__name__})
            await asyncio.sleep(EVERY)

    async def ask(self) -> list[WorkerReport]:
        """The GPU workers that live."""
        found: list[WorkerReport] = []
        token = b""
        while True:
            answer = await bounded(
                self._client.workflow_service.list_workers(
                    ListWorkersRequest(
                        namespace=self._client.namespace, page_size=_PAGE, next_page_token=token
                    )
                )
            )
            reports = (self._report(info.worker_heartbeat) for info in answer.workers_info)
            found.extend(filter(None, reports))
            token = answer.next_page_token
            if not token:
                self._pulse.forget()
                return found

    def _report(self, beat: WorkerHeartbeat) -> WorkerReport | None:
        pool = names.pool_of_queue(beat.task_queue)
        if pool is None or pool not in self._catalogue.pools:
            return None
        if beat.status == WorkerStatus.WORKER_STATUS_SHUTDOWN:
            return None
        made = beat.heartbeat_time.seconds + beat.heartbeat_time.nanos / 1e9
        silent = self._pulse.silent(beat.worker_instance_key, made)
        if silent > LIVE_SECONDS:
            return None
        slots = beat.activity_task_slots_info
        return WorkerReport(
            worker=beat.worker_identity,
            pool=pool,
            models=tuple(self._catalogue.models_of(pool)),
            slots=slots.current_available_slots + slots.current_used_slots,
            in_use=slots.current_used_slots,
            draining=beat.status == WorkerStatus.WORKER_STATUS_SHUTTING_DOWN,
            silent=silent,
        )
