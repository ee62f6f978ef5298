"""The reconciler: rows and runs that disagree converge, whichever of the two was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
from perdure.contracts import CommitReceipt, Outcome, Projection, TaskResult
from perdure.observability.metrics import Metrics
from perdure.start import task_input
from perdure.store import Store
from perdure.store.rows import TaskRow
from perdure.task.states import Status
from perdure.temporal import TemporalGate
from tests.support.tasks import ANN, catalogue, submit
from tests.support.waiting import until
from tests.workflow.conftest import World, generated
from workers.control import build_control_worker


class Upkeep:
    """The reconciler with a patience that tests can wait for."""

    def __init__(self, store: Store, client: Client) -> None:
        known = catalogue()
        self.store, self.client, self.metrics = store, client, Metrics(known)
        self.gate = TemporalGate(client)
        self.world = World()
        self.activities = MaintenanceActivities(
            store, client, known, self.metrics, retention_days=30, silent_seconds=0.0
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

    def repairs(self, kind: str) -> float:
        value = self.metrics.registry.get_sample_value("perdure_reconciler_repairs_total", {"kind": kind})
        return value or 0.0

    @asynccontextmanager
    async def workers_without_gpu(self) -> AsyncIterator[None]:
        """A control worker that writes real rows."""
        records = RecordActivities(self.store, self.gate, self.metrics)
        activities = [records.record_now, records.record, records.commit_outcome]
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


async def test_a_terminated_workflow_is_failed_with_its_callback(upkeep: Upkeep) -> None:
    task_id = await upkeep.queued(callback_url="https://example.com/hook")
    await upkeep.client.get_workflow_handle(task_id).terminate("by an operator")
    row = await upkeep.settles(task_id, Status.FAILED)
    assert row.error_code == "terminated"
    assert row.completed_at is not None
    assert upkeep.repairs("terminated") == 1
    deliveries = await upkeep.store.deliveries.list_for_task(ANN, task_id)
    assert deliveries is not None
    assert [d.event for d in deliveries] == ["FAILED"]
    assert await upkeep.pass_() == 0


async def test_a_commit_that_postgres_lost_is_made_again(upkeep: Upkeep, database_url: str) -> None:
    """The run completed, the row is open: as after a restore of Postgres."""
    task_id = await upkeep.queued()
    async with upkeep.workers():
        await upkeep.client.get_workflow_handle(task_id).result()
    assert (await upkeep.row(task_id)).status is Status.COMPLETED
    await _reopen(database_url, task_id)
    row = await upkeep.settles(task_id, Status.COMPLETED)
    assert row.result is not None
    assert row.result["text"] == "done"
    assert upkeep.repairs("committed") == 1


async def _reopen(database_url: str, task_id: str) -> None:
    """A fault that no call of ours can make."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("DELETE FROM task_results WHERE task_id = $1", task_id)
        await connection.execute(
            "UPDATE tasks SET status = 'QUEUED', completed_at = NULL, version = 1 WHERE task_id = $1", task_id
        )
    finally:
        await connection.close()


async def test_a_workflow_that_the_engine_lost_is_started_once_more(upkeep: Upkeep) -> None:
    """The row says QUEUED and the engine knows nothing: as after a restore of Temporal."""
    task_id = await submit(upkeep.store)
    await upkeep.store.dispatch.claim("p", 3, 1, 5, "test")
    await upkeep.store.dispatch.queued([(task_id, datetime.now(UTC))])
    async with upkeep.workers():
        row = await upkeep.settles(task_id, Status.COMPLETED)
    assert row.version > 3  # the numbers go on
    assert upkeep.repairs("restarted") == 1


async def test_a_cancel_that_was_not_delivered_is_signalled_again(upkeep: Upkeep) -> None:
    task_id = await upkeep.queued()
    await upkeep.store.tasks.request_cancel(ANN, task_id, "stop")  # and the API dies before its signal
    async with upkeep.workers_without_gpu():
        row = await _cancel_again(upkeep, task_id)
    assert row.status is Status.CANCELLED


