"""The schedules of upkeep are there, whatever Temporal was restored from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from perdure import names
from perdure.embedded.temporal import EmbeddedTemporal
from tests.support.waiting import until
from workers.schedules import SCHEDULES, keep_schedules


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """Of a server of the test's own: schedules start workflows."""
    server = EmbeddedTemporal(tmp_path)
    await asyncio.to_thread(server.start)
    try:
        yield await Client.connect(server.address)
    finally:
        await asyncio.to_thread(server.stop, 5)


async def test_a_schedule_that_temporal_lost_is_made_again_and_a_pause_stays(client: Client) -> None:
    keeping = asyncio.create_task(keep_schedules(client, look_seconds=0.2))
    try:
        await until(lambda: there(client, *SCHEDULES))
        sweep = client.get_schedule_handle(names.SCHEDULE_CALLBACK_SWEEP)
        await sweep.pause(note="an operator's")
        await client.get_schedule_handle(names.SCHEDULE_RECONCILE).delete()
        await until(lambda: there(client, names.SCHEDULE_RECONCILE))
        assert (await sweep.describe()).schedule.state.paused
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    policy = (await client.get_schedule_handle(names.SCHEDULE_RECONCILE).describe()).schedule.policy
    assert policy.overlap.name == "SKIP"


async def there(client: Client, *ids: str) -> bool:
    try:
        for one in ids:
            await client.get_schedule_handle(one).describe()
    except RPCError:
        return False
    return True
