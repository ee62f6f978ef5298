"""A whole task on the real workflow and the real GPU worker, while its model server dies."""
# ruff: noqa: F811 - fixtures are arguments of the same name

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.models import parse_catalogue
from perdure.task.states import Status
from perdure.temporal import TemporalGate
from tests.support.model_server import DONE, RESET, Call, ModelServer, chunk, finish, reply, stream, usage
from tests.support.waiting import until
from tests.workflow.conftest import Stage, World, stage, world  # noqa: F401 - fixtures
from workers.gpu import GpuWorker

STORY = "Once upon a time there was a bridge that nobody had crossed for years, until one day somebody did."


def teller(dies_after: list[int], pause: float = 0) -> Any:
    """Tells STORY from where the prefix ends, with a pause per word, and breaks off after that many words."""

    def script(call: Call) -> list[Any]:
        last = call.body["messages"][-1]
        left = STORY[len(last["content"]) :] if last["role"] == "assistant" else STORY
        first, *others = left.split(" ")
        pieces = [*([first] if first else []), *(" " + word for word in others)]
        steps: list[Any] = []
        for piece in pieces[: dies_after[0]] if dies_after else pieces:
            steps += [chunk(piece), pause]
        if dies_after:
            dies_after.pop(0)
            return stream(*steps, RESET)
        return stream(*steps, finish(), usage(10, len(pieces)), DONE)

    return script


@asynccontextmanager
async def gpu_worker(stage: Stage, server: ModelServer, **model: str) -> AsyncIterator[None]:
    more = "\n".join(f"{key} = {value}" for key, value in model.items())
    pool, url = stage.pool, server.base_url
    catalogue = parse_catalogue(
        f'[pools.{pool}]\nslots = 2\n[models.m]\npool = "{pool}"\nbase_url = "{url}"\n'
        f'resume = "trailing"\n{more}\n'
    )
    worker = GpuWorker(stage.client, catalogue, stage.pool, None, None, 1, {})
    asked, hurried = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(worker.run(asked, hurried))
    try:
        yield
    finally:
        asked.set()
        hurried.set()
        await asyncio.wait_for(running, 30)
        await worker.aclose()


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as running:
        yield running


async def test_a_server_that_dies_twice_costs_no_token(
    stage: Stage, world: World, server: ModelServer
) -> None:
    server.script(teller([6, 5], pause=0.3))
    gate, shown = TemporalGate(stage.client), []
    async with gpu_worker(stage, server):
        handle = await stage.start(params={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99})
        watching = asyncio.create_task(handle.result())
        while not watching.done():
            beat = await gate.describe_beat(handle.id)
            if beat is not None and beat.text:
                shown.append(beat.text)
            await asyncio.wait([watching], timeout=0.1)
        outcome = world.outcomes[-1]
    projection = outcome.projection
    assert (projection.status, projection.progress) == (Status.COMPLETED, 100)
    assert outcome.result is not None
    assert (outcome.result.text, outcome.result.resumed) == (STORY, True)
    assert len(set(shown)) > 3
    assert all(STORY.startswith(text) for text in shown)
    assert [len(text) for text in shown] == sorted(len(text) for text in shown)
    assert [attempt.outcome for attempt in projection.attempts] == ["failed", "failed", "completed"]
    assert [attempt.error_code for attempt in projection.attempts] == ["stream_truncated"] * 2 + [None]
    assert [attempt.resumed_from_tokens for attempt in projection.attempts] == [0, 6, 11]
    assert projection.retry_count == 2
    assert projection.usage.discarded_tokens == 0
    assert projection.usage.completion_tokens == len(STORY.split())


async def test_a_server_that_still_loads_costs_no_retry(
    stage: Stage, world: World, server: ModelServer
) -> None:
    loading = reply(503, '{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}')
    server.script(loading, loading, loading, teller([]))
    async with gpu_worker(stage, server):
        handle = await stage.start(max_retries=0, unavailable_patience=60)
        outcome = await stage.end(handle)
    assert outcome.projection.status is Status.COMPLETED
    assert outcome.projection.retry_count == 0
    assert {attempt.error_code for attempt in outcome.projection.attempts[:-1]} == {"upstream_unavailable"}


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_permanent_refusal_is_one_call(
    stage: Stage, world: World, server: ModelServer, status: int
) -> None:
    server.script(reply(status, '{"error": {"message": "no such thing"}}'))
    async with gpu_worker(stage, server):
        outcome = await stage.end(await stage.start())
    assert outcome.projection.status is Status.FAILED
    assert "no such thing" in (outcome.projection.error_message or "")
    assert len(outcome.projection.attempts) == len(server.calls) == 1


async def test_retry_after_is_kept(stage: Stage, world: World, server: ModelServer) -> None:
    server.script(reply(429, "", Retry_After="3"), teller([]))
    async with gpu_worker(stage, server):
        outcome = await stage.end(await stage.start())
    assert outcome.projection.status is Status.COMPLETED
    assert server.calls[1].at - server.calls[0].at >= 3


async def test_a_cancel_closes_the_connection_and_keeps_the_text(
    stage: Stage, world: World, server: ModelServer
) -> None:
    server.script(stream(chunk("Once upon"), 3600))
    gate = TemporalGate(stage.client)
    async with gpu_worker(stage, server):
        handle = await stage.start()
        call = await server.call(0, 30)
        await until(lambda: any(row.status is Status.PROCESSING for row in world.rows))
        await gate.signal_cancel(handle.id, "enough")
        await call.closed_by_client(5)
        outcome = await stage.end(handle)
    assert outcome.projection.status is Status.CANCELLED
    assert outcome.result is not None
    assert outcome.result.text == "Once upon"


async def test_the_deadline_closes_the_connection(stage: Stage, world: World, server: ModelServer) -> None:
    server.script(stream(chunk("Once upon"), 3600))
    async with gpu_worker(stage, server):
        handle = await stage.start(total_deadline=datetime.now(UTC) + timedelta(seconds=3))
        call = await server.call(0, 30)
        await call.closed_by_client(10)
        outcome = await stage.end(handle)
    assert (outcome.projection.status, outcome.projection.error_code) == (Status.FAILED, "deadline_exceeded")
