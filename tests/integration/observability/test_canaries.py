"""Canaries planted everywhere, failures of every kind at DEBUG, then a search of everything that was written.

Keys and secrets must stand nowhere; prompts and outputs only in their own tables and in Temporal's payloads;
URL tokens only in the row of the callback they belong to.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from temporalio.client import Client

from tests.integration.observability.processes import COMMANDS, Processes
from tests.support.model_server import DONE, RESET, Call, ModelServer, Steps, finish, reply, stream, words
from tests.support.otlp import Collector
from tests.support.receiver import Receiver, Request, answer

PROMPT = "pr0mptC4n4ryZebraCrossing"
OUTPUT = "0utputC4n4ryMarmalade"
UPSTREAM_KEY = "upstr34mC4n4ryKeyValue"
URL_TOKEN = "urlT0kenC4n4ryValue"
USERINFO = "us3rinfoC4n4ry"
BAD_KEY = "sk_b4dC4n4ryKey_doesNotExist"
SECRET_KEY = base64.b64encode(b"C4n4rySecretKeyOfTheWholeHouse!!").decode()

MODELS = """
[pools.local]
slots = 4
[models.scripted]
pool = "local"
executor = "openai"
base_url = "{url}"
api_key_env = "UPSTREAM_KEY"
[models.absent]
pool = "local"
executor = "openai"
base_url = "http://127.0.0.1:1/v1"
api_key_env = "UPSTREAM_KEY"
unavailable_patience = 0
[models.broken]
pool = "local"
executor = "python"
import_path = "broken_model:run"
"""
BROKEN = """
async def run(params, context):
    raise RuntimeError(f"cannot run {params}")
    yield
