"""The yardstick: a bare Temporal workflow of three activities, and the processes that serve it.

    python -m bench.bare_worker control|pool|hooks ADDRESS DSN SLOTS

`control` runs workflows and the record activity, `pool` the model activity with SLOTS slots, `hooks` the
webhook: the same three processes as ours. It does what a first version of such a service would do and nothing
more: no intake, no progress, no resuming, no signing, no shares. Workflows run unsandboxed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import asyncpg  # type: ignore[import-untyped]
import httpx
import orjson
import uvloop
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, UnsandboxedWorkflowRunner, Worker

CONTROL, POOL, HOOKS = "bench-control", "bench-pool", "bench-hooks"
TABLE = (
    "CREATE TABLE IF NOT EXISTS bare_tasks (id text PRIMARY KEY, started double precision,"
    " ended double precision, result text, committed timestamptz NOT NULL DEFAULT clock_timestamp())"
)
_POLLERS = 20


@dataclass
class BareInput:
    """`seconds` to sleep, or `order` for the model server at `model_url`; `webhook` may be empty."""

    label: str
    seconds: float = 0.0
    webhook: str = ""
    order: str = ""
    model_url: str = ""
    prompt: str = ""


@dataclass
class BareMade:
    """When the activity began and ended (wall clock), and what it made."""

    task_id: str
    started: float
    ended: float
    text: str = ""


@dataclass
class BareHook:
    url: str
    task_id: str
    committed: float


@workflow.defn(name="BareTask")
class BareTask:
    """Model, record, webhook."""

    @workflow.run
    async def run(self, task: BareInput) -> BareMade:
        made = await workflow.execute_activity(
            generate,
            task,
            task_queue=POOL,
            start_to_close_timeout=timedelta(minutes=30),
            heartbeat_timeout=timedelta(seconds=10) if task.order else None,
        )
        minute = timedelta(minutes=1)
        committed = await workflow.execute_activity("record", made, start_to_close_timeout=minute)
        if task.webhook:
            hook = BareHook(task.webhook, made.task_id, committed)
            await workflow.execute_activity("webhook", hook, task_queue=HOOKS, start_to_close_timeout=minute)
        return made


@activity.defn
async def generate(task: BareInput) -> BareMade:
    """Sleeps, or streams from the model server with a heartbeat a second. Run again, it starts over."""
    began, task_id = time.time(), activity.info().workflow_id or ""
    if not task.order:
        if task.seconds:
            await asyncio.sleep(task.seconds)
        return BareMade(task_id, began, time.time())
    beating = asyncio.create_task(_beat())
    try:
        text = await _stream(task)
    finally:
        beating.cancel()
    return BareMade(task_id, began, time.time(), text)


async def _stream(task: BareInput) -> str:
    body = {"messages": [{"role": "user", "content": task.order}], "stream": True}
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as http,
        http.stream("POST", f"{task.model_url}/chat/completions", json=body) as answer,
    ):
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    return "".join(orjson.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in lines)


async def _beat() -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(1)


class Records:
    """Writes the row; answers when it was committed."""

    def __init__(self, database: asyncpg.Pool) -> None:
        self._database = database

    @activity.defn
    async def record(self, made: BareMade) -> float:
        await self._database.execute(
            "INSERT INTO bare_tasks (id, started, ended, result) VALUES ($1, $2, $3, $4)"
            " ON CONFLICT DO NOTHING",
            made.task_id,
            made.started,
            made.ended,
            made.text,
        )
        return time.time()


class Hooks:
    """Posts the webhook on a kept connection."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    @activity.defn
    async def webhook(self, hook: BareHook) -> int:
        body = {"task_id": hook.task_id, "committed": hook.committed}
        return (await self._http.post(hook.url, json=body)).raise_for_status().status_code


async def _main(role: str, address: str, dsn: str, slots: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client = await Client.connect(address)
    polls = PollerBehaviorSimpleMaximum(_POLLERS)
    second = timedelta(seconds=1)
    async with asyncpg.create_pool(dsn, min_size=0, max_size=10) as database, httpx.AsyncClient() as http:
        if role == "control":
            worker = Worker(
                client,
                task_queue=CONTROL,
                workflows=[BareTask],
                activities=[Records(database).record],
                workflow_runner=UnsandboxedWorkflowRunner(),
                workflow_task_poller_behavior=polls,
                activity_task_poller_behavior=polls,
            )
        elif role == "pool":
            worker = Worker(
                client,
                task_queue=POOL,
                activities=[generate],
                max_concurrent_activities=slots,
                activity_task_poller_behavior=PollerBehaviorSimpleMaximum(min(slots, 5)),
                max_heartbeat_throttle_interval=second,
                disable_eager_activity_execution=True,
            )
        else:
            worker = Worker(
                client,
                task_queue=HOOKS,
                activities=[Hooks(http).webhook],
                activity_task_poller_behavior=polls,
            )
        async with worker:
            await stop.wait()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
