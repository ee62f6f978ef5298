"""What operators use: models, queues, pausing, usage, payloads, probes, metrics, audit and access lines."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from temporalio.api.common.v1 import Payload

from perdure.codec import Codec
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.settings import ApiSettings
from perdure.store import Store, make_engine
from perdure.store.rows import WorkerReport
from perdure.task.states import Status
from tests.integration.api.harness import LATER, SIMULATED, Api, finish, move, running_app

KEY = base64.b64encode(b"k" * 32).decode()


async def _workers(api: Api) -> None:
    await api.store.workers.report(
        [
            WorkerReport("gpu@a", "local", ("chat", "simulated"), slots=2, in_use=1),
            WorkerReport("gpu@b", "local", ("chat",), slots=4, in_use=1, draining=True),
        ]
    )


# Models and queues ---------------------------------------------------------------------------------
async def test_models_say_who_serves_them(api: Api) -> None:
    await _workers(api)
    models = {one["model_id"]: one for one in (await api.client.get("/v1/models")).json()["data"]}
    assert set(models) == {"chat", "small", "simulated", "narrow:1"}
    assert (models["chat"]["state"], models["chat"]["workers"], models["chat"]["pool"]) == ("ok", 1, "local")
    assert (models["small"]["state"], models["small"]["workers"]) == ("no_worker", 0)
    assert models["small"]["limits"]["max_tokens"] == 100
    assert "base_url" not in json.dumps(models)


async def test_queues_count_rows(api: Api) -> None:
    await _workers(api)
    for priority in ("LOW", "LOW", "HIGH"):
        await api.submit(priority=priority)
    await api.submit(not_before=LATER)
    running = await api.submit()
    await move(api.store, running["task_id"], Status.PROCESSING, 2)
    pools = {one["pool"]: one for one in (await api.client.get("/v1/queues")).json()["data"]}
    local = pools["local"]
    assert (local["waiting"], local["running"], local["slots"], local["slots_in_use"]) == (3, 1, 2, 2)
    assert [local["classes"][name]["waiting"] for name in ("HIGH", "NORMAL", "LOW")] == [1, 0, 2]
    assert local["classes"]["NORMAL"]["scheduled"] == 1
    assert local["oldest_wait_seconds"] >= 0
    assert [worker["worker"] for worker in local["workers"]] == ["gpu@a", "gpu@b"]
    assert pools["narrow"]["classes"]["LOW"]["max_waiting"] == 2
    assert (pools["narrow"]["waiting"], pools["narrow"]["scheduling"]) == (0, "strict")


async def test_pausing_and_resuming(api: Api) -> None:
    for url, kind, name in (
        ("/v1/queues/local", "pool", "local"),
        ("/v1/models/narrow:1", "model", "narrow:1"),
    ):
        paused = await api.client.post(f"{url}/pause", json={"reason": "maintenance"})
        assert paused.status_code == 200, paused.text
        assert {**paused.json(), "paused": None} == {"kind": kind, "name": name, "paused": None}
        assert paused.json()["paused"]["reason"] == "maintenance"
        assert paused.json()["paused"]["paused_by"] == "dev"
    models = {one["model_id"]: one["state"] for one in (await api.client.get("/v1/models")).json()["data"]}
    assert models == dict.fromkeys(models, "paused")
    pools = {one["pool"]: one["paused"] for one in (await api.client.get("/v1/queues")).json()["data"]}
    assert pools["local"]["reason"] == "maintenance"
    assert pools["narrow"] is None
    task = await api.submit()
    await asyncio.sleep(0.3)  # time enough for a dispatcher that would not know of the pause
    assert (await api.store.tasks.by_id_any(task["task_id"])).claimed_at is None  # type: ignore[union-attr]
    for _ in range(2):
        for url in ("/v1/queues/local", "/v1/models/narrow:1"):
            resumed = await api.client.post(f"{url}/resume")
            assert (resumed.status_code, resumed.json()["paused"]) == (200, None)
    for url in ("/v1/queues/none/pause", "/v1/models/none/resume", "/v1/models/org%2Fname/pause"):
        assert (await api.client.post(url)).status_code == 404


# Usage ---------------------------------------------------------------------------------------------
async def test_usage_by_user_model_and_day(keyed: Api) -> None:
    bob = await keyed.key("bob")
    for headers in ({}, {}, bob):
        task = await keyed.submit(headers)
        await finish(keyed.store, task["task_id"])
    (mine,) = (await keyed.client.get("/v1/usage")).json()["data"]
    assert (mine["user_id"], mine["model_id"], mine["tasks"], mine["attempts"]) == (
        "alice",
        "simulated",
        2,
        2,
    )
    assert [mine[name] for name in ("prompt_tokens", "completion_tokens", "discarded_tokens")] == [20, 4, 2]
    root = await keyed.key("root", ["admin"])
    all_users = (await keyed.client.get("/v1/usage", headers=root)).json()["data"]
    assert [line["user_id"] for line in all_users] == ["alice", "bob"]
    day = mine["day"]
    one_day = await keyed.client.get(f"/v1/usage?since={day}&until={day}T10:00:00Z&model_id=simulated")
    assert one_day.json()["data"] == [mine]
    assert (await keyed.client.get("/v1/usage?until=2020-01-01")).json()["data"] == []
    for query in ("since=2026-12-02&until=2026-12-01", "since=2020-01-01", "until=9999-12-31", "until=x"):
        assert (await keyed.client.get(f"/v1/usage?{query}")).status_code == 422, query


# Payloads ------------------------------------------------------------------------------------------
async def test_the_temporal_ui_reads_payloads(settings: ApiSettings, store: Store) -> None:
    ui = settings.model_copy(
        update={"payload_key": SecretStr(KEY), "temporal_ui_url": "http://127.0.0.1:8233/namespaces"}
    )
    plain = Payload(metadata={"encoding": b"json/plain"}, data=b'"' + b"x" * 9000 + b'"')
    (sealed,) = await Codec([b"k" * 32]).encode([plain])
    (foreign,) = await Codec([b"f" * 32]).encode([plain])

    def as_json(payload: Payload) -> dict[str, Any]:
        metadata = {key: base64.b64encode(value).decode() for key, value in payload.metadata.items()}
        return {"metadata": metadata, "data": base64.b64encode(payload.data).decode()}

    async with running_app(ui, store) as one:
        origin = {"Origin": "http://127.0.0.1:8233", "X-Namespace": "default"}
        body = {"payloads": [as_json(sealed), as_json(plain)]}
        reply = await one.client.post("/codec/decode", json=body, headers=origin)
        assert reply.status_code == 200, reply.text
        assert reply.json()["payloads"] == [as_json(plain)] * 2
        assert reply.headers["Access-Control-Allow-Origin"] == origin["Origin"]
        first = await one.client.options("/codec/decode", headers=origin)
        assert "POST" in first.headers["Access-Control-Allow-Methods"]
        stranger = await one.client.options("/codec/decode", headers={"Origin": "http://evil.test"})
        assert "Access-Control-Allow-Origin" not in stranger.headers
        for bad in (as_json(foreign), {"metadata": 5}, {"nonsense": 1}):
            refused = await one.client.post("/codec/decode", json={"payloads": [bad]})
            assert refused.status_code == 422, refused.text


# Probes --------------------------------------------------------------------------------------------
async def test_ready_while_temporal_is_down(api: Api) -> None:
    await _workers(api)
    reply = await api.client.get("/readyz")
    assert reply.status_code == 200, reply.text
    assert reply.json() == {
        "status": "ready",
        "postgres": "ok",
        "schema": "ok",
        "temporal": "unavailable",
        "models": {"chat": "ok", "small": "no_worker", "simulated": "ok", "narrow:1": "no_worker"},
        "stopping": False,
    }
    assert (await api.client.get("/healthz")).json() == {"status": "ok"}


async def test_a_stopping_process_is_not_ready(api: Api) -> None:
    api.resources.drain.set()
    reply = await api.client.get("/readyz")
    assert (reply.status_code, reply.json()["stopping"]) == (503, True)
    assert (await api.client.get("/healthz")).status_code == 200


async def test_an_outage_of_postgres_and_its_end(
    settings: ApiSettings, own_postgres: EmbeddedPostgres
) -> None:
    here = settings.model_copy(update={"database_url": SecretStr(own_postgres.dsn)})
    store = Store(make_engine(own_postgres.dsn, pool_size=2, application_name="perdure-test"))
    async with running_app(here, store) as one:
        task = await one.submit({"Idempotency-Key": "k"})
        await asyncio.to_thread(own_postgres.stop)
        await asyncio.sleep(2.1)  # what /readyz saw last is too old now
        for method, path in (("POST", "/v1/tasks"), ("GET", "/v1/tasks"), ("GET", task["links"]["self"])):
            started = time.monotonic()
            reply = await one.client.request(method, path, json=SIMULATED if method == "POST" else None)
            assert (reply.status_code, reply.json()["code"]) == (503, "store-unavailable"), reply.text
            assert int(reply.headers["Retry-After"]) >= 1
            assert time.monotonic() - started < 10
        assert (await one.client.get("/healthz")).status_code == 200
        unready = await one.client.get("/readyz")
        assert (unready.status_code, unready.json()["postgres"]) == (503, "unavailable")
        page = await one.client.get("/metrics")
        assert (page.status_code, "perdure_stats_up 0.0" in page.text) == (200, True)
        await asyncio.to_thread(own_postgres.start)
        await eventually(one, "/v1/tasks")
        again = await one.client.post("/v1/tasks", json=SIMULATED, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["task_id"]) == (202, task["task_id"])
    await store.aclose()


async def test_a_kept_task_is_told_also_when_it_cannot_be_read_again(
    settings: ApiSettings, own_postgres: EmbeddedPostgres, store: Store
) -> None:
    here = settings.model_copy(update={"database_url": SecretStr(own_postgres.dsn)})
    async with running_app(here, store) as one:
        sending = asyncio.create_task(
            one.client.post("/v1/tasks", json=SIMULATED, headers={"Prefer": "wait=3"})
        )
        async with asyncio.timeout(10):
            while not (await one.client.get("/v1/tasks")).json()["data"]:  # noqa: ASYNC110 - a row, not an event
                await asyncio.sleep(0.02)
        await asyncio.to_thread(own_postgres.stop)
        reply = await sending
        assert (reply.status_code, reply.json()["status"]) == (202, "PENDING"), reply.text
        assert reply.json()["params"] == {}


async def eventually(api: Api, path: str) -> None:
    """Asks until the answer is 200."""
    async with asyncio.timeout(30):
        while (await api.client.get(path)).status_code != 200:  # noqa: ASYNC110 - the server is asked, not an event
            await asyncio.sleep(0.1)


async def test_an_empty_database_is_not_ready(settings: ApiSettings, migrated_url: str) -> None:
    empty = migrated_url.rpartition("/")[0] + "/template1"
    nowhere = settings.model_copy(update={"database_url": SecretStr(empty)})
    store = Store(make_engine(empty, pool_size=1, application_name="perdure-test"))
    async with running_app(nowhere, store) as one:
        reply = await one.client.get("/readyz")
        assert reply.status_code == 503
        assert "perdure migrate" in reply.json()["schema"]
    await store.aclose()


# Metrics and lines ---------------------------------------------------------------------------------
async def test_requests_and_tasks_are_counted(api: Api) -> None:
    await api.submit(priority="HIGH", task_type="document")
    await api.submit(task_type="whatever-a-caller-says")
    await api.client.get("/v1/tasks/nonsense")
    await api.client.get("/nowhere")
    text = (await api.client.get("/metrics")).text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[(name, tuple(sorted(labels.items())))]

    assert value("perdure_tasks_submitted_total", priority="HIGH", task_type="document") == 1
    assert value("perdure_tasks_submitted_total", priority="NORMAL", task_type="other") == 1
    assert value("perdure_tasks", status="PENDING") == 2
    count = "perdure_http_requests_total"
    assert value(count, method="POST", route="/v1/tasks", status="2xx") == 2
    assert value(count, method="GET", route="/v1/tasks/{task_id}", status="4xx") == 1
    assert value(count, method="GET", route="unmatched", status="4xx") == 1
    assert "nonsense" not in text
    assert "whatever" not in text


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG)
    return caplog


async def test_who_did_what_is_in_the_audit_lines(keyed: Api, lines: pytest.LogCaptureFixture) -> None:
    task = await keyed.submit(not_before=LATER)
    await keyed.client.post(f"/v1/tasks/{task['task_id']}/rerun")
    await keyed.client.patch(task["links"]["self"], json={"priority": "LOW"})
    await keyed.client.post(task["links"]["cancel"])
    await keyed.client.post(task["links"]["cancel"])  # changes nothing, says nothing
    await keyed.client.delete(task["links"]["self"])
    root = await keyed.key("root", ["admin"])
    await keyed.client.post("/v1/queues/local/pause", headers=root)
    audit = [record.__dict__ for record in lines.records if record.name == "perdure.audit"]
    assert [(one["what"], one["who"]) for one in audit] == [
        ("task created", "alice"),
        ("task rerun", "alice"),
        ("task priority changed", "alice"),
        ("task cancelled", "alice"),
        ("task deleted", "alice"),
        ("pool paused", "root"),
    ]
    assert audit[0]["task_id"] == audit[3]["task_id"] == task["task_id"]
    assert all(one["key_id"] for one in audit)


async def test_access_lines_hold_no_path_and_no_query(api: Api, lines: pytest.LogCaptureFixture) -> None:
    await api.client.get("/v1/tasks?cursor=canary-query")
    await api.client.get("/v1/tasks/canary-path")
    access = [record for record in lines.records if record.name == "perdure.access"]
    assert [(one.__dict__["route"], one.__dict__["status"]) for one in access] == [
        ("/v1/tasks", 400),
        ("/v1/tasks/{task_id}", 404),
    ]
    assert "canary" not in str([record.__dict__ for record in access])
