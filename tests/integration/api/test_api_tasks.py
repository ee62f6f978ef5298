"""Reading, listing and steering tasks."""

from __future__ import annotations

import asyncio
import base64
import re
from typing import Any

import pytest

from perdure.contracts import AttemptRecord
from perdure.task.states import Status
from tests.integration.api.harness import CHAT, LATER, SIMULATED, Api, finish, move

NOBODY = "task_" + "0" * 32
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z")


# One -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "task_id",
    [
        NOBODY,
        "task_" + "F" * 32,
        "task_",
        "x",
        "task_" + "0" * 33,
        "%00",
        "%2e%2e",
        "0" * 2000,
        "task_%F0%9F%99%82",
    ],
)
async def test_an_unknown_or_malformed_id_is_404(api: Api, task_id: str) -> None:
    for method, rest in (
        ("GET", ""),
        ("POST", "/cancel"),
        ("DELETE", ""),
        ("POST", "/rerun"),
        ("GET", "/events"),
    ):
        reply = await api.client.request(method, f"/v1/tasks/{task_id}{rest}")
        assert (reply.status_code, reply.headers["Content-Type"]) == (404, "application/problem+json")


async def test_a_path_that_is_none_is_a_problem_too(api: Api) -> None:
    for path in ("/", "/v1", "/v2/tasks", "/v1/tasks/", "/v1/tasks/a/b/c", "/docs"):
        reply = await api.client.get(path)
        assert (reply.status_code, reply.json()["code"]) == (404, "not-found"), path
    wrong = await api.client.put("/v1/tasks")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "method-not-allowed")
    assert set(wrong.headers["Allow"].split(", ")) == {"GET", "POST"}


async def test_a_final_task_shows_result_usage_and_attempts(api: Api) -> None:
    task = await api.submit()
    await finish(api.store, task["task_id"])
    reply = await api.client.get(task["links"]["self"])
    done = reply.json()
    assert (done["status"], done["progress"], done["version"]) == ("COMPLETED", 100, 3)
    assert done["result"]["text"] == "done"
    assert done["result"]["finish_reason"] == "stop"
    assert done["usage"] == {"prompt_tokens": 10, "completion_tokens": 2, "discarded_tokens": 1}
    (attempt,) = done["attempts"]
    assert (attempt["number"], attempt["outcome"], attempt["worker"]) == (1, "completed", "gpu@test")
    for moment in (attempt["started_at"], attempt["ended_at"], done["completed_at"], done["started_at"]):
        assert TIME.match(moment)
    assert "Retry-After" not in reply.headers
    assert done["queue"] is None


async def test_a_running_task_shows_where_it_stands(api: Api) -> None:
    task = await api.submit()
    attempt = AttemptRecord(number=1, worker="w")
    await move(api.store, task["task_id"], Status.PROCESSING, 2, progress=40, attempts=[attempt])
    reply = await api.client.get(f"{task['links']['self']}?include=partial")
    running = reply.json()
    assert (running["status"], running["progress"], running["version"]) == ("PROCESSING", 40, 2)
    assert running["partial_text"] is None  # Temporal is down: there is no beat to be had
    assert reply.headers["Retry-After"].isdigit()
    listed = (await api.client.get("/v1/tasks")).json()["data"][0]
    assert (listed["status"], listed["progress"]) == ("PROCESSING", 40)


async def test_a_waiting_task_says_why(api: Api) -> None:
    held = await api.submit(not_before=LATER)
    task = (await api.client.get(held["links"]["self"])).json()
    assert task["queue"]["reason"] == "not_before"
    assert task["queue"]["estimated"] is True


