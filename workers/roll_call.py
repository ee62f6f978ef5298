"""Which GPU workers live: asked of Temporal, noted in the store, since GPU workers have no database."""

from __future__ import annotations

import asyncio
import logging
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
from perdure.temporal import EngineRefused, EngineUnavailable, bounded

log = logging.getLogger(__name__)

EVERY: Final = 5.0  # seconds
FRESH: Final = 20.0  # seconds since its last heartbeat: with EVERY, a worker that is gone shows within 30 s
_PAGE: Final = 200


class RollCall:
    """Asks every few seconds; several control workers may ask at once."""

    def __init__(self, client: Client, store: Store, catalogue: Catalogue) -> None:
        self._client, self._store, self._catalogue = client, store, catalogue

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._store.workers.report(await self.ask())
            except (EngineUnavailable, EngineRefused, StoreError, RPCError) as error:
                log.debug("roll call missed", extra={"reason": type(error).__name__})
            await asyncio.sleep(EVERY)

    async def ask(self) -> list[WorkerReport]:
        """The GPU workers whose heartbeat is fresh."""
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
                return found

    def _report(self, beat: WorkerHeartbeat) -> WorkerReport | None:
        pool = names.pool_of_queue(beat.task_queue)
        if pool is None or pool not in self._catalogue.pools:
            return None
        if beat.status == WorkerStatus.WORKER_STATUS_SHUTDOWN:
            return None
        silent = beat.elapsed_since_last_heartbeat.ToTimedelta().total_seconds()
        if silent > FRESH:
            return None
        slots = beat.activity_task_slots_info
        return WorkerReport(
            worker=beat.worker_identity,
            pool=pool,
            models=tuple(self._catalogue.models_of(pool)),
            slots=slots.current_available_slots + slots.current_used_slots,
            in_use=slots.current_used_slots,
            draining=beat.status == WorkerStatus.WORKER_STATUS_SHUTTING_DOWN,
        )
