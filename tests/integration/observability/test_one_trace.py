"""One trace from the request to the callback, over four real processes, with a retry of each kind in it."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.observability.processes import Processes
from tests.support.model_server import DONE, ModelServer, finish, reply, stream, usage, words
from tests.support.otlp import Collector, Span
from tests.support.receiver import Receiver, answer

CALLER = "00-" + "5c" * 16 + "-" + "7d" * 8 + "-01"
MODELS = """
[pools.local]
slots = 2
[models.scripted]
pool = "local"
executor = "openai"
base_url = "{url}"
"""


async def finished(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """The task once it is final."""
    async with asyncio.timeout(60):
        while True:
            task: dict[str, Any] = (await client.get(url, headers={"Prefer": "wait=10"})).json()
            if task["status"] in {"COMPLETED", "FAILED", "CANCELLED"}:
                return task


def enough(spans: list[Span]) -> bool:
    names = [one.name for one in spans]
    return "task" in names and "callback try 2" in names and "POST /v1/tasks" in names


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_submit_to_callback_is_one_trace_with_the_retries_in_it(
    tmp_path: Path, database_url: str, own_temporal: str
) -> None:
    with Collector() as collector:
        async with ModelServer() as model, Receiver([answer(503), answer(200)]) as receiver:
            model.script(
                reply(500, '{"error": {"message": "try again"}}'),
                stream(*words("hello there"), finish(), usage(7, 2), DONE),
            )
            environment = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
                "PERDURE_CALLBACK_SECRET": base64.b64encode(b"k" * 32).decode(),
            }
            models = MODELS.format(url=model.base_url)
            stack = await asyncio.to_thread(
                Processes(tmp_path, database_url, own_temporal, models=models, env=environment).__enter__
            )
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                    sent = await client.post(
                        stack.url("/v1/tasks"),
                        json={
                            "model_id": "scripted",
                            "params": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
                            "callback_url": receiver.url("/hook"),
                        },
                        headers={"traceparent": CALLER},
                    )
                    assert sent.status_code == 202, sent.text
                    task = await finished(client, stack.url(f"/v1/tasks/{sent.json()['task_id']}"))
                assert task["status"] == "COMPLETED", task
                await receiver.received(2)
                spans = await asyncio.to_thread(collector.wait_for, enough)
            finally:
                await asyncio.to_thread(stack.__exit__, None, None, None)
            calls, requests = model.calls, receiver.requests
    ours = [one for one in spans if one.trace_id == "5c" * 16]
    by_name = {one.name: one for one in ours}
    request, whole = by_name["POST /v1/tasks"], by_name["task"]

    assert request.parent_id == "7d" * 8
    assert whole.parent_id == request.span_id
    for name in ("attempt 1", "attempt 2", "commit", "callback try 1", "callback try 2"):
        assert by_name[name].parent_id == whole.span_id, name
    chats = sorted((one for one in ours if one.name == "chat scripted"), key=lambda one: one.start)
    assert [one.parent_id for one in chats] == [by_name["attempt 1"].span_id, by_name["attempt 2"].span_id]
    assert [one.failed for one in chats] == [True, False]
    assert by_name["attempt 1"].failed
    tries = [by_name["callback try 1"], by_name["callback try 2"]]
    assert [one.failed for one in tries] == [True, False]
    assert {one.service for one in ours} == {f"perdure-{r}" for r in ("api", "control", "callbacks", "gpu")}

    facts = chats[1].attributes
    assert facts["gen_ai.operation.name"] == "chat"
    assert facts["gen_ai.request.model"] == "scripted"
    assert facts["gen_ai.request.max_tokens"] == 5
    assert facts["gen_ai.response.finish_reasons"] == ["stop"]
    assert facts["gen_ai.usage.input_tokens"] == 7
    assert facts["gen_ai.usage.output_tokens"] == 2
    assert facts["gen_ai.response.time_to_first_chunk"] > 0
    assert whole.attributes["perdure.task.id"] == task["task_id"]
    assert b"hello there" not in collector.raw  # no content

    for headers, one in zip([call.headers for call in calls] + requests, [*chats, *tries], strict=True):
        assert headers["traceparent"][:52] == f"00-{'5c' * 16}-{one.span_id}"
    lines = [json.loads(line) for line in stack.logs().splitlines()]
    about = [line for line in lines if line.get("task_id") == task["task_id"]]
    told = {line["worker"].split(":")[0] for line in about if line.get("trace_id") == "5c" * 16}
    assert told == {"api", "control", "callbacks", "gpu"}
