"""The reconciler: rows and runs that disagree converge, whichever of the two was lost."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from temporalio.testing import ActivityEnvironment

from perdure.contracts import CommitReceipt, Outcome, Projection, TaskResult
from perdure.store.rows import TaskRow
from perdure.task.states import Status
from tests.integration.upkeep.conftest import Upkeep
from tests.support.tasks import ANN
from tests.support.waiting import until


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


async def test_a_commit_that_postgres_lost_is_made_again(upkeep: Upkeep) -> None:
    """The run completed, the row is open: as after a restore of Postgres."""
    task_id = await upkeep.queued()
    async with upkeep.workers():
        await upkeep.client.get_workflow_handle(task_id).result()
    assert (await upkeep.row(task_id)).status is Status.COMPLETED
    await upkeep.reopen(task_id)
    row = await upkeep.settles(task_id, Status.COMPLETED)
    assert row.result is not None
    assert row.result["text"] == "done"
    assert upkeep.repairs("committed") == 1


async def test_a_workflow_that_the_engine_lost_is_started_once_more(upkeep: Upkeep) -> None:
    task_id = await upkeep.lost()
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
    late = Outcome(
        projection=Projection(task_id=task_id, version=9, status=Status.COMPLETED, progress=100),
        completed_at=datetime.now(UTC),
    )
    receipt: CommitReceipt = await ActivityEnvironment().run(upkeep.records.commit_outcome, late)
    assert receipt.kind == "superseded"
    gone = late.model_copy(update={"projection": late.projection.model_copy(update={"task_id": "task_x"})})
    assert (await ActivityEnvironment().run(upkeep.records.commit_outcome, gone)).kind == "missing"
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
    dirty = Outcome(
        projection=Projection(
            task_id=task_id, version=3, status=Status.FAILED, error_code="internal", error_message="a\x00b"
        ),
        result=TaskResult(text="kept"),
        completed_at=datetime.now(UTC),
    )
    receipt = await ActivityEnvironment().run(upkeep.records.commit_outcome, dirty)
    assert receipt.kind == "committed"
    row = await upkeep.row(task_id)
    assert (row.status, row.error_code) == (Status.FAILED, "internal")
    assert row.result is not None
    assert row.result["text"] == "kept"
    await upkeep.client.get_workflow_handle(task_id).terminate()
