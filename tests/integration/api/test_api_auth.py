"""Keys: who gets in, what a stranger can touch (nothing), what acting for another means."""

from __future__ import annotations

import asyncio
import statistics
import time
from datetime import timedelta
from typing import Any

import httpx
import pytest

from api.auth import CACHE_SECONDS
from perdure.keys import create_key, list_keys, revoke_key
from perdure.settings import ApiSettings
from perdure.store import Store
from tests.integration.api.harness import LATER, SIMULATED, Api, running_app

NOBODY = "task_" + "0" * 32


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"Authorization", b"")],
        [(b"Authorization", b"Bearer")],
        [(b"Authorization", b"Bearer ")],
        [(b"Authorization", b"Bearercaf")],
        [(b"Authorization", b"Bearer caf\xe9")],
        [(b"Authorization", "Bearer “quoted”".encode())],
        [(b"Authorization", b"Bearer " + b"x" * 100_000)],
        [(b"Authorization", b"Bearer sk_abcdefgh_" + b"x" * 43)],
        [(b"Authorization", b"Basic c2s6eA==")],
        [(b"X-API-Key", b"")],
        [(b"X-API-Key", b"\xff\xfe")],
        [(b"X-API-Key", b"a"), (b"X-API-Key", b"b")],
    ],
)
async def test_no_good_key_is_401(settings: ApiSettings, store: Store, headers: Any) -> None:
    async with running_app(settings.model_copy(update={"auth": "keys"}), store) as one:
        reply = await one.client.get("/v1/tasks", headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (401, "unauthorized")
        assert reply.headers["WWW-Authenticate"] == "Bearer"


async def test_a_key_in_either_header(keyed: Api) -> None:
    bearer = keyed.client.headers.pop("Authorization")
    token = bearer.removeprefix("Bearer ")
    good: list[dict[str, str]] = [
        {"Authorization": bearer},
        {"authorization": f"bearer {token}"},
        {"X-API-Key": token},
    ]
    for headers in good:
        assert (await keyed.client.get("/v1/tasks", headers=headers)).status_code == 200
    twice = [("Authorization", bearer), ("Authorization", bearer)]
    wrong = token[:-1] + ("a" if token[-1] != "a" else "b")
    assert (await keyed.client.get("/v1/tasks", headers=twice)).status_code == 401
    assert (await keyed.client.get("/v1/tasks", headers={"X-API-Key": wrong})).status_code == 401


async def test_every_call_but_the_probes_needs_a_key(keyed: Api) -> None:
    del keyed.client.headers["Authorization"]
    document = (await keyed.client.get("/openapi.json")).json()
    open_paths = set()
    for path, operations in document["paths"].items():
        for method in operations:
            url = path.replace("{task_id}", NOBODY).replace("{", "").replace("}", "")
            reply = await keyed.client.request(method, url)
            if reply.status_code != 401:
                open_paths.add(path)
    assert open_paths == {"/healthz", "/readyz", "/metrics"}


async def test_revoked_and_expired_keys_die_soon(keyed: Api) -> None:
    row, token = await create_key(keyed.store, "carol")
    brief, brief_token = await create_key(keyed.store, "carol", expires_in=timedelta(seconds=0.5))
    for one in (token, brief_token):
        assert (await keyed.client.get("/v1/tasks", headers=_bearer(one))).status_code == 200
    await revoke_key(keyed.store, row.key_id)
    with pytest.raises(KeyError):
        await revoke_key(keyed.store, row.key_id)
    await asyncio.sleep(CACHE_SECONDS + 0.2)
    for one in (token, brief_token):
        assert (await keyed.client.get("/v1/tasks", headers=_bearer(one))).status_code == 401
    listed = {one.key_id: one for one in await list_keys(keyed.store, "carol")}
    assert (listed[row.key_id].live, listed[brief.key_id].live) == (False, False)
    assert listed[row.key_id].last_used_at is not None
    assert token not in repr(listed)


async def test_scopes_are_needed(keyed: Api) -> None:
    reader, writer = await keyed.key("alice", ["tasks:read"]), await keyed.key("alice", ["tasks:write"])
    task = await keyed.submit(not_before=LATER)
    denied = [
        await keyed.client.post("/v1/tasks", json=SIMULATED, headers=reader),
        await keyed.client.post(
            "/v1/tasks", content=b"{junk", headers=reader
        ),  # said before the body is read
        await keyed.client.post(task["links"]["cancel"], headers=reader),
        await keyed.client.delete(task["links"]["self"], headers=reader),
        await keyed.client.get("/v1/tasks", headers=writer),
        await keyed.client.post("/v1/queues/local/pause"),
        await keyed.client.post("/codec/decode", json={"payloads": []}),
    ]
    assert [(one.status_code, one.json()["code"]) for one in denied] == [(403, "scope-missing")] * len(denied)
    assert (await keyed.client.get("/v1/tasks", headers=reader)).status_code == 200


@pytest.fixture
async def two(keyed: Api) -> tuple[Api, dict[str, Any], dict[str, str]]:
    """Alice's task, and the headers of a stranger."""
    task = await keyed.submit(not_before=LATER, metadata={"secret": "alice's"})
    return keyed, task, await keyed.key("mallory")


async def test_a_stranger_sees_and_touches_nothing(two: tuple[Api, dict[str, Any], dict[str, str]]) -> None:
    api, task, stranger = two
    theirs = task["task_id"]
    calls: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("PATCH", "", {"priority": "HIGH"}),
        ("DELETE", "", None),
        ("POST", "/cancel", {}),
        ("POST", "/rerun", {}),
        ("GET", "/events", None),
        ("GET", "/callbacks", None),
        ("POST", "/callbacks/msg_" + "0" * 32 + "/redeliver", None),
    ]
    for method, rest, body in calls:
        answers = []
        for task_id in (theirs, NOBODY, "task_ABC", "nonsense", "x" * 300, "task_" + "0" * 31 + "é"):
            reply = await api.client.request(
                method, f"/v1/tasks/{task_id}{rest}", json=body, headers=stranger
            )
            fields = {**reply.json(), "request_id": None}
            answers.append((reply.status_code, fields))
        assert all(answer == answers[0] for answer in answers), (method, rest, answers)
        assert answers[0][0] == 404
    listed = await api.client.get("/v1/tasks", headers=stranger)
    assert listed.json()["data"] == []
    found = await api.client.get("/v1/tasks?metadata.secret=alice's", headers=stranger)
    assert found.json()["data"] == []
    many = await api.client.post("/v1/tasks/cancel", json={"all": True}, headers=stranger)
    assert many.json() == {"cancelled": 0, "cancel_requested": 0, "has_more": False}
    other = await api.client.get("/v1/tasks?user_id=alice", headers=stranger)
    usage = await api.client.get("/v1/usage?user_id=alice", headers=stranger)
    assert (other.status_code, usage.status_code) == (403, 403)
    after = (await api.client.get(task["links"]["self"])).json()
    assert {**after, "queue": None} == {**task, "queue": None}


