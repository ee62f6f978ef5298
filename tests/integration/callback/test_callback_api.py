"""The routes about callbacks, with keys, on a real table. Temporal is down: nothing here needs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks
from pydantic import SecretStr

from perdure.callback import verify
from perdure.callback.deliver import Deliverer
from perdure.callback.secrets import whsec
from perdure.settings import ApiSettings
from perdure.store.engine import Store
from tests.integration.api.harness import MODELS, Api, running_app
from tests.integration.callback.harness import SECRET, SECRET_KEY, Make, committed
from tests.support.receiver import HANG, Receiver, answer, head


@pytest.fixture(autouse=True)
def _temporal_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ApiSettings:
    models = tmp_path / "models.toml"
    models.write_text(MODELS)
    return ApiSettings(
        database_url=SecretStr(database_url),
        models=models,
        auth="keys",
        port=0,
        secret_key=SecretStr(SECRET_KEY),
        callback_allow_cidrs=["127.0.0.0/8"],
        callback_allow_http=True,
        callback_ports=[],
    )


@asynccontextmanager
async def opened(settings: ApiSettings, store: Store, **changes: Any) -> AsyncIterator[Api]:
    async with running_app(settings.model_copy(update=changes), store) as api:
        api.client.headers.update(await api.key("alice"))
        yield api


@pytest.fixture
async def api(settings: ApiSettings, store: Store) -> AsyncIterator[Api]:
    """As alice, with secrets per user."""
    async with opened(settings, store) as api:
        yield api


# Deliveries ----------------------------------------------------------------------------------------
async def test_the_log_shows_every_try(api: Api, store: Store, deliverer: Deliverer) -> None:
    async with Receiver([answer(503, b"not\nnow"), answer(200)]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url("/hook?token=hush"))
        await deliverer.attempt(delivery_id)
        await deliverer.attempt(delivery_id)
    reply = await api.client.get(f"/v1/tasks/{task_id}/callbacks")
    assert reply.status_code == 200
    (one,) = reply.json()["data"]
    assert (one["delivery_id"], one["event"], one["state"]) == (delivery_id, "COMPLETED", "DELIVERED")
    assert one["url"] == receiver.url("/hook?token=hush")
    assert one["next_try_at"] is None
    first, second = one["tries"]
    assert {"number", "at", "status", "duration_ms", "error"} <= set(first)
    assert (first["number"], first["status"], first["sample"]) == (1, 503, "not\\nnow")
    assert (second["number"], second["status"], second["error"]) == (2, 200, None)
    assert first["at"].endswith("Z")
    assert len(first["at"]) == len("2026-01-01T00:00:00.000000Z")

    task = await api.client.get(f"/v1/tasks/{task_id}")
    assert task.json()["links"]["callbacks"] == f"/v1/tasks/{task_id}/callbacks"


async def test_a_task_without_a_callback_has_an_empty_list(api: Api) -> None:
    task = await api.submit()
    reply = await api.client.get(f"/v1/tasks/{task['task_id']}/callbacks")
    assert (reply.status_code, reply.json()) == (200, {"data": []})


async def test_only_the_owner_sees_a_query_and_others_see_nothing(api: Api, store: Store) -> None:
    task_id, delivery_id = await committed(store, "https://receiver.example/hook?token=hush")
    bob, admin = await api.key("bob"), await api.key("root", ["tasks:read", "callbacks:write", "admin"])
    path = f"/v1/tasks/{task_id}/callbacks"
    assert "hush" in (await api.client.get(path)).text
    assert "hush" not in (seen := await api.client.get(path, headers=admin)).text
    assert seen.json()["data"][0]["url"] == "https://receiver.example/hook"
    for call in (
        api.client.get(path, headers=bob),
        api.client.post(f"{path}/{delivery_id}/redeliver", headers=bob),
        api.client.get("/v1/tasks/nonsense/callbacks"),
        api.client.post(f"{path}/nonsense/redeliver"),
        api.client.post(f"{path}/msg_{'0' * 32}/redeliver"),
        api.client.get(f"/v1/tasks/task_{'0' * 32}/callbacks"),
    ):
        reply = await call
        assert (reply.status_code, reply.json()["code"]) == (404, "task-not-found")


async def test_one_call_redelivers_one(api: Api, store: Store, deliverer: Deliverer) -> None:
    async with Receiver([answer(410), answer(200)]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        await deliverer.attempt(delivery_id)
        path = f"/v1/tasks/{task_id}/callbacks"
        assert (await api.client.get(path)).json()["data"][0]["state"] == "DEAD"
        reply = await api.client.post(f"{path}/{delivery_id}/redeliver")
        assert reply.status_code == 202
        assert (reply.json()["state"], reply.json()["delivery_id"]) == ("RETRYING", delivery_id)
        assert reply.json()["next_try_at"] is not None
        await deliverer.sweep()
        await deliverer.settled()
        assert len(receiver.requests) == 2
    assert (await api.client.get(path)).json()["data"][0]["state"] == "DELIVERED"


async def test_redelivery_while_a_try_is_in_flight_is_409(
    api: Api, store: Store, deliverer: Deliverer
) -> None:
    release = asyncio.Event()
    async with Receiver([[release, head(200)]]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        trying = asyncio.create_task(deliverer.attempt(delivery_id))
        await receiver.received(1)
        reply = await api.client.post(f"/v1/tasks/{task_id}/callbacks/{delivery_id}/redeliver")
        assert (reply.status_code, reply.json()["code"]) == (409, "delivery-in-flight")
        release.set()
        await trying


async def test_one_call_redelivers_all_since_a_time(api: Api, store: Store, deliverer: Deliverer) -> None:
    since = (datetime.now(UTC) - timedelta(minutes=5)).isoformat()
    async with Receiver([answer(410)]) as receiver:
        for _ in range(3):
            await deliverer.attempt((await committed(store, receiver.url()))[1])
        receiver.script = [answer(200)]
        after = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
        for body, queued in (
            ({"since": after}, 0),
            ({"since": since, "state": "DELIVERED"}, 0),
            ({"since": since, "origin": "http://other.example"}, 0),
            ({"since": since}, 3),
        ):
            reply = await api.client.post("/v1/callbacks/redeliver", json=body)
            assert (reply.status_code, reply.json()) == (202, {"queued": queued, "has_more": False})
        await deliverer.sweep()
        await deliverer.settled()
        assert len(receiver.requests) == 6


@pytest.mark.parametrize(
    "body", [{}, {"since": "yesterday"}, {"since": 5}, {"since": "2026-01-01T00:00:00Z", "state": "LOST"},
             {"since": "2026-01-01T00:00:00Z", "more": 1}],
)  # fmt: skip
async def test_redelivery_reads_its_body_strictly(api: Api, body: dict[str, Any]) -> None:
    reply = await api.client.post("/v1/callbacks/redeliver", json=body)
    assert (reply.status_code, reply.json()["code"]) == (422, "validation-failed")


async def test_a_suspended_receiver_is_shown_and_resumed(
    api: Api, store: Store, deliverer: Deliverer
) -> None:
    async with Receiver() as receiver:
        origin = receiver.url("")
        task_id, _ = await committed(store, receiver.url())
        await store.deliveries.suspend("alice", origin, "failing")
        (shown,) = (await api.client.get("/v1/callback-receivers")).json()["data"]
        assert (shown["origin"], shown["waiting"], shown["reason"]) == (origin, 1, "failing")
        path = f"/v1/tasks/{task_id}/callbacks"
        assert (await api.client.get(path)).json()["data"][0]["state"] == "SUSPENDED"
        bob = await api.key("bob")
        reply = await api.client.post("/v1/callback-receivers/resume", json={"origin": origin}, headers=bob)
        assert (reply.status_code, reply.json()["code"]) == (404, "receiver-not-suspended")
        reply = await api.client.post("/v1/callback-receivers/resume", json={"origin": origin})
        assert (reply.status_code, reply.json()) == (202, {"origin": origin, "queued": 1})
        await deliverer.sweep()
        await deliverer.settled()
        assert len(receiver.requests) == 1
    assert (await api.client.get(path)).json()["data"][0]["state"] == "DELIVERED"
    assert (await api.client.get("/v1/callback-receivers")).json() == {"data": []}


# A test event --------------------------------------------------------------------------------------
async def test_a_test_event_is_signed_and_says_how_it_went(api: Api) -> None:
    secret = (await api.client.post("/v1/callback-secret/rotate")).json()
    async with Receiver([answer(202, b"fine"), answer(500, b"oh")]) as receiver:
        reply = await api.client.post("/v1/callback-test", json={"url": receiver.url("/hook?a=b")})
        assert reply.status_code == 200
        told = reply.json()
        assert (told["delivered"], told["status"], told["sample"], told["error"]) == (True, 202, "fine", None)
        (request,) = receiver.requests
        assert (request.target, request["X-Callback-Event"]) == ("/hook?a=b", "TEST")
        assert request["webhook-id"] == told["delivery_id"]
        verify(request.body, request.header_map, secret["secret"])
        standardwebhooks.Webhook(secret["whsec"]).verify(request.body, request.header_map)
        body = {"callback_url": receiver.url()}  # as a submit spells it
        told = (await api.client.post("/v1/callback-test", json=body)).json()
        assert (told["delivered"], told["status"]) == (False, 500)


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/", "http://10.0.0.1/", "ftp://receiver.example/", "http://u:p@127.0.0.1/"]
)
async def test_a_test_event_goes_nowhere_that_callbacks_do_not(api: Api, url: str) -> None:
    reply = await api.client.post("/v1/callback-test", json={"url": url})
    assert (reply.status_code, reply.json()["code"]) == (422, "callback-url-rejected")
    assert reply.json()["errors"][0]["pointer"] == "/url"


async def test_test_events_of_one_user_are_few_at_once(api: Api) -> None:
    async with Receiver([[HANG]]) as receiver:
        sends = [
            asyncio.create_task(api.client.post("/v1/callback-test", json={"url": receiver.url()}))
            for _ in range(2)
        ]
        await receiver.received(2)
        reply = await api.client.post("/v1/callback-test", json={"url": receiver.url()})
        assert (reply.status_code, reply.json()["code"]) == (429, "too-many-tests")
        await receiver.stop()
        for reply in await asyncio.gather(*sends):
            assert (reply.status_code, reply.json()["delivered"]) == (200, False)


# Submits -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/x", "http://[fe80::1]/", "http://2130706433/", "file:///etc/passwd"]
)
async def test_a_submit_with_a_bad_callback_url_is_refused(api: Api, url: str) -> None:
    body = {"model_id": "simulated", "params": {}, "callback_url": url}
    reply = await api.client.post("/v1/tasks", json=body)
    assert (reply.status_code, reply.json()["code"]) == (422, "callback-url-rejected")


# Secrets -------------------------------------------------------------------------------------------
async def test_a_secret_is_shown_once_and_rotates_with_an_overlap(
    api: Api, store: Store, make_deliverer: Make
) -> None:
    shown = (await api.client.get("/v1/callback-secret")).json()
    assert shown == {"source": "unseen", "data": []}
    reply = await api.client.post("/v1/callback-secret/rotate")
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-store"
    old = reply.json()
    assert old["overlap_hours"] == 24
    assert old["whsec"] == whsec(old["secret"].encode())
    assert len(old["secret"]) == 43
    new = (await api.client.post("/v1/callback-secret/rotate", json={"overlap_hours": 1})).json()
    assert (new["overlap_hours"], new["secret"] != old["secret"]) == (1, True)

    reply = await api.client.get("/v1/callback-secret")
    listed = reply.json()
    assert listed["source"] == "user"
    assert [one["secret_id"] for one in listed["data"]] == [new["secret_id"], old["secret_id"]]
    assert [one["current"] for one in listed["data"]] == [True, False]
    assert all(0 <= one["age_seconds"] < 60 for one in listed["data"])
    for secret in (old, new):
        assert secret["secret"] not in reply.text
        assert secret["whsec"].removeprefix("whsec_") not in reply.text

    async with Receiver() as receiver:
        await make_deliverer(fixed=False).attempt((await committed(store, receiver.url()))[1])
        (request,) = receiver.requests
    for secret in (old, new):
        standardwebhooks.Webhook(secret["whsec"]).verify(request.body, request.header_map)


async def test_secrets_are_the_users_own(api: Api) -> None:
    await api.client.post("/v1/callback-secret/rotate")
    reply = await api.client.get("/v1/callback-secret", headers=await api.key("bob"))
    assert reply.json() == {"source": "unseen", "data": []}


async def test_no_more_than_five_secrets_are_valid_at_once(api: Api) -> None:
    for _ in range(5):
        assert (await api.client.post("/v1/callback-secret/rotate")).status_code == 200
    reply = await api.client.post("/v1/callback-secret/rotate")
    assert (reply.status_code, reply.json()["code"]) == (409, "too-many-secrets")
    reply = await api.client.post("/v1/callback-secret/rotate", json={"overlap_hours": 0})
    assert reply.status_code == 200
    assert len((await api.client.get("/v1/callback-secret")).json()["data"]) == 5


@pytest.mark.parametrize("body", [{"overlap_hours": -1}, {"overlap_hours": 169}, {"overlap_hours": "24"}])
async def test_an_overlap_is_bounded(api: Api, body: dict[str, Any]) -> None:
    assert (await api.client.post("/v1/callback-secret/rotate", json=body)).status_code == 422


async def test_one_secret_for_all_is_not_rotated_by_a_user(settings: ApiSettings, store: Store) -> None:
    async with opened(settings, store, callback_secret=SecretStr(SECRET)) as api:
        assert (await api.client.get("/v1/callback-secret")).json() == {"source": "operator", "data": []}
        reply = await api.client.post("/v1/callback-secret/rotate")
        assert (reply.status_code, reply.json()["code"]) == (409, "callback-secret-fixed")
        async with Receiver() as receiver:
            await api.client.post("/v1/callback-test", json={"url": receiver.url()})
            verify(receiver.requests[0].body, receiver.requests[0].header_map, SECRET)


async def test_without_a_key_for_secrets_the_api_says_which_setting(
    settings: ApiSettings, store: Store
) -> None:
    async with opened(settings, store, secret_key=None) as api:
        for call in (
            api.client.get("/v1/callback-secret"),
            api.client.post("/v1/callback-secret/rotate"),
            api.client.post("/v1/callback-test", json={"url": "http://127.0.0.1:9/"}),
        ):
            reply = await call
            assert (reply.status_code, reply.json()["code"]) == (409, "callback-secret-unavailable")
            assert "PERDURE_SECRET_KEY" in reply.json()["detail"]


async def test_scopes_are_needed(api: Api) -> None:
    reader = await api.key("alice", ["tasks:read"])
    assert (await api.client.get("/v1/callback-secret", headers=reader)).status_code == 200
    for path, body in (
        ("/v1/callback-secret/rotate", {}),
        ("/v1/callback-test", {"url": "http://127.0.0.1:9/"}),
        ("/v1/callbacks/redeliver", {"since": "2026-01-01T00:00:00Z"}),
        ("/v1/callback-receivers/resume", {"origin": "http://x"}),
        (f"/v1/tasks/task_{'0' * 32}/callbacks/msg_{'0' * 32}/redeliver", {}),
    ):
        reply = await api.client.post(path, json=body, headers=reader)
        assert reply.status_code == 403, path
