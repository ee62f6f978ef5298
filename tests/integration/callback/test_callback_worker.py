"""The callbacks worker under a real Temporal server: quick tries, their delays, and the sweep."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.callbacks import CallbackActivities
from perdure import names
from perdure.callback.deliver import Deliverer
from perdure.contracts import DeliverInput
from perdure.store.engine import Store
from tests.integration.callback.harness import Travel, committed, delivery
from tests.support.receiver import Receiver, answer
from workers.callbacks import callbacks_worker
from workflows.maintenance import CallbackSweep


@workflow.defn(name="OnlyDeliver")
class OnlyDeliver:
    """The delivery of a task, without the task."""

    @workflow.run
    async def run(self, given: DeliverInput) -> str:
        kind: str = await workflow.execute_activity(
            names.ACT_DELIVER_CALLBACK,
            given,
            task_queue=names.CALLBACKS_QUEUE,
            result_type=str,
            start_to_close_timeout=timedelta(seconds=45),
            schedule_to_close_timeout=timedelta(seconds=120),
            retry_policy=RetryPolicy(maximum_attempts=5),
        )
        return kind


async def test_temporal_drives_the_quick_tries(
    store: Store, deliverer: Deliverer, temporal_client: Client
) -> None:
    async with (
        Receiver([answer(500), answer(429, headers={"Retry-After": "2"}), answer(200)]) as receiver,
        callbacks_worker(temporal_client, CallbackActivities(deliverer)),
        Worker(
            temporal_client,
            task_queue="callback-test",
            workflows=[OnlyDeliver],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ),
    ):
        task_id, delivery_id = await committed(store, receiver.url())
        result = await temporal_client.execute_workflow(
            OnlyDeliver.run,
            DeliverInput(task_id=task_id, delivery_id=delivery_id),
            id=f"deliver-{task_id}",
            task_queue="callback-test",
        )
        assert result == "delivered"
        one, two, three = receiver.requests
    assert 0.75 <= two.at - one.at < 10  # a second, less a fifth
    assert 1.95 <= three.at - two.at < 12  # what the receiver asked for; two, less a fifth, would be sooner
    assert {one["webhook-id"], two["webhook-id"], three["webhook-id"]} == {delivery_id}
    assert [t.status for t in (await delivery(store, task_id)).tries] == [500, 429, 200]


async def test_what_the_quick_tries_leave_the_scheduled_sweep_takes(
    store: Store, deliverer: Deliverer, temporal_client: Client, travel: Travel
) -> None:
    async with (
        Receiver([answer(503, headers={"Retry-After": "3600"}), answer(200)]) as receiver,
        callbacks_worker(temporal_client, CallbackActivities(deliverer)),
        Worker(
            temporal_client,
            task_queue="callback-test",
            workflows=[OnlyDeliver, CallbackSweep],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ),
    ):
        task_id, delivery_id = await committed(store, receiver.url())
        result = await temporal_client.execute_workflow(
            OnlyDeliver.run,
            DeliverInput(task_id=task_id, delivery_id=delivery_id),
            id=f"deliver-{task_id}",
            task_queue="callback-test",
        )
        assert result == "left"
        for seconds, requests in ((3_500, 1), (101, 2)):
            await travel(seconds)
            await asyncio.wait_for(
                temporal_client.execute_workflow(
                    CallbackSweep.run, id=f"sweep-{task_id}-{seconds}", task_queue="callback-test"
                ),
                60,
            )
            await receiver.received(requests)
            await deliverer.settled()
            assert len(receiver.requests) == requests
    assert (await delivery(store, task_id)).state == "DELIVERED"