async def test_a_cursor_of_another_user_is_junk(keyed: Api) -> None:
    for _ in range(3):
        await keyed.submit()
    cursor = (await keyed.client.get("/v1/tasks?limit=1")).json()["next_cursor"]
    stranger = await keyed.key("mallory")
    reply = await keyed.client.get(f"/v1/tasks?limit=1&cursor={cursor}", headers=stranger)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid-cursor")


async def test_foreign_and_unknown_ids_take_the_same_time(
    two: tuple[Api, dict[str, Any], dict[str, str]],
) -> None:
    api, task, stranger = two

    async def median(task_id: str) -> float:
        times = []
        for _ in range(40):
            started = time.perf_counter()
            await api.client.get(f"/v1/tasks/{task_id}", headers=stranger)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    foreign, unknown = await median(task["task_id"]), await median(NOBODY)
    assert abs(foreign - unknown) < 0.02


async def test_an_admin_sees_all_by_name(two: tuple[Api, dict[str, Any], dict[str, str]]) -> None:
    api, task, stranger = two
    await api.submit(stranger)
    root = await api.key("root", ["admin"])
    users = {one["user_id"] for one in (await api.client.get("/v1/tasks", headers=root)).json()["data"]}
    assert users == {"alice", "mallory"}
    one = (await api.client.get("/v1/tasks?user_id=alice", headers=root)).json()["data"]
    assert [entry["task_id"] for entry in one] == [task["task_id"]]
    assert (await api.client.get(task["links"]["self"], headers=root)).status_code == 200


async def test_only_an_act_as_key_names_another_user(keyed: Api) -> None:
    refused = await keyed.client.post("/v1/tasks", json={**SIMULATED, "user_id": "bob"})
    assert (refused.status_code, refused.json()["code"]) == (403, "act-as-refused")
    assert (await keyed.submit(user_id="alice"))["user_id"] == "alice"
    gateway = await keyed.key("gateway", act_as=True)
    task = await keyed.submit(gateway, user_id="bob")
    assert task["user_id"] == "bob"
    bob = await keyed.key("bob")
    assert (await keyed.client.get(task["links"]["self"], headers=bob)).status_code == 200
    own = await keyed.client.get(task["links"]["self"], headers=gateway)
    acting = await keyed.client.get(task["links"]["self"], headers={**gateway, "Perdure-User": "bob"})
    assert (own.status_code, acting.status_code) == (404, 200)
    alone = await keyed.client.get(task["links"]["self"], headers={"Perdure-User": "bob"})
    assert (alone.status_code, alone.json()["code"]) == (403, "act-as-refused")
    for bad in ("", "x" * 65, "a\tb"):
        reply = await keyed.client.get("/v1/tasks", headers={**gateway, "Perdure-User": bad})
        assert reply.status_code == 422


async def test_acting_for_a_user_is_no_admins_power(keyed: Api) -> None:
    task = await keyed.submit()
    both = await keyed.key("root", ["admin", "tasks:read"], act_as=True)
    reply = await keyed.client.get(task["links"]["self"], headers={**both, "Perdure-User": "mallory"})
    assert reply.status_code == 404


async def test_without_keys_a_body_may_name_any_user(api: Api) -> None:
    task = await api.submit(user_id="ann")
    assert task["user_id"] == "ann"
    assert (await api.client.get(task["links"]["self"])).status_code == 200


async def test_an_unreachable_database_is_503_before_the_body_is_read(
    settings: ApiSettings, store: Store
) -> None:
    nowhere = settings.model_copy(
        update={"auth": "keys", "database_url": type(settings.database_url)("postgresql://x:y@127.0.0.1:1/z")}
    )
    async with running_app(nowhere, store) as one:
        token = "sk_abcdefgh_" + "x" * 43
        reply = await one.client.post("/v1/tasks", json=SIMULATED, headers=_bearer(token))
        assert (reply.status_code, reply.json()["code"]) == (503, "store-unavailable")
        assert int(reply.headers["Retry-After"]) >= 1
        alive: httpx.Response = await one.client.get("/healthz")
        assert alive.status_code == 200


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
