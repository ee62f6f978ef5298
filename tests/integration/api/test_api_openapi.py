"""The OpenAPI document is whole, and live replies keep to it: schemathesis, bounded and seeded.

PERDURE_FUZZ_EXAMPLES raises the number of examples per operation for a long run.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import hypothesis
import schemathesis
from schemathesis.checks import CHECKS

from api.params import ChatParams
from api.replies import TaskReply
from api.schemas import SubmitBody
from tests.integration.api.harness import CHAT, LATER, Api, finish

EXAMPLES = int(os.environ.get("PERDURE_FUZZ_EXAMPLES", "5"))
ENDLESS = {"/v1/events"}  # ends only when somebody leaves; a task's own stream ends with the task
OUTSIDE = {"/v1/callback-test"}  # sends to wherever the example says


async def document(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = (await api.client.get("/openapi.json")).json()
    return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


async def test_the_document_says_everything(api: Api) -> None:
    found = await document(api)
    assert found["info"]["description"]
    assert set(found["components"]["securitySchemes"]) == {"bearer", "apiKey", "streamToken"}
    assert "HTTPValidationError" not in found["components"]["schemas"]
    ids = set()
    for path, method, operation in operations(found):
        where = f"{method} {path}"
        assert operation["summary"], where
        assert operation["tags"], where
        assert operation["operationId"] not in ids, where
        ids.add(operation["operationId"])
        responses = operation["responses"]
        assert "500" in responses, where
        for status, response in responses.items():
            assert response["description"], (where, status)
            if int(status) >= 400 and path != "/readyz":
                assert list(response["content"]) == ["application/problem+json"], (where, status)
            elif status in ("200", "202"):
                assert response["content"], (where, status)
        if path.startswith(("/v1", "/codec")):
            assert operation["security"], where
            assert {"401", "403", "503"} <= set(responses), where
        if "requestBody" in operation:
            assert {"400", "413", "415", "422", "429"} <= set(responses), where
        if "{task_id}" in path:
            assert "404" in responses, where


async def test_every_reference_resolves(api: Api) -> None:
    found = await document(api)

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                place: Any = found
                for part in reference.removeprefix("#/").split("/"):
                    place = place[part]
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(found)


async def test_examples_are_good(api: Api) -> None:
    found = await document(api)
    (example,) = found["components"]["schemas"]["Submit"]["examples"]
    body = SubmitBody.model_validate(example)
    ChatParams.model_validate(body.params)
    kept = await api.client.post("/v1/tasks", json={**example, "model_id": "chat"})
    assert kept.status_code == 202
    (task,) = found["components"]["schemas"]["Task"]["examples"]
    TaskReply.model_validate(task)
    assert set(task) == set(kept.json())
    unknown = await api.client.post("/v1/tasks", json={**example, "model_id": "nobody"})
    (problem,) = found["components"]["schemas"]["Problem"]["examples"]
    assert {**problem, "request_id": None} == {**unknown.json(), "request_id": None}


async def test_live_replies_keep_to_the_document(served: Api) -> None:
    root = await served.key("root", ["admin"], act_as=True)
    waiting = await served.submit(root, not_before=LATER)
    await served.client.post(waiting["links"]["cancel"], headers=root)  # its stream would not end
    done = await served.submit(root, **CHAT)
    await finish(served.store, done["task_id"])
    url = f"{served.client.base_url}/openapi.json"
    await asyncio.to_thread(_run, url, root, [waiting["task_id"], done["task_id"]])
    assert (await served.client.get("/healthz")).status_code == 200


def _run(url: str, headers: dict[str, str], ids: list[str]) -> None:
    schema = schemathesis.openapi.from_url(url)
    checks = [check for check in CHECKS.get_all() if check.__name__ not in _NOT_MEANT]
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in ENDLESS | OUTSIDE:
            continue
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            _check(operation, mode, headers, ids, checks)


_NOT_MEANT = {
    "positive_data_acceptance",  # a schema cannot say which models there are, nor what their params may be
    "ignored_auth",  # test_api_auth asks every call without a key
    "use_after_free",  # for sequences of calls
    "ensure_resource_availability",
}


def _check(operation: Any, mode: Any, headers: dict[str, str], ids: list[str], checks: list[Any]) -> None:
    counter = iter(range(10**9))

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if "task_id" in (case.path_parameters or {}) and next(counter) % 3 == 0:
            case.path_parameters["task_id"] = ids[next(counter) % len(ids)]  # a task that is there
        case.call_and_validate(headers=headers, checks=checks, timeout=20)

    try:
        check()
    except hypothesis.errors.Unsatisfiable:
        assert mode is schemathesis.GenerationMode.NEGATIVE  # it takes nothing, so nothing can be wrong
        assert not list(operation.iter_parameters())
        assert not operation.body