async def test_etags(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    url = task["links"]["self"]
    first = await api.client.get(url)
    tag = first.headers["ETag"]
    same = await api.client.get(url, headers={"If-None-Match": f'"x", W/{tag}'})
    assert (same.status_code, same.content, same.headers["ETag"]) == (304, b"", tag)
    assert (await api.client.get(url)).headers["ETag"] == tag
    await api.client.patch(url, json={"priority": "HIGH"})
    changed = await api.client.get(url, headers={"If-None-Match": tag})
    assert (changed.status_code, changed.headers["ETag"] != tag) == (200, True)


async def test_a_read_waits_for_the_end(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    reading = asyncio.create_task(api.client.get(task["links"]["self"], headers={"Prefer": "wait=30"}))
    await asyncio.sleep(0.1)
    await finish(api.store, task["task_id"])
    reply = await reading
    assert (reply.status_code, reply.json()["result"]["text"]) == (200, "done")
    assert reply.headers["Preference-Applied"] == "wait=30"


async def test_a_read_that_knows_a_version_waits_for_the_next(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    tag = (await api.client.get(task["links"]["self"])).headers["ETag"]
    headers = {"Prefer": "wait=30", "If-None-Match": tag}
    reading = asyncio.create_task(api.client.get(task["links"]["self"], headers=headers))
    await asyncio.sleep(0.1)
    await move(api.store, task["task_id"], Status.QUEUED, 1)
    reply = await reading
    assert (reply.status_code, reply.json()["status"]) == (200, "QUEUED")
    short = {"Prefer": "wait=1", "If-None-Match": reply.headers["ETag"]}
    assert (await api.client.get(task["links"]["self"], headers=short)).status_code == 304


# Many ----------------------------------------------------------------------------------------------
async def _pages(api: Api, query: str) -> list[list[dict[str, Any]]]:
    pages, url = [], f"/v1/tasks?{query}"
    while True:
        reply = await api.client.get(url)
        assert reply.status_code == 200, reply.text
        page = reply.json()
        pages.append(page["data"])
        assert page["has_more"] is (page["next_cursor"] is not None)
        if not page["has_more"]:
            assert "Link" not in reply.headers
            return pages
        link = re.fullmatch(r'<(.*)>; rel="next"', reply.headers["Link"])
        assert link is not None
        url = link[1]


async def test_pages_are_in_a_total_order_without_gap_or_repeat(api: Api) -> None:
    bulk = await api.client.post("/v1/tasks/bulk", json={"tasks": [SIMULATED] * 23})
    ids = {entry["task_id"] for entry in bulk.json()["tasks"]}
    pages = await _pages(api, "limit=5")
    seen = [task["task_id"] for page in pages for task in page]
    assert [len(page) for page in pages] == [5, 5, 5, 5, 3]
    assert (len(seen), set(seen)) == (23, ids)
    again = [task["task_id"] for page in await _pages(api, "limit=7") for task in page]
    assert again == seen


async def test_a_cursor_survives_inserts_and_deletes(api: Api) -> None:
    tasks = [await api.submit(not_before=LATER) for _ in range(6)]
    newest_first = [task["task_id"] for task in reversed(tasks)]
    page = (await api.client.get("/v1/tasks?limit=2")).json()
    for task in (tasks[5], tasks[3], tasks[0]):  # one shown already, the next in line, the last
        await api.client.post(task["links"]["cancel"])
        await api.client.delete(task["links"]["self"])
    await api.submit()
    rest = (await api.client.get(f"/v1/tasks?limit=10&cursor={page['next_cursor']}")).json()["data"]
    assert [task["task_id"] for task in page["data"]] == newest_first[:2]
    assert [task["task_id"] for task in rest] == [newest_first[3], newest_first[4]]


@pytest.mark.parametrize(
    "cursor",
    [
        "junk",
        "",
        "a" * 500,
        "%00",
        "%F0%9F%99%82",
        base64.urlsafe_b64encode(b'{"v":1}').decode(),
        "-1",
        "=" * 8,
        "a" * 5000,
    ],
)
async def test_a_junk_cursor_is_400(api: Api, cursor: str) -> None:
    reply = await api.client.get(f"/v1/tasks?cursor={cursor}")
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid-cursor"), reply.text


async def test_a_cursor_belongs_to_its_filters_and_reveals_nothing(api: Api) -> None:
    for _ in range(3):
        await api.submit(metadata={"secret": "value"})
    cursor = (await api.client.get("/v1/tasks?limit=1&metadata.secret=value")).json()["next_cursor"]
    other = await api.client.get(f"/v1/tasks?limit=1&cursor={cursor}")
    assert other.json()["code"] == "invalid-cursor"
    assert re.fullmatch(r"[A-Za-z0-9_-]+", cursor)
    assert b"value" not in base64.urlsafe_b64decode(cursor + "==")
    for changed in (cursor[:-2] + ("AA" if cursor[-2:] != "AA" else "BB"), cursor[:-2], cursor + "AAAA"):
        reply = await api.client.get(f"/v1/tasks?metadata.secret=value&cursor={changed}")
        assert reply.status_code == 400, changed


async def test_filters(api: Api) -> None:
    plain = await api.submit()
    high = await api.submit(priority="HIGH", task_type="document", metadata={"job": "a b&c", "ключ": "é"})
    chat = await api.submit(**CHAT, user_id="ann")
    done = await api.submit(metadata={"job": "x"})
    await finish(api.store, done["task_id"])
    at = chat["created_at"].replace("+", "%2B")
    cases = {
        "": [done, chat, high, plain],
        "priority=HIGH": [high],
        "task_type=document": [high],
        "model_id=chat": [chat],
        "user_id=ann": [chat],
        "status=COMPLETED": [done],
        "status=COMPLETED,FAILED": [done],
        "status=PENDING&status=COMPLETED": [done, chat, high, plain],
        f"created_after={at}": [done],
        f"created_before={at}": [high, plain],
        "metadata.job=a%20b%26c": [high],
        "metadata.%D0%BA%D0%BB%D1%8E%D1%87=%C3%A9": [high],
        "metadata.job=x&status=COMPLETED": [done],
        "metadata.job=x&status=FAILED": [],
        "metadata.nothing=x": [],
    }
    for query, expected in cases.items():
        reply = await api.client.get(f"/v1/tasks?{query}")
        assert reply.status_code == 200, (query, reply.text)
        found = [task["task_id"] for task in reply.json()["data"]]
        assert found == [task["task_id"] for task in expected], query


async def test_lists_leave_out_what_is_large_unless_asked(api: Api) -> None:
    task = await api.submit(params={"tokens": 3})
    await finish(api.store, task["task_id"])
    bare = (await api.client.get("/v1/tasks")).json()["data"][0]
    assert not {"params", "result", "attempts"} & set(bare)
    full = (await api.client.get("/v1/tasks?include=params,result&include=attempts")).json()["data"][0]
    assert (full["params"], full["result"]["text"], len(full["attempts"])) == ({"tokens": 3}, "done", 1)
    one = (await api.client.get("/v1/tasks?include=params")).json()["data"][0]
    assert ("params" in one, "result" in one) == (True, False)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0", "limit=201", "limit=-1", "limit=abc", "limit=1.5", "limit=" + "9" * 30, "limit=",
        "status=DONE", "status=completed", "priority=1", "model_id=", "model_id=" + "x" * 65,
        "task_type=a%20b", "created_after=yesterday", "created_after=2026-12-01T00:00:00",
        "created_before=" + "9" * 30, "include=everything", "metadata=x", "metadata.=x", "statuss=PENDING",
        "offset=5", "&".join(f"metadata.k{n}=v" for n in range(17)),
    ],
)  # fmt: skip
async def test_bad_queries_are_named(api: Api, query: str) -> None:
    reply = await api.client.get(f"/v1/tasks?{query}")
    assert reply.status_code == 422
    assert reply.json()["errors"][0]["parameter"]


async def test_text_that_postgres_cannot_hold_is_no_500(api: Api) -> None:
    for query in ("model_id=%00", "metadata.a=%00", "metadata.%00=a", "task_type=%00", "user_id=%00"):
        assert (await api.client.get(f"/v1/tasks?{query}")).status_code in (200, 422), query


# Cancel --------------------------------------------------------------------------------------------
async def test_a_task_that_never_started_is_cancelled_in_place(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    reply = await api.client.post(task["links"]["cancel"], json={"reason": "changed my mind"})
    assert reply.status_code == 202
    cancelled = reply.json()
    assert (cancelled["status"], cancelled["cancel_requested"]) == ("CANCELLED", True)
    assert TIME.match(cancelled["completed_at"])
    again = await api.client.post(task["links"]["cancel"])
    assert (again.status_code, again.json()["status"]) == (202, "CANCELLED")
    assert again.json()["version"] == cancelled["version"]


async def test_a_running_task_is_told_to_stop_also_while_temporal_is_down(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    await move(api.store, task["task_id"], Status.PROCESSING, 2)
    for _ in range(2):
        reply = await api.client.post(task["links"]["cancel"])
        assert (reply.status_code, reply.json()["status"]) == (202, "PROCESSING")
        assert reply.json()["cancel_requested"] is True


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED])
async def test_a_finished_task_is_not_cancelled(api: Api, status: Status) -> None:
    task = await api.submit()
    await finish(api.store, task["task_id"], status)
    reply = await api.client.post(task["links"]["cancel"])
    assert (reply.status_code, reply.json()["code"]) == (409, "task-already-finished")
    assert reply.json()["current_status"] == status.value
    assert (await api.client.get(task["links"]["self"])).json()["cancel_requested"] is False


async def test_cancel_bodies_are_strict(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    for body in ({"reason": 5}, {"reason": "x" * 501}, {"why": "x"}, []):
        assert (await api.client.post(task["links"]["cancel"], json=body)).status_code == 422
    junk = await api.client.post(
        task["links"]["cancel"], content=b"{", headers={"Content-Type": "application/json"}
    )
    assert junk.status_code == 400
    assert (await api.client.get(task["links"]["self"])).json()["status"] == "PENDING"
    null = await api.client.post(
        task["links"]["cancel"], content=b"null", headers={"Content-Type": "application/json"}
    )
    assert null.status_code == 202


async def test_cancel_by_filter(api: Api) -> None:
    wrong = [await api.submit(not_before=LATER, metadata={"job": "7"}) for _ in range(3)]
    running = await api.submit(not_before=LATER, metadata={"job": "7"})
    await move(api.store, running["task_id"], Status.PROCESSING, 2)
    kept = await api.submit(not_before=LATER)
    for body in (
        {},
        {"reason": "x"},
        {"metadata": {}},
        {"job": "7"},
        {"status": ["COMPLETED"]},
        {"all": False},
    ):
        assert (await api.client.post("/v1/tasks/cancel", json=body)).status_code == 422, body
    reply = await api.client.post(
        "/v1/tasks/cancel", json={"metadata": {"job": "7"}, "reason": "wrong input"}
    )
    assert (reply.status_code, reply.json()) == (
        202,
        {"cancelled": 3, "cancel_requested": 1, "has_more": False},
    )
    states = {
        task["task_id"]: (task["status"], task["cancel_requested"])
        for task in (await api.client.get("/v1/tasks")).json()["data"]
    }
    assert {states[task["task_id"]] for task in wrong} == {("CANCELLED", True)}
    assert states[running["task_id"]] == ("PROCESSING", True)
    assert states[kept["task_id"]] == ("PENDING", False)


# Class and delete ----------------------------------------------------------------------------------
async def test_the_class_of_a_waiting_task_changes(api: Api) -> None:
    task = await api.submit(not_before=LATER, priority="LOW")
    reply = await api.client.patch(task["links"]["self"], json={"priority": "HIGH"})
    assert (reply.status_code, reply.json()["priority"]) == (200, "HIGH")
    for body in ({}, {"priority": "URGENT"}, {"priority": None}, {"priority": "LOW", "status": "COMPLETED"}):
        assert (await api.client.patch(task["links"]["self"], json=body)).status_code == 422
    await move(api.store, task["task_id"], Status.PROCESSING, 2)
    late = await api.client.patch(task["links"]["self"], json={"priority": "LOW"})
    assert (late.status_code, late.json()["code"]) == (409, "task-not-waiting")
    assert late.json()["current_status"] == "PROCESSING"


async def test_only_final_tasks_are_deleted(api: Api) -> None:
    task = await api.submit(not_before=LATER)
    early = await api.client.delete(task["links"]["self"])
    assert (early.status_code, early.json()["code"]) == (409, "task-not-final")
    await finish(api.store, task["task_id"])
    assert (await api.client.delete(task["links"]["self"])).status_code == 204
    for _ in range(2):
        assert (await api.client.get(task["links"]["self"])).status_code == 404
        assert (await api.client.delete(task["links"]["self"])).status_code == 404
    usage = (await api.client.get("/v1/usage")).json()["data"]
    assert [(line["tasks"], line["completion_tokens"]) for line in usage] == [(1, 2)]
