"""Submitting: what is kept, what is refused, what a repeat gives."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.settings import ApiSettings
from perdure.store import Store
from perdure.store.rows import Principal
from tests.integration.api.harness import CHAT, LATER, SIMULATED, Api, running_app

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z")
FIELDS = {
    "task_id", "task_type", "user_id", "model_id", "status", "priority", "progress", "params", "result",
    "error_code", "error_message", "retry_count", "max_retries", "callback_url", "callback_events",
    "metadata", "not_before", "queue_timeout_seconds", "timeout_seconds", "deadline_seconds", "rerun_of",
    "created_at", "queued_at", "started_at", "completed_at", "updated_at", "version", "cancel_requested",
    "next_attempt_at", "queue", "attempts", "usage", "links",
}  # fmt: skip


async def test_a_submit_is_kept(api: Api) -> None:
    reply = await api.client.post("/v1/tasks", json=CHAT)
    assert reply.status_code == 202
    task = reply.json()
    assert set(task) == FIELDS
    assert re.fullmatch(r"task_[0-9a-f]{32}", task["task_id"])
    assert reply.headers["Location"] == f"/v1/tasks/{task['task_id']}" == task["links"]["self"]
    assert reply.headers["Retry-After"].isdigit()
    assert (task["status"], task["priority"], task["task_type"]) == ("PENDING", "NORMAL", "chat")
    assert (task["progress"], task["retry_count"], task["max_retries"], task["version"]) == (0, 0, 3, 0)
    assert (task["user_id"], task["params"], task["result"]) == ("dev", CHAT["params"], None)
    assert task["callback_events"] == ["COMPLETED", "FAILED", "CANCELLED"]
    assert task["deadline_seconds"] == 86_400  # the model's
    assert task["timeout_seconds"] == 1800
    assert TIME.match(task["created_at"])
    assert TIME.match(task["updated_at"])
    read = await api.client.get(task["links"]["self"])
    assert {**read.json(), "queue": None} == {**task, "queue": None}


async def test_every_field_comes_back(api: Api) -> None:
    body = {
        "model_id": "chat",
        "params": {
            "messages": [{"role": "user", "content": "é 好 🙂 \u2028 </script> \\ \u0001"}],
            "temperature": 1.0,
            "seed": 2**53 + 1,
            "min_p": 1e-7,
            "extra": {"deep": [[], {}, None, True, -0.0]},
        },
        "task_type": "code-review",
        "priority": "LOW",
        "max_retries": 0,
        "callback_url": "https://example.com/hook?x=1",
        "callback_events": ["FAILED"],
        "metadata": {"ключ": "значение 🙂", "a": ""},
        "queue_timeout_seconds": 10,
        "timeout_seconds": 20.5,
        "deadline_seconds": 30,
        "not_before": "2027-06-01T12:00:00+05:30",
    }
    reply = await api.client.post("/v1/tasks", json=body)
    assert reply.status_code == 202, reply.text
    task = (await api.client.get(reply.headers["Location"])).json()
    expected = {**body, "not_before": "2027-06-01T06:30:00.000000Z"}
    assert {name: task[name] for name in body} == expected
    row = await api.store.tasks.get(Principal("dev", admin=True), task["task_id"])
    assert row is not None
    assert row.queue_deadline == datetime(2027, 6, 1, 6, 30, 10, tzinfo=UTC)
    assert row.total_deadline == datetime(2027, 6, 1, 6, 30, 30, tzinfo=UTC)


async def test_deadlines_count_from_the_submit(api: Api) -> None:
    task = await api.submit(queue_timeout_seconds=60, not_before="2020-01-01T00:00:00Z")
    row = await api.store.tasks.get(Principal("dev", admin=True), task["task_id"])
    assert row is not None
    assert row.queue_deadline is not None
    assert timedelta(seconds=59) < row.queue_deadline - row.created_at < timedelta(seconds=61)


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ({**CHAT, "model_id": "nobody"}, 422, "model-unknown", "/model_id"),
        ({**CHAT, "model_id": "org/name:tag"}, 422, "model-unknown", "/model_id"),
        ({"params": {}}, 422, "validation-failed", "/model_id"),
        ({"model_id": "chat"}, 422, "validation-failed", "/params"),
        ({**CHAT, "surprise": 1}, 422, "validation-failed", "/surprise"),
        ({"model_id": "chat", "params": {}}, 422, "validation-failed", "/params/messages"),
        ({"model_id": "small", "params": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 101}},
         422, "validation-failed", "/params/max_tokens"),
        ({"model_id": "small", "params": {"messages": [{"role": "user", "content": "x" * 300}]}},
         413, "input-too-large", None),
        ([], 422, "validation-failed", ""),
        ("text", 422, "validation-failed", ""),
        (5, 422, "validation-failed", ""),
    ],
)  # fmt: skip
async def test_refusals_are_problems(
    api: Api, body: Any, status: int, code: str, pointer: str | None
) -> None:
    reply = await api.client.post("/v1/tasks", json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.headers["Cache-Control"] == "no-store"
    assert reply.json()["status"] == status
    assert reply.json()["request_id"] == reply.headers["X-Request-Id"]
    if pointer is not None:
        assert reply.json()["errors"][0]["pointer"] == pointer
    assert (await api.client.get("/v1/tasks")).json()["data"] == []


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"model_id": "chat", "model_id": "small", "params": {}}', 400),
        (b'{"model_id": "simulated", "params": {"temperature": NaN}}', 400),
        ('{"model_id": "simulated", "params": {}}'.encode("utf-16"), 400),
        (b'\xef\xbb\xbf{"model_id": "simulated", "params": {}}', 400),
        (b'{"model_id": "simulated", "params": {"user": "a\\u0000"}}', 422),
        (b'{"model_id": "simulated", "params": {}, "metadata": {"\\u0000": "x"}}', 422),
        (b'{"model_id": "simulated", "params": {}, "metadata": {"x": "\\ud83d"}}', 422),
        (b'{"model_id": "simulated", "params": {}, "max_retries": "\\ud83d"}', 422),
        (b'{"model_id": "simulated", "params": {"max_tokens": ' + b"9" * 30 + b"}}", 422),
        (b'{"model_id": "simulated", "params": {"x": ' + b"[" * 1100 + b"]" * 1100 + b"}}", 400),
    ],
)
async def test_what_is_no_sound_json_is_refused(api: Api, content: bytes, status: int) -> None:
    reply = await api.client.post("/v1/tasks", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == status, reply.text
    assert reply.json()["code"] == {400: "malformed-json", 422: "value-refused"}[status]


async def test_a_lone_pair_split_in_escapes_is_one_character(api: Api) -> None:
    raw = b'{"model_id": "simulated", "params": {"user": "\\ud83d\\ude00"}}'
    reply = await api.client.post("/v1/tasks", content=raw, headers={"Content-Type": "application/json"})
    assert reply.json()["params"] == {"user": "😀"}


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "http://127.0.0.1/x",
        "https://169.254.169.254/x",
        "https://user:pw@example.com/",
        "https://example.com:22/",
        "https://2130706433/",
        "file:///etc/passwd",
        "https://exa mple.com/",
        "https://" + "a" * 2030 + ".com/",
    ],
)
async def test_callbacks_go_to_public_addresses_only(api: Api, url: str) -> None:
    reply = await api.client.post("/v1/tasks", json={**CHAT, "callback_url": url})
    assert (reply.status_code, reply.json()["code"]) == (422, "callback-url-rejected"), reply.text
    assert reply.json()["errors"][0]["pointer"] == "/callback_url"


# Idempotency ---------------------------------------------------------------------------------------
async def test_a_repeat_gives_the_same_task(api: Api) -> None:
    body = {**SIMULATED, "metadata": {"a": "1", "b": "2"}, "not_before": LATER}
    key = {"Idempotency-Key": "one"}
    first = await api.client.post("/v1/tasks", json=body, headers=key)
    assert first.status_code == 202
    assert "Idempotent-Replayed" not in first.headers
    shuffled = (
        b'{ "not_before": "2027-06-01T00:00:00.000Z", "metadata": {"b": "2",   "a": "1"},'
        b' "params": {}, "priority": "NORMAL", "model_id": "simulated" }'
    )
    headers = {**key, "Content-Type": "application/json"}
    again = await api.client.post("/v1/tasks", content=shuffled, headers=headers)
    assert again.status_code == 202, again.text
    assert again.headers["Idempotent-Replayed"] == "true"
    assert again.json()["task_id"] == first.json()["task_id"]
    assert again.headers["Location"] == first.headers["Location"]
    assert len((await api.client.get("/v1/tasks")).json()["data"]) == 1


async def test_a_replay_shows_the_task_as_it_is_now(api: Api) -> None:
    key = {"Idempotency-Key": "one"}
    task = await api.submit(key, not_before=LATER)
    await api.client.post(task["links"]["cancel"])
    again = await api.client.post("/v1/tasks", json={**SIMULATED, "not_before": LATER}, headers=key)
    assert (again.status_code, again.json()["status"]) == (202, "CANCELLED")


async def test_another_body_under_the_same_key_is_refused(api: Api) -> None:
    key = {"Idempotency-Key": '"quoted"'}
    task = await api.submit(key)
    reply = await api.client.post("/v1/tasks", json={**SIMULATED, "params": {"tokens": 6}}, headers=key)
    assert (reply.status_code, reply.json()["code"]) == (422, "idempotency-key-reused")
    bare = await api.client.post("/v1/tasks", json=SIMULATED, headers={"Idempotency-Key": "quoted"})
    assert bare.json()["task_id"] == task["task_id"]


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "x" * 1024, b"caf\xe9"])
async def test_bad_keys_are_malformed(api: Api, key: str | bytes) -> None:
    reply = await api.client.post("/v1/tasks", json=SIMULATED, headers=[(b"Idempotency-Key", _bytes(key))])
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid-idempotency-key")


async def test_a_refused_body_leaves_the_key_free(api: Api) -> None:
    key = {"Idempotency-Key": "one"}
    refused = await api.client.post("/v1/tasks", json={**SIMULATED, "model_id": "nobody"}, headers=key)
    assert refused.status_code == 422
    await api.submit(key)


async def test_keys_are_scoped_by_user_and_route(keyed: Api) -> None:
    key = {"Idempotency-Key": "one"}
    bob = await keyed.key("bob")
    first = await keyed.submit(key)
    theirs = await keyed.submit({**key, **bob})
    again = await keyed.client.post(f"/v1/tasks/{first['task_id']}/rerun", headers=key)
    bulk = await keyed.client.post("/v1/tasks/bulk", json={"tasks": [SIMULATED]}, headers=key)
    ids = {first["task_id"], theirs["task_id"], again.json()["task_id"], bulk.json()["tasks"][0]["task_id"]}
    assert len(ids) == 4


async def test_a_key_is_free_again_when_its_task_was_deleted(api: Api) -> None:
    key = {"Idempotency-Key": "one"}
    task = await api.submit(key, not_before=LATER)
    await api.client.post(task["links"]["cancel"])
    assert (await api.client.delete(task["links"]["self"])).status_code == 204
    assert (await api.submit(key, not_before=LATER))["task_id"] != task["task_id"]


async def test_many_equal_submits_at_once_are_one_task(settings: ApiSettings, store: Store) -> None:
    async with running_app(settings, store) as one, running_app(settings, store) as other:
        key = {"Idempotency-Key": "race"}
        sends = [
            each.client.post("/v1/tasks", json=SIMULATED, headers=key)
            for _ in range(100)
            for each in (one, other)
        ]
        replies = await asyncio.gather(*sends)
        assert {reply.status_code for reply in replies} == {202}
        assert len({reply.json()["task_id"] for reply in replies}) == 1
        assert all(reply.json()["params"] == {} for reply in replies)
        assert sum("Idempotent-Replayed" not in reply.headers for reply in replies) == 1


# Bulk ----------------------------------------------------------------------------------------------
async def test_bulk_judges_each_item(api: Api) -> None:
    items: list[Any] = [
        SIMULATED,
        {**SIMULATED, "model_id": "nobody"},
        {**CHAT, "priority": "HIGH"},
        {"nonsense": True},
        "text",
        {**SIMULATED, "callback_url": "http://127.0.0.1/"},
    ]
    reply = await api.client.post("/v1/tasks/bulk", json={"tasks": items})
    assert reply.status_code == 202, reply.text
    entries = reply.json()["tasks"]
    assert [entry.get("code") for entry in entries] == [
        None, "model-unknown", None, "validation-failed", "validation-failed", "callback-url-rejected",
    ]  # fmt: skip
    assert entries[3]["errors"][0]["pointer"] == "/model_id"
    assert [entries[0]["model_id"], entries[2]["priority"]] == ["simulated", "HIGH"]
    assert len((await api.client.get("/v1/tasks")).json()["data"]) == 2


async def test_bulk_takes_500_at_once_and_no_more(api: Api) -> None:
    reply = await api.client.post("/v1/tasks/bulk", json={"tasks": [SIMULATED] * 500})
    assert reply.status_code == 202
    assert len({entry["task_id"] for entry in reply.json()["tasks"]}) == 500
    for count in (0, 501):
        refused = await api.client.post("/v1/tasks/bulk", json={"tasks": [SIMULATED] * count})
        assert refused.status_code == 422


async def test_bulk_may_be_larger_than_a_submit(api: Api) -> None:
    big = {"model_id": "chat", "params": {"messages": [{"role": "user", "content": "x" * 700_000}]}}
    reply = await api.client.post("/v1/tasks/bulk", json={"tasks": [big] * 4})
    assert [entry["status"] for entry in reply.json()["tasks"]] == ["PENDING"] * 4
    assert (await api.client.post("/v1/tasks/bulk", json={"tasks": [big] * 25})).status_code == 413


async def test_a_bulk_replay_gives_the_same_entries(api: Api) -> None:
    key = {"Idempotency-Key": "many"}
    items = [SIMULATED, {**SIMULATED, "model_id": "nobody"}, {**SIMULATED, "priority": "LOW"}]
    first = await api.client.post("/v1/tasks/bulk", json={"tasks": items}, headers=key)
    again = await api.client.post("/v1/tasks/bulk", json={"tasks": items}, headers=key)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert [entry.get("task_id") for entry in again.json()["tasks"]] == [
        entry.get("task_id") for entry in first.json()["tasks"]
    ]
    assert again.json()["tasks"][1]["code"] == "model-unknown"
    other = await api.client.post("/v1/tasks/bulk", json={"tasks": items[:1]}, headers=key)
    assert other.json()["code"] == "idempotency-key-reused"


# Rerun ---------------------------------------------------------------------------------------------
async def test_rerun_makes_a_new_task_of_the_same_input(api: Api) -> None:
    old = await api.submit(
        params={"tokens": 3}, metadata={"a": "b"}, task_type="document", max_retries=7, not_before=LATER
    )
    reply = await api.client.post(f"/v1/tasks/{old['task_id']}/rerun")
    assert reply.status_code == 202, reply.text
    new = reply.json()
    assert new["task_id"] != old["task_id"] == new["rerun_of"]
    for name in ("params", "metadata", "task_type", "max_retries", "model_id", "user_id", "timeout_seconds"):
        assert new[name] == old[name]
    assert new["not_before"] is None
    changed = await api.client.post(
        f"/v1/tasks/{old['task_id']}/rerun",
        json={"model_id": "chat", "params": CHAT["params"], "priority": "HIGH"},
    )
    assert [changed.json()[name] for name in ("model_id", "params", "priority")] == [
        "chat",
        CHAT["params"],
        "HIGH",
    ]


async def test_rerun_checks_the_new_input(api: Api) -> None:
    old = await api.submit()
    for body, code in (
        ({"model_id": "chat"}, "validation-failed"),  # no messages
        ({"model_id": "nobody"}, "model-unknown"),
        ({"user_id": "x"}, "validation-failed"),
    ):
        reply = await api.client.post(f"/v1/tasks/{old['task_id']}/rerun", json=body)
        assert (reply.status_code, reply.json()["code"]) == (422, code)
    missing = await api.client.post("/v1/tasks/task_" + "0" * 32 + "/rerun")
    assert missing.status_code == 404


# Limits --------------------------------------------------------------------------------------------
async def test_a_full_class_is_refused_low_first(api: Api) -> None:
    narrow: dict[str, Any] = {"model_id": "narrow:1", "not_before": LATER}
    due: dict[str, Any] = {"model_id": "narrow:1"}
    for _ in range(2):
        await api.submit(**due, priority="LOW")
    reply = await api.client.post("/v1/tasks", json={**SIMULATED, **due, "priority": "LOW"})
    assert (reply.status_code, reply.json()["code"]) == (429, "pool-full"), reply.text
    assert int(reply.headers["Retry-After"]) >= 1
    for _ in range(4):
        await api.submit(**due, priority="NORMAL")
    full = await api.client.post("/v1/tasks", json={**SIMULATED, **due, "priority": "NORMAL"})
    assert full.status_code == 429
    await api.submit(**due, priority="HIGH")  # has no bound
    bulk = await api.client.post(
        "/v1/tasks/bulk", json={"tasks": [{**SIMULATED, **narrow, "priority": p} for p in ("LOW", "HIGH")]}
    )
    assert [entry.get("code") for entry in bulk.json()["tasks"]] == ["pool-full", None]


async def test_a_repeat_is_answered_while_nothing_new_is_let_in(api: Api) -> None:
    low: dict[str, Any] = {"model_id": "narrow:1", "priority": "LOW"}
    first = await api.submit({"Idempotency-Key": "a"}, **low)
    many = {"tasks": [{**SIMULATED, **low}]}
    bulk = await api.client.post("/v1/tasks/bulk", json=many, headers={"Idempotency-Key": "b"})
    full = await api.client.post("/v1/tasks", json={**SIMULATED, **low}, headers={"Idempotency-Key": "c"})
    assert full.status_code == 429
    again = await api.submit({"Idempotency-Key": "a"}, **low)
    assert again["task_id"] == first["task_id"]
    replay = await api.client.post("/v1/tasks/bulk", json=many, headers={"Idempotency-Key": "b"})
    assert replay.headers["Idempotent-Replayed"] == "true"
    assert replay.json()["tasks"][0]["task_id"] == bulk.json()["tasks"][0]["task_id"]
    other = {**SIMULATED, **low, "max_retries": 9}
    reused = await api.client.post("/v1/tasks", json=other, headers={"Idempotency-Key": "a"})
    assert reused.json()["code"] == "idempotency-key-reused"


async def test_a_user_may_have_so_many_waiting(settings: ApiSettings, store: Store) -> None:
    bounded = settings.model_copy(update={"auth": "keys", "max_waiting_per_user": 3})
    async with running_app(bounded, store) as one:
        alice, bob = await one.key("alice"), await one.key("bob")
        for _ in range(3):
            await one.submit(alice)
        refused = await one.client.post("/v1/tasks", json=SIMULATED, headers=alice)
        assert (refused.status_code, refused.json()["code"]) == (429, "too-many-waiting")
        assert "Retry-After" in refused.headers
        await one.submit(bob)


async def test_a_key_may_submit_so_many_a_minute(settings: ApiSettings, store: Store) -> None:
    bounded = settings.model_copy(update={"auth": "keys", "submits_per_minute": 5})
    async with running_app(bounded, store) as one:
        alice, second = await one.key("alice"), await one.key("alice")
        for _ in range(5):
            await one.submit(alice)
        refused = await one.client.post(
            "/v1/tasks", json=SIMULATED, headers={**alice, "X-Forwarded-For": "9.9.9.9"}
        )
        assert (refused.status_code, refused.json()["code"]) == (429, "rate-limited")
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert (await one.client.get("/v1/tasks", headers=alice)).status_code == 200  # reading goes on
        await one.submit(second)  # a key of its own


async def test_bodies_are_limited_too(settings: ApiSettings, store: Store) -> None:
    bounded = settings.model_copy(update={"auth": "keys", "bodies_per_minute": 3})
    async with running_app(bounded, store) as one:
        alice = await one.key("alice")
        statuses = [
            (await one.client.post("/v1/tasks", content=b"junk", headers=alice)).status_code for _ in range(4)
        ]
        assert statuses == [415, 415, 415, 429]


# Waiting -------------------------------------------------------------------------------------------
async def test_prefer_wait_answers_202_when_time_is_up(api: Api) -> None:
    reply = await api.client.post("/v1/tasks", json=SIMULATED, headers={"Prefer": "wait=1"})
    assert reply.status_code == 202
    assert reply.headers["Preference-Applied"] == "wait=1"
    assert reply.json()["params"] == {}


async def test_prefer_wait_answers_200_at_the_end(api: Api) -> None:
    sending = asyncio.create_task(
        api.client.post("/v1/tasks", json={**SIMULATED, "not_before": LATER}, headers={"Prefer": "wait=30"})
    )
    task = await _first_task(api)
    await api.client.post(task["links"]["cancel"])
    reply = await sending
    assert (reply.status_code, reply.json()["status"]) == (200, "CANCELLED")
    assert "Retry-After" not in reply.headers


async def _first_task(api: Api) -> dict[str, Any]:
    while True:
        found: list[dict[str, Any]] = (await api.client.get("/v1/tasks")).json()["data"]
        if found:
            return found[0]
        await asyncio.sleep(0.02)


def _bytes(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode()
