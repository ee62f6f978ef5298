"""Pools as operators see them: real control and GPU workers in processes of their own, before a real API."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from perdure.settings import ApiSettings
from perdure.store import Store
from tests.integration.api.harness import Api, running_app
from tests.support.waiting import until

COMMAND = [sys.executable, "-P", "-m", "perdure", "worker"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "TEMPORAL_"))}
MODELS = """
[pools.{a}]
slots = 3
[pools.{b}]
slots = 2
[models.m]
pool = "{a}"
executor = "simulated"
[models.second]
pool = "{a}"
executor = "simulated"
[models.dead]
pool = "{a}"
base_url = "http://127.0.0.1:9/v1"
[models.keyless]
pool = "{a}"
base_url = "http://127.0.0.1:9/v1"
api_key_env = "NO_SUCH_KEY"
[models.other]
pool = "{b}"
executor = "simulated"
"""
LATE = """
[models.late]
pool = "{b}"
executor = "simulated"
"""


class Plant:
    """Processes on one database and one engine. `a` and `b` are pools; `late` is a model of b that only newer
    workers have."""

    def __init__(self, root: Path, temporal: str, database_url: str) -> None:
        self.a, self.b = (f"{name}-{uuid.uuid4().hex[:8]}" for name in "ab")
        self.root, self.database_url = root, database_url
        self.env = {**CLEAN, "TEMPORAL_ADDRESS": temporal, "PERDURE_DRAIN_SECONDS": "0"}
        self.models, self.old = root / "models.toml", root / "old.toml"
        self.old.write_text(MODELS.format(a=self.a, b=self.b))
        self.models.write_text((MODELS + LATE).format(a=self.a, b=self.b))
        self.processes: list[subprocess.Popen[bytes]] = []

    def control(self) -> None:
        self._start("control", env={"PERDURE_DATABASE_URL": self.database_url})

    def gpu(self, pool: str, *more: str, models: Path | None = None) -> subprocess.Popen[bytes]:
        return self._start("gpu", "--pool", pool, *more, models=models)

    def _start(
        self, *words: str, env: dict[str, str] | None = None, models: Path | None = None
    ) -> subprocess.Popen[bytes]:
        whole = {**self.env, "PERDURE_MODELS": str(models or self.models), **(env or {})}
        with (self.root / "log").open("ab") as log:
            process = subprocess.Popen(
                [*COMMAND, *words], env=whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def started(plant: Plant) -> Iterator[Plant]:
    try:
        yield plant
    finally:
        plant.stop()


@pytest.fixture
def plant(tmp_path: Path, temporal_address: str, database_url: str) -> Iterator[Plant]:
    with started(Plant(tmp_path, temporal_address, database_url)) as one:
        yield one


@pytest.fixture
async def api(
    plant: Plant, store: Store, temporal_address: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Api]:
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal_address)
    settings = ApiSettings(
        database_url=SecretStr(plant.database_url), models=plant.models, auth="none", port=0, grace_seconds=5
    )
    async with running_app(settings, store) as one:
        yield one


async def models(api: Api) -> dict[str, Any]:
    return {one["model_id"]: one for one in (await api.client.get("/v1/models")).json()["data"]}


async def pool(api: Api, name: str) -> dict[str, Any]:
    pools = (await api.client.get("/v1/queues")).json()["data"]
    found: dict[str, Any] = next(one for one in pools if one["pool"] == name)
    return found


async def gauge(api: Api, name: str, **labels: str) -> float:
    page = (await api.client.get("/metrics")).text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"{name} {labels} is not on the page")


async def submit(api: Api, model: str) -> str:
    body = {"params": {"tokens": 0}} if model in ("m", "second", "other", "late") else CHAT
    return str((await api.submit(model_id=model, **body))["task_id"])


CHAT = {"params": {"messages": [{"role": "user", "content": "hi"}]}}


async def task(api: Api, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await api.client.get(f"/v1/tasks/{task_id}")).json()
    return found


async def test_pools_workers_models_and_breakers_are_seen(plant: Plant, api: Api) -> None:
    """One story, since its parts wait for the same heartbeats."""
    plant.control()
    plant.gpu(plant.a)
    plant.gpu(plant.a, "--slots", "5")
    only_b = plant.gpu(plant.b, models=plant.old)

    async def all_told() -> bool:
        seen = await models(api)
        told = {name: (one["state"], one["workers"]) for name, one in seen.items()}
        slots = ((await pool(api, plant.a))["slots"], (await pool(api, plant.b))["slots"])
        return slots == (8, 2) and told == {
            "m": ("ok", 2),
            "second": ("ok", 2),
            "dead": ("ok", 2),
            "keyless": ("no_worker", 0),
            "other": ("ok", 1),
            "late": ("no_worker", 0),
        }

    await until(all_told)
    await _what_is_served(api, plant)
    await _a_dead_server_opens_breakers(api)
    await _a_killed_worker_goes(api, plant, only_b)


async def _what_is_served(api: Api, plant: Plant) -> None:
    seen = await models(api)
    assert seen["m"]["breaker"] is None
    assert seen["dead"]["breaker"] == "closed"
    assert [one["breaker"]["state"] for one in seen["dead"]["serving"]] == ["closed"] * 2
    assert [one["error_code"] for one in seen["keyless"]["broken"]] == ["upstream_auth"] * 2
    assert sorted(one["slots"] for one in (await pool(api, plant.a))["workers"]) == [3, 5]
    done = [await submit(api, name) for name in ("m", "second", "other")]
    for task_id in done:
        await until(lambda task_id=task_id: _is(api, task_id, "COMPLETED"))
    broken = await submit(api, "keyless")
    await until(lambda: _is(api, broken, "FAILED"))
    assert (await task(api, broken))["error_code"] == "upstream_auth"
    late = await submit(api, "late")
    await until(lambda: _waits_for(api, late, "no_worker"))
    assert (await task(api, late))["status"] == "PENDING"
    await until(lambda: _shown(api, "late", waiting=1, workers=0))
    assert await gauge(api, "perdure_model_workers", model="m") == 2
    assert await gauge(api, "perdure_pool_slots", pool=plant.a, state="free") == 8


async def _a_dead_server_opens_breakers(api: Api) -> None:
    dead = [await submit(api, "dead") for _ in range(10)]

    async def opened() -> bool:
        serving = (await models(api))["dead"]["serving"]
        return all(one["breaker"]["state"] != "closed" for one in serving)

    await until(opened)
    seen = (await models(api))["dead"]
    assert seen["breaker"] in ("open", "half_open")
    assert all(one["breaker"]["refusals"] >= 3 for one in seen["serving"])
    assert all(one["breaker"]["since"].endswith("Z") for one in seen["serving"])
    await until(lambda: _gauge_is(api, "perdure_model_breakers_open", 2, model="dead"))
    for task_id in dead:
        await api.client.post(f"/v1/tasks/{task_id}/cancel")


async def _a_killed_worker_goes(api: Api, plant: Plant, only_b: subprocess.Popen[bytes]) -> None:
    only_b.send_signal(signal.SIGKILL)
    only_b.wait()
    killed = time.monotonic()
    waiting = await submit(api, "other")
    await until(lambda: _waits_for(api, waiting, "no_worker"))
    assert time.monotonic() - killed <= 30
    seen = await models(api)
    assert (seen["other"]["state"], seen["other"]["serving"]) == ("no_worker", [])
    assert (await pool(api, plant.b))["workers"] == []
    await until(lambda: _shown(api, "other", waiting=1, workers=0))
    assert await gauge(api, "perdure_pool_slots", pool=plant.b, state="free") == 0
    assert await gauge(api, "perdure_queue_depth", pool=plant.b, priority="NORMAL") >= 1
    plant.gpu(plant.b)
    await until(lambda: _is(api, waiting, "COMPLETED"))
    late = (await api.client.get("/v1/tasks?model_id=late")).json()["data"][0]["task_id"]
    await until(lambda: _is(api, late, "COMPLETED"))


async def _is(api: Api, task_id: str, status: str) -> bool:
    return bool((await task(api, task_id))["status"] == status)


async def _waits_for(api: Api, task_id: str, reason: str) -> bool:
    queue = (await task(api, task_id))["queue"]
    return bool(queue is not None and queue["reason"] == reason)


async def _shown(api: Api, model: str, *, waiting: int, workers: int) -> bool:
    return (
        await gauge(api, "perdure_model_waiting", model=model) == waiting
        and await gauge(api, "perdure_model_workers", model=model) == workers
    )


async def _gauge_is(api: Api, name: str, value: float, **labels: str) -> bool:
    return await gauge(api, name, **labels) == value