async def _cancel_again(upkeep: Upkeep, task_id: str) -> TaskRow:
    due = await upkeep.store.maintenance.cancels_due(0)
    assert [row.task_id for row in due] == [task_id]
    await upkeep.activities._signal_again(due[0])

    async def there() -> bool:
        return (await upkeep.row(task_id)).status.final

    await until(there)
    return await upkeep.row(task_id)


async def test_a_running_task_is_left_alone(upkeep: Upkeep) -> None:
    task_id = await upkeep.queued()
    assert await upkeep.pass_() == 0
    assert (await upkeep.row(task_id)).status is Status.QUEUED
    await upkeep.client.get_workflow_handle(task_id).terminate()


async def test_two_reconcilers_at_once_repair_once(upkeep: Upkeep) -> None:
    ids = [await upkeep.queued() for _ in range(5)]
    for task_id in ids:
        await upkeep.client.get_workflow_handle(task_id).terminate()

    async def all_settled() -> bool:
        await asyncio.gather(upkeep.pass_(), upkeep.pass_())
        return all([(await upkeep.row(task_id)).status is Status.FAILED for task_id in ids])

    await until(all_settled, every=0.2)
    assert upkeep.repairs("terminated") == 5


async def test_a_late_commit_is_superseded(upkeep: Upkeep) -> None:
    task_id = await upkeep.queued()
    await upkeep.client.get_workflow_handle(task_id).terminate()
    await upkeep.settles(task_id, Status.FAILED)
    records = RecordActivities(upkeep.store, upkeep.gate, upkeep.metrics)
    late = Outcome(
        projection=Projection(task_id=task_id, version=9, status=Status.COMPLETED, progress=100),
        completed_at=datetime.now(UTC),
    )
    receipt: CommitReceipt = await ActivityEnvironment().run(records.commit_outcome, late)
    assert receipt.kind == "superseded"
    gone = late.model_copy(update={"projection": late.projection.model_copy(update={"task_id": "task_x"})})
    assert (await ActivityEnvironment().run(records.commit_outcome, gone)).kind == "missing"
    assert (await upkeep.row(task_id)).error_code == "terminated"


async def test_a_reset_run_goes_on_with_higher_numbers(upkeep: Upkeep) -> None:
    """An operator resets the workflow: its new run replays, and its outcome is taken."""
    from temporalio.api.common.v1 import WorkflowExecution
    from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

    task_id = await upkeep.queued()
    async with upkeep.workers_without_gpu():
        handle = upkeep.client.get_workflow_handle(task_id)

        async def first_step() -> bool:
            events = (await handle.fetch_history()).events
            return any(e.HasField("workflow_task_completed_event_attributes") for e in events)

        await until(first_step)
        await upkeep.client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=upkeep.client.namespace,
                workflow_execution=WorkflowExecution(workflow_id=task_id),
                reason="test",
                workflow_task_finish_event_id=4,
                request_id=task_id,
            )
        )
    await upkeep.pass_()
    assert (await upkeep.row(task_id)).status is Status.QUEUED  # the terminated run is not its latest
    async with upkeep.workers():
        row = await upkeep.settles(task_id, Status.COMPLETED)
    assert row.result is not None


async def test_what_postgres_refuses_is_cleaned_and_committed(upkeep: Upkeep) -> None:
    task_id = await upkeep.queued()
    records = RecordActivities(upkeep.store, upkeep.gate, upkeep.metrics)
    dirty = Outcome(
        projection=Projection(
            task_id=task_id, version=3, status=Status.FAILED, error_code="internal", error_message="a\x00b"
        ),
        result=TaskResult(text="kept"),
        completed_at=datetime.now(UTC),
    )
    receipt = await ActivityEnvironment().run(records.commit_outcome, dirty)
    assert receipt.kind == "committed"
    row = await upkeep.row(task_id)
    assert (row.status, row.error_code) == (Status.FAILED, "internal")
    assert row.result is not None
    assert row.result["text"] == "kept"
    await upkeep.client.get_workflow_handle(task_id).terminate()