"""


def misbehave(call: Call) -> Steps:
    """A model server that fails as told and repeats whatever it was sent, headers included."""
    wanted = call.body["messages"][0]["content"].split()[0]
    echo = json.dumps({"error": {"message": f"I got {call.headers} and {call.raw.decode()}"}})
    if wanted == "well":
        return stream(*words(OUTPUT), finish(), DONE)
    if wanted == "cut":
        return stream(*words(OUTPUT), RESET)
    if wanted == "noise":
        return stream(f"data: {echo[:-1]}\n\n".encode())
    return reply(int(wanted), echo)


def refuse(request: Request) -> Any:
    """A receiver that repeats the callback and asks to be sent elsewhere."""
    place = {"Location": f"https://{USERINFO}:x@example.com/?t={URL_TOKEN}"}
    return answer(302, request.body, place)


@dataclass
class Planted:
    """Where the canaries went, and what came of it."""

    stack: Processes
    collector: Collector
    secrets: dict[str, str]
    replies: list[httpx.Response]


async def provoke(stack: Processes, receiver: Receiver) -> tuple[dict[str, str], list[httpx.Response]]:
    """Plants canaries and makes every kind of failure. Returns what must stand nowhere, and all replies."""
    key = (await asyncio.to_thread(stack.run, "keys", "create", "--user", "alice")).strip()
    replies: list[httpx.Response] = []
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=stack.url(""), headers=headers, timeout=60, trust_env=False
    ) as client:
        issued = (await client.post("/v1/callback-secret/rotate")).json()

        async def submit(model: str, first: str, **more: Any) -> None:
            messages = [{"role": "user", "content": f"{first} {PROMPT} tell me"}]
            body = {"model_id": model, "params": {"messages": messages}, "max_retries": 0} | more
            sent = await client.post("/v1/tasks", json=body, headers={"Prefer": "wait=30"})
            replies.append(sent)
            if "task_id" in sent.json():
                place = f"/v1/tasks/{sent.json()['task_id']}"
                replies.append(await client.get(place + "/callbacks"))
                replies.append(await client.get(place + "/events", timeout=30))

        hook = receiver.url(f"/hook?token={URL_TOKEN}")
        await asyncio.gather(
            submit("scripted", "well", callback_url=hook),
            *(submit("scripted", status) for status in ("400", "401", "429", "500")),
            submit("scripted", "cut"),
            submit("scripted", "noise"),
            submit("absent", "never"),
            submit("broken", "never", callback_url=hook),
            submit("scripted", "well", callback_url=f"https://{USERINFO}:pw@127.0.0.1/?t={URL_TOKEN}"),
            submit("no-such-model", "x"),
            submit("scripted", "x", max_tokens=PROMPT, temperature={"a": [PROMPT]}),
        )
        await receiver.received(2)
        for content in (
            f'{{"model_id": "scripted", "params": "{PROMPT}"',
            f'{{"{PROMPT}": 1, "{PROMPT}": 2}}',
            f'"{PROMPT}\ud800"'.encode("utf-8", "surrogatepass"),
        ):
            typed = {"Content-Type": "application/json"}
            replies.append(await client.post("/v1/tasks", content=content, headers=typed))
        wrong = (f"Bearer {BAD_KEY}", f"Basic {BAD_KEY}", BAD_KEY, "Bearer " + key[:-1])
        replies += [await client.get("/v1/tasks", headers={"Authorization": bad}) for bad in wrong]
        replies.append(await client.get(f"/v1/tasks/{PROMPT}?token={URL_TOKEN}"))
        replies.append(await client.get("/v1/tasks", params={"cursor": PROMPT}))
    secrets = {
        "api key": key,
        "callback secret": issued["secret"],
        "callback secret, whsec": issued["whsec"].removeprefix("whsec_"),
        "upstream key": UPSTREAM_KEY,
        "userinfo": USERINFO,
        "bad key": BAD_KEY,
        "secret key": SECRET_KEY,
    }
    return secrets, replies


@pytest.fixture
async def planted(tmp_path: Path, database_url: str, own_temporal: str) -> AsyncIterator[Planted]:
    """Everything planted and provoked; the processes still run."""
    (tmp_path / "broken_model.py").write_text(BROKEN)
    with Collector() as collector:
        async with ModelServer() as model, Receiver(refuse) as receiver:
            model.script(misbehave)
            environment = {
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
                "PERDURE_AUTH": "keys",
                "PERDURE_LOG_LEVEL": "DEBUG",
                "PERDURE_SECRET_KEY": SECRET_KEY,
                "UPSTREAM_KEY": UPSTREAM_KEY,
            }
            models = MODELS.format(url=model.base_url)
            stack = Processes(tmp_path, database_url, own_temporal, models=models, env=environment)
            await asyncio.to_thread(stack.__enter__)
            try:
                secrets, replies = await provoke(stack, receiver)
                yield Planted(stack, collector, secrets, replies)
            finally:
                await asyncio.to_thread(stack.__exit__, None, None, None)


async def tables(database_url: str) -> dict[str, str]:
    """Every row of every table as text."""
    connection = await asyncpg.connect(database_url)
    try:
        names = await connection.fetch(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        )
        found = {}
        for (name,) in names:
            rows = await connection.fetch(f'SELECT t::text FROM "{name}" t')
            found[name] = _with_bytes("\n".join(row[0] for row in rows))
        return found
    finally:
        await connection.close()


def _with_bytes(text: str) -> str:
    """The text, and what its bytea values hold."""
    held = re.findall(r"\\x([0-9a-f]{8,})", text)
    return text + "".join(bytes.fromhex(one[: len(one) // 2 * 2]).decode("utf-8", "replace") for one in held)


async def histories(address: str) -> str:
    """Every workflow's history with its payloads opened, and what the list of workflows shows."""
    client = await Client.connect(address)
    found = []
    async for run in client.list_workflows():
        handle = client.get_workflow_handle(run.id, run_id=run.run_id)
        text = (await handle.fetch_history()).to_json()
        opened = (
            base64.b64decode(one).decode("utf-8", "replace") for one in re.findall(r'"data": "(.*?)"', text)
        )
        found += [text, *opened, str(run.search_attributes)]
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_canaries_are_found_nowhere_they_do_not_belong(
    planted: Planted, database_url: str, own_temporal: str
) -> None:
    pages = await asyncio.gather(*(asyncio.to_thread(planted.stack.page, name) for name in COMMANDS))
    rows = await tables(database_url)
    texts = {
        "logs": planted.stack.logs(),
        "metrics": "".join(pages),
        "spans": planted.collector.raw.decode("utf-8", "replace"),
        "histories": await histories(own_temporal),
        "replies": "".join(one.text + str(one.headers) for one in planted.replies),
        **{f"table {name}": text for name, text in rows.items()},
    }
    assert PROMPT in texts["histories"]  # so that the search is known to see
    assert PROMPT in texts["table task_payloads"]
    assert "callback tried" in texts["logs"]
    assert texts["spans"]

    for what, secret in planted.secrets.items():
        places = [place for place, text in texts.items() if secret in text]
        assert places == [], f"{what} stands in {places}"
    own = {
        PROMPT: {"histories", "table task_payloads", "replies"},
        # A receiver that repeats a callback puts it into the sample that the task's owner is shown.
        OUTPUT: {
            "histories",
            "table task_results",
            "table callback_deliveries",
            "table callback_tries",
            "replies",
        },
        URL_TOKEN: {"table tasks", "table callback_deliveries", "replies"},
    }
    for canary, allowed in own.items():
        places = {place for place, text in texts.items() if canary in text}
        lines = [line for line in texts["logs"].splitlines() if canary in line]
        assert places <= allowed, f"{canary} stands in {places - allowed}: {lines[:3]}"
    for line in texts["logs"].splitlines():
        assert isinstance(json.loads(line), dict)
    errors = [one.json().get("error_message") or "" for one in planted.replies if "error_message" in one.text
              and one.headers["content-type"].startswith("application/json")]  # fmt: skip
    assert any(errors)
    assert not any(PROMPT in message for message in errors)
