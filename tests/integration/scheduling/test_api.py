"""What callers and operators do to what waits, through the API: bulk, change of class, cancel by filter, the
bound on what may wait."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from perdure.settings import ApiSettings
from perdure.task.states import Status
from tests.integration.api.harness import Api, running_app
from tests.integration.scheduling.floor import LOW, NORMAL, Bay, Floor
from tests.support.waiting import until


@dataclass
class Front:
    """The API before a floor. `bay` holds what it starts."""

    floor: Floor
    api: Api
    bay: Bay

    async def submit(self, **more: Any) -> str:
        task = await self.api.submit(model_id="m", **more)
        self._know(task)
        return str(task["task_id"])

    async def bulk(self, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reply = await self.api.client.post("/v1/tasks/bulk", json={"tasks": tasks})
        assert reply.status_code == 202, reply.text
        entries: list[dict[str, Any]] = reply.json()["tasks"]
        for task in entries:
            if "task_id" in task:
                self._know(task)
        return entries

    def _know(self, task: dict[str, Any]) -> None:
        self.floor.known[task["task_id"]] = (task["user_id"], task["priority"])


@pytest.fixture
async def front(
    floor: Floor,
    database_url: str,
    temporal_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Front]:
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal_address)
    models = tmp_path / "models.toml"
    models.write_text(
        f"[pools.{floor.pool}]\nslots = 1\nwindow = 6\nmax_waiting = {{ LOW = 504, NORMAL = 503 }}\n"
        f'[models.m]\npool = "{floor.pool}"\nexecutor = "simulated"\n'
    )
    settings = ApiSettings(
        database_url=SecretStr(database_url), models=models, auth="none", port=0, grace_seconds=5
    )
    bay = floor.bay()
    bay.hold()
    async with (
        running_app(settings, floor.store) as api,
        floor.running(floor.catalogue(), dispatchers=0),
        bay.worker(slots=1),
    ):
        yield Front(floor, api, bay)


async def test_bulk_is_quick_and_fair_and_the_bound_refuses_low_first(front: Front) -> None:
    """500 of ann's in one call; the next start is bob's, whose one task came after them."""
    one: dict[str, Any] = {"model_id": "m", "params": {}, "user_id": "ann", "priority": "NORMAL"}
    began = time.perf_counter()
    tasks = await front.bulk([one] * 500)
    took = time.perf_counter() - began
    assert len({task["task_id"] for task in tasks}) == 500
    assert took < 5, "measured: 0.15 s on an idle machine"
    await front.bay.started(1)
    bob = await front.submit(user_id="bob")

    async def refused(priority: str) -> dict[str, Any] | None:
        body = {**one, "priority": priority}
        reply = await front.api.client.post("/v1/tasks/bulk", json={"tasks": [body] * 6})
        problems = [entry for entry in reply.json()["tasks"] if "task_id" not in entry]
        for entry in reply.json()["tasks"]:
            if "task_id" in entry:
                front._know(entry)
        return problems[0] if problems else None

    low = await refused("LOW")
    assert low is not None
    assert (low["status"], low["code"], low["priority"]) == (429, "pool-full", "LOW")
    assert "tasks of LOW and better wait; the bound is 504" in low["detail"]
    normal = await refused("NORMAL")
    assert normal is not None
    assert normal["priority"] == "NORMAL"
    assert await refused("HIGH") is None
    await front.api.client.post("/v1/tasks/cancel", json={"priority": "HIGH"})
    for _ in range(8):
        front.bay.let_go(1)
        count = len(front.bay.starts)
        await front.bay.started(count + 1)
        if bob in front.bay.ids:
            break
    assert bob in front.bay.ids[:9], "behind the window that stood before it, at most"
    cancelled = await front.api.client.post("/v1/tasks/cancel", json={"user_id": "ann"})
    assert cancelled.status_code == 202
    assert cancelled.json()["cancelled"] >= 480


async def test_a_waiting_task_changes_its_class(front: Front) -> None:
    first = await front.submit(priority="HIGH")
    await front.bay.started(1)
    low = [await front.submit(priority=LOW) for _ in range(9)]
    await front.floor.in_engine(low[:6])
    normal = await front.submit(priority=NORMAL)
    await front.floor.in_engine([normal])
    queued, pending = low[4], low[8]
    for task_id, status in ((queued, Status.QUEUED), (pending, Status.PENDING)):
        assert (await front.floor.row(task_id)).status is status
        reply = await front.api.client.patch(f"/v1/tasks/{task_id}", json={"priority": "HIGH"})
        assert (reply.status_code, reply.json()["priority"]) == (200, "HIGH")
        await front.floor.in_engine([task_id])
    running = await front.api.client.patch(f"/v1/tasks/{first}", json={"priority": "LOW"})
    assert (running.status_code, running.json()["code"]) == (409, "task-not-waiting")
    front.bay.let_go()
    await front.bay.started(11)
    assert set(front.bay.ids[1:3]) == {queued, pending}
    assert front.bay.ids[3] == normal
    await until(lambda: _all_completed(front, 11))


async def _all_completed(front: Front, count: int) -> bool:
    return await front.floor.count(Status.COMPLETED) == count
