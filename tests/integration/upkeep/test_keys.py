"""A worker without the right PERDURE_PAYLOAD_KEY: the task ends, or waits for the key, and nothing spins."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Worker

from perdure import names
from perdure.codec import Codec
from perdure.task.states import Status
from tests.integration.upkeep.conftest import Upkeep
from tests.support.waiting import until


@pytest.fixture
async def temporal_client(temporal_address: str) -> Client:
    return await with_key(temporal_address, b"r" * 32)


async def with_key(address: str, key: bytes) -> Client:
    converter = dataclasses.replace(pydantic_data_converter, payload_codec=Codec([key]))
    return await Client.connect(address, data_converter=converter)


async def test_a_gpu_worker_with_another_key_fails_the_attempt(upkeep: Upkeep, temporal_address: str) -> None:
    task_id = await upkeep.queued(max_retries=1)
    stranger = await with_key(temporal_address, b"w" * 32)
    gpu = Worker(stranger, task_queue=names.pool_queue("p"), activities=[upkeep.world.generate()])
    async with upkeep.workers_without_gpu(), gpu:
        row = await upkeep.settles(task_id, Status.FAILED)
    assert row.error_code == "internal"
    assert "PERDURE_PAYLOAD_KEY" in (row.error_message or ""), row.error_message
    assert [a.outcome for a in row.attempts] == ["failed", "failed"], "retries are bounded as for any fault"
    assert upkeep.world.given == []


async def test_a_control_worker_with_another_key_waits_for_it(upkeep: Upkeep, temporal_address: str) -> None:
    """Its workflow tasks fail and back off. Temporal shows the reason; with the key the task goes on."""
    task_id = await upkeep.queued()
    blind = Upkeep(upkeep.store, await with_key(temporal_address, b"w" * 32))
    handle = upkeep.client.get_workflow_handle(task_id)

    async def tries() -> int:
        return (await handle.describe()).raw_description.pending_workflow_task.attempt

    async def failing() -> bool:
        return await tries() >= 2

    async with blind.workers_without_gpu():
        await until(failing)
        began, since = await tries(), datetime.now(UTC)
        await asyncio.sleep(2.0)
        assert await tries() - began <= 3, "it backs off"
        described = await handle.describe()
        assert described.history_length < 10
        assert await blind.pass_() == 0, "the reconciler leaves a running task alone"
        stuck = blind.metrics.registry.get_sample_value("perdure_workflows_stuck_total")
        assert stuck == 1, "and somebody is told"
    assert (await upkeep.row(task_id)).status is Status.QUEUED
    async with upkeep.workers():
        row = await upkeep.settles(task_id, Status.COMPLETED)
    assert row.result is not None
    assert (datetime.now(UTC) - since).total_seconds() < 60
