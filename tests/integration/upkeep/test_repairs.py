"""What stands in a reconciler's way holds up that one row and nothing else."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio.client import Client, Interceptor, OutboundInterceptor, StartWorkflowInput, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from activities import maintenance
from perdure import names
from perdure.codec import Codec
from perdure.contracts import Outcome, Projection, TaskResult, Usage
from perdure.task.states import Status
from tests.integration.upkeep.conftest import Upkeep
from tests.support.tasks import ANN, submit


class Broken(Interceptor, OutboundInterceptor):
    """A Temporal that answers some calls with an error, as long as `broken` says so."""

    def __init__(self, *calls: str) -> None:
        self.broken = set(calls)

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        OutboundInterceptor.__init__(self, next)
        return self

    def _refuse(self, call: str) -> None:
        if call in self.broken:
            raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    async def start_workflow(self, input: StartWorkflowInput) -> WorkflowHandle[Any, Any]:
        self._refuse("start")
        return await super().start_workflow(input)

    def list_workflows(self, input: Any) -> Any:
        self._refuse("list")
        return super().list_workflows(input)


def through(upkeep: Upkeep, broken: Broken) -> Client:
    config = upkeep.client.config()
    return Client(**(config | {"interceptors": [broken]}))


async def one_pass(activities: maintenance.MaintenanceActivities) -> int:
    repaired = await ActivityEnvironment().run(activities.reconcile)
    assert isinstance(repaired, int)
    return repaired


async def test_a_payload_of_another_key_holds_up_its_own_row_only(upkeep: Upkeep) -> None:
    """The first lost commit stands in a history that this process cannot read."""
    sealed = await upkeep.queued()
    async with upkeep.workers():
        await upkeep.client.get_workflow_handle(sealed).result()
    await upkeep.reopen(sealed)
    keyless = dataclasses.replace(upkeep.client.data_converter, payload_codec=_Unreadable())
    blind = upkeep.reconciler(Client(**(upkeep.client.config() | {"data_converter": keyless})))
    lost = await upkeep.lost()
    await upkeep.sql("UPDATE tasks SET missing_since = now() - interval '2 minutes' WHERE task_id = $1", lost)
    assert await one_pass(blind) == 1
    assert upkeep.repairs("restarted") == 1
    assert (await upkeep.row(sealed)).status is Status.QUEUED  # it waits for the key
    await upkeep.settles(sealed, Status.COMPLETED)
    await upkeep.client.get_workflow_handle(lost).terminate()


class _Unreadable(Codec):
    async def decode(self, payloads: Any) -> Any:
        raise ValueError("another key")


async def test_cancels_are_delivered_while_visibility_is_away(upkeep: Upkeep) -> None:
    task_id = await upkeep.queued()
    await upkeep.store.tasks.request_cancel(ANN, task_id, "stop")
    await upkeep.sql(
        "UPDATE tasks SET cancel_signalled_at = now() - interval '6 seconds', "
        "updated_at = now() - interval '6 seconds'"
    )
    assert await one_pass(upkeep.reconciler(through(upkeep, Broken("list")))) == 1
    async with upkeep.workers_without_gpu():
        await upkeep.settles(task_id, Status.CANCELLED)


async def test_a_restart_that_temporal_did_not_take_is_tried_again(upkeep: Upkeep) -> None:
    task_id = await upkeep.lost()
    broken = Broken("start")
    activities = upkeep.reconciler(through(upkeep, broken))
    for _ in range(4):
        assert await one_pass(activities) == 0
    row = await upkeep.row(task_id)
    assert (row.status, row.restarts) == (Status.QUEUED, 0)
    broken.broken.clear()
    async with upkeep.workers():
        await upkeep.settles(task_id, Status.COMPLETED)
    assert upkeep.repairs("restarted") == 1


async def test_a_task_that_the_engine_loses_twice_is_failed(upkeep: Upkeep) -> None:
    task_id = await upkeep.lost(callback_url="https://example.com/hook")
    await upkeep.sql("UPDATE tasks SET restarts = 1 WHERE task_id = $1", task_id)
    row = await upkeep.settles(task_id, Status.FAILED)
    assert row.error_code == "internal"
    assert "lost this task twice" in (row.error_message or "")
    deliveries = await upkeep.store.deliveries.list_for_task(ANN, task_id)
    assert [d.event for d in deliveries or ()] == ["FAILED"]


async def test_a_lost_task_whose_model_is_gone_is_failed(upkeep: Upkeep) -> None:
    task_id = await upkeep.lost(model_id="gone")
    assert (await upkeep.settles(task_id, Status.FAILED)).error_code == "model_unknown"


async def test_a_lost_task_that_was_cancelled_is_cancelled(upkeep: Upkeep) -> None:
    task_id = await upkeep.lost()
    await upkeep.store.tasks.request_cancel(ANN, task_id, "stop")
    async with upkeep.workers():
        row = await upkeep.settles(task_id, Status.CANCELLED)
    assert upkeep.world.given == []  # no attempt was made for it
    assert row.cancel_reason == "stop"


async def test_a_callback_of_a_repaired_commit_is_due_at_once(upkeep: Upkeep) -> None:
    """No workflow makes its quick tries, so the sweep need not wait for them."""
    task_id = await upkeep.queued(callback_url="https://example.com/hook")
    sender = Worker(upkeep.client, task_queue=names.CALLBACKS_QUEUE, activities=[upkeep.world.deliver()])
    async with upkeep.workers(), sender:
        await upkeep.client.get_workflow_handle(task_id).result()
    assert await upkeep.store.deliveries.claim_due(5, 40) == []
    await upkeep.reopen(task_id)
    await upkeep.settles(task_id, Status.COMPLETED)
    (claim,) = await upkeep.store.deliveries.claim_due(5, 40)
    deliveries = await upkeep.store.deliveries.list_for_task(ANN, task_id)
    assert [d.delivery_id for d in deliveries or ()] == [claim.delivery_id]


async def test_more_closed_runs_than_one_page(upkeep: Upkeep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_PAGE", 2)
    ids = [await upkeep.queued() for _ in range(5)]
    for task_id in ids:
        await upkeep.client.get_workflow_handle(task_id).terminate()
    for task_id in ids:
        await upkeep.settles(task_id, Status.FAILED)
    mark = await upkeep.store.maintenance.mark("visibility")
    assert mark is not None
    assert (datetime.now(UTC) - mark).total_seconds() < 60


async def test_a_row_that_does_not_move_is_signalled_ever_more_rarely(upkeep: Upkeep) -> None:
    """No worker runs: nobody reads the signals, and each is an event in its history."""
    task_id = await upkeep.queued()
    await upkeep.store.tasks.request_cancel(ANN, task_id, "stop")
    signals, minutes = 0, 20
    for _ in range(minutes * 12):  # a pass every 5 s
        await upkeep.sql(
            "UPDATE tasks SET updated_at = updated_at - interval '5 s', "
            "cancel_signalled_at = cancel_signalled_at - interval '5 s'"
        )
        signals += len(await upkeep.store.maintenance.cancels_due(5))
    assert 5 < signals < 20
    await upkeep.client.get_workflow_handle(task_id).terminate()


async def test_an_outcome_that_cannot_be_stored_even_when_clean_still_ends_the_task(upkeep: Upkeep) -> None:
    task_id = await submit(upkeep.store)
    outcome = Outcome(
        projection=Projection(
            task_id=task_id, version=3, status=Status.COMPLETED, usage=Usage(completion_tokens=10**20)
        ),
        result=TaskResult(text="kept if it can be"),
        completed_at=datetime.now(UTC),
    )
    receipt = await ActivityEnvironment().run(upkeep.records.commit_outcome, outcome)
    assert receipt.kind == "committed"
    row = await upkeep.row(task_id)
    assert (row.status, row.error_code) == (Status.FAILED, "internal")
    assert row.usage.completion_tokens is None
