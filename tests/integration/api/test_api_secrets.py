"""Canaries: keys, secrets, URL tokens and prompts planted in requests turn up only where they belong."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from perdure.keys import create_key
from perdure.observability.logs import setup_logging
from perdure.settings import ApiSettings
from perdure.store import Store
from tests.integration.api.harness import CHAT, Api, finish, running_app

PROMPT = "canary-prompt-7f3a"
URL_TOKEN = "canary-url-token-91c2"
CALLBACK_SECRET = "canary-callback-secret-51d0-long-enough"
METADATA = "canary-metadata-c0de"
OUTPUT = "canary-output-b00b"


@pytest.fixture
def log_text(settings: ApiSettings) -> Iterator[io.StringIO]:
    """What this process would have written to its log, at DEBUG."""
    stream = io.StringIO()
    secret = settings.model_copy(
        update={"log_level": "DEBUG", "callback_secret": SecretStr(CALLBACK_SECRET), "auth": "keys"}
    )
    root = logging.getLogger()
    level = root.level
    setup_logging(secret, "api", stream=stream)
    yield stream
    for handler in root.handlers[:]:
        if getattr(handler, "stream", None) is stream:
            root.removeHandler(handler)
    root.setLevel(level)


async def test_nothing_secret_is_said(settings: ApiSettings, store: Store, log_text: io.StringIO) -> None:
    keyed = settings.model_copy(update={"auth": "keys", "callback_secret": SecretStr(CALLBACK_SECRET)})
    async with running_app(keyed, store) as one:
        row, token = await create_key(
            store, "alice", ["tasks:read", "tasks:write", "callbacks:write", "admin"]
        )
        secret = token.rpartition(row.key_id)[2][1:]
        one.client.headers["Authorization"] = f"Bearer {token}"
        task = await _use_everything(one)
        failures = await _fail_in_every_way(one, token)
        page = (await one.client.get("/metrics")).text
        shown = (await one.client.get(task["links"]["self"])).text
        events = (await one.client.get(task["links"]["events"])).text
        problems = "".join(failures)
        row_text = repr(await store.tasks.by_id_any(task["task_id"]))
    log = log_text.getvalue()
    assert len(log.splitlines()) > 20
    for line in log.splitlines():
        json.loads(line)
    for canary in (secret, token, CALLBACK_SECRET, URL_TOKEN):
        for place in (log, page, problems, events):
            assert canary not in place.replace(
                f'"callback_url":"https://example.com/hook?token={URL_TOKEN}"', ""
            )
    for canary in (secret, token, CALLBACK_SECRET):
        assert canary not in shown
        assert canary not in row_text
    for canary in (PROMPT, METADATA, OUTPUT):
        assert canary not in log
        assert canary not in page
        assert canary not in problems
    assert PROMPT in shown  # it belongs to its owner


async def _use_everything(one: Api) -> dict[str, dict[str, str]]:
    body = {
        **CHAT,
        "params": {"messages": [{"role": "user", "content": PROMPT}]},
        "callback_url": f"https://example.com/hook?token={URL_TOKEN}",
        "metadata": {"m": METADATA},
    }
    task: dict[str, dict[str, str]] = await one.submit({"Idempotency-Key": "k"}, **body)
    await one.client.post(f"/v1/tasks/{task['task_id']}/rerun")
    await one.client.post("/v1/tasks/bulk", json={"tasks": [body, {**body, "model_id": PROMPT[:60]}]})
    await one.client.get(f"/v1/tasks?metadata.m={METADATA}&include=params,result")
    await one.client.get("/v1/callback-secret")
    await finish(one.store, str(task["task_id"]), error_message=None)
    return task


async def _fail_in_every_way(one: Api, token: str) -> list[str]:
    broken = f'{{"model_id": "chat", "params": {{"messages": "{PROMPT}", "{PROMPT}'
    requests = [
        ("POST", "/v1/tasks", {"content": broken, "headers": {"Content-Type": "application/json"}}),
        (
            "POST",
            "/v1/tasks",
            {"json": {**CHAT, "params": {"messages": [{"role": PROMPT, "content": PROMPT}]}}},
        ),
        ("POST", "/v1/tasks", {"json": {**CHAT, "max_retries": PROMPT}}),
        (
            "POST",
            "/v1/tasks",
            {"json": {**CHAT, "callback_url": f"https://u:{URL_TOKEN}@127.0.0.1/?{URL_TOKEN}"}},
        ),
        ("POST", "/v1/tasks", {"json": CHAT, "headers": {"Idempotency-Key": f"bad {PROMPT}"}}),
        ("GET", f"/v1/tasks?cursor={PROMPT}", {}),
        ("GET", f"/v1/tasks/{PROMPT}", {}),
        ("GET", f"/{PROMPT}?token={URL_TOKEN}", {}),
        ("GET", f"/v1/tasks?api_key={token}", {}),
        ("GET", "/v1/tasks", {"headers": {"Authorization": f"Bearer {token}x"}}),
        ("GET", "/v1/tasks", {"headers": {"Authorization": f"Basic {token}"}}),
        ("GET", "/v1/events?token=" + token, {}),
        ("POST", "/codec/decode", {"json": {"payloads": [{"data": PROMPT, "x": token}]}}),
    ]
    return [(await one.client.request(method, path, **more)).text for method, path, more in requests]
