"""A reconciler beside real rows, a real Temporal server and workers that can be left out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities.maintenance import MaintenanceActivities
from activities.records import RecordActivities
from perdure import names
from perdure.observability.metrics import Metrics
from perdure.start import task_input
from perdure.store import Store
from perdure.store.rows import TaskRow
from perdure.task.states import Status
from perdure.temporal import TemporalGate
from tests.support.tasks import catalogue, submit
from tests.support.waiting import until
from tests.workflow.conftest import World, generated
from workers.control import build_control_worker


class Upkeep:
    """The reconciler with a patience that tests can wait for."""

    def __init__(self, store: Store, client: Client) -> None:
        self.store, self.client, self.metrics = store, client, Metrics(catalogue())
        self.gate = TemporalGate(client)
        self.world = World()
        self.records = RecordActivities(store, self.gate, self.metrics)
        self.activities = self.reconciler(client)

    def reconciler(self, client: Client) -> MaintenanceActivities:
        """One that sees Temporal through `client`."""
        return MaintenanceActivities(
            self.store,
            client,
            catalogue(),
            self.metrics,
            commit=self.records.commit_again,
            retention_days=30,
            silent_seconds=0.0,
        )

    async def pass_(self) -> int:
        repaired = await ActivityEnvironment().run(self.activities.reconcile)
        assert isinstance(repaired, int)
        return repaired

    async def settles(self, task_id: str, status: Status) -> TaskRow:
        async def there() -> bool:
            await self.pass_()
            return (await self.row(task_id)).status is status

        await until(there, every=0.2)
        return await self.row(task_id)

    async def row(self, task_id: str) -> TaskRow:
        found = await self.store.tasks.by_id_any(task_id)
        assert found is not None
        return found

    async def queued(self, **changes: Any) -> str:
        """A row whose workflow runs, as the dispatcher leaves it."""
        task_id = await submit(self.store, **changes)
        (claimed,) = await self.store.dispatch.claim("p", 3, 1, 5, "test")
        await self.gate.start_task(task_input(claimed.task, catalogue(), search_attributes=True))
        await self.store.dispatch.queued([(task_id, datetime.now(UTC))])
        return task_id

    async def lost(self, **changes: Any) -> str:
        """A row that says QUEUED, and an engine that knows nothing: as after a restore of Temporal."""
        task_id = await submit(self.store, **changes)
        await self.store.dispatch.claim("p", 3, 1, 5, "test")
        await self.store.dispatch.queued([(task_id, datetime.now(UTC))])
        return task_id

    async def sql(self, words: str, *values: Any) -> None:
        """A change that no call of ours can make: a fault, or time that passes."""
        connection = await asyncpg.connect(
            self.store.engine.url.render_as_string(False).replace("+asyncpg", "")
        )
        try:
            await connection.execute(words, *values)
        finally:
            await connection.close()

    async def reopen(self, task_id: str) -> None:
        """As after a restore of Postgres: the row's end is lost."""
        await self.sql("DELETE FROM task_results WHERE task_id = $1", task_id)
        await self.sql("DELETE FROM callback_deliveries WHERE task_id = $1", task_id)
        await self.sql(
            "UPDATE tasks SET status = 'QUEUED', completed_at = NULL, version = 1 WHERE task_id = $1", task_id
        )

    def repairs(self, kind: str) -> float:
        value = self.metrics.registry.get_sample_value("perdure_reconciler_repairs_total", {"kind": kind})
        return value or 0.0

    @asynccontextmanager
    async def workers_without_gpu(self) -> AsyncIterator[None]:
        """A control worker that writes real rows."""
        activities: list[Callable[..., Any]] = [
            self.records.record_now,
            self.records.record,
            self.records.commit_outcome,
        ]
        async with build_control_worker(self.client, activities, records_at_once=5):
            yield

    @asynccontextmanager
    async def workers(self) -> AsyncIterator[None]:
        """The same, and a GPU worker that generates at once."""
        self.world.script = [_done]
        gpu = Worker(self.client, task_queue=names.pool_queue("p"), activities=[self.world.generate()])
        async with self.workers_without_gpu(), gpu:
            yield


async def _done(given: Any) -> Any:
    return generated(given)


@pytest.fixture
def upkeep(store: Store, temporal_client: Client) -> Upkeep:
    return Upkeep(store, temporal_client)
