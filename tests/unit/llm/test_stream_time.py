"""Time and size on a real socket: each limit by its own name, and the wire cut at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from perdure.contracts import Limits
from perdure.llm.base import Job
from perdure.observability.redact import protect
from perdure.task.errors import ErrorCode as Code
from tests.support.generation import HELLO, LoopLag, Told, attempt, executor_for
from tests.support.model_server import (
    DONE,
    ModelServer,
    chunk,
    event,
    finish,
    reply,
    stream,
    usage,
    words,
)

FOREVER = 3600
JOB = Job(task_id="task_" + "0" * 32, attempt=1, params=HELLO, limits=Limits())


async def go(server: ModelServer, params: Any = None, **model: Any) -> Told:
    executor = executor_for(server.base_url, **model)
    try:
        return await attempt(executor, params)
    finally:
        await executor.aclose()


async def timed(server: ModelServer, **model: Any) -> tuple[Told, float]:
    began = time.monotonic()
    told = await go(server, **model)
    return told, time.monotonic() - began


# Limits of time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "silent",
    [
        [FOREVER],
        stream(FOREVER),
        stream(*[b": keep-alive\n\n", 0.05] * 100),
        stream(*[chunk(""), 0.05] * 100),
        stream(*[chunk(role="assistant"), usage(3, 0), 0.05] * 100),
    ],
    ids=["no-bytes", "headers-only", "comments", "empty-chunks", "roles-and-usage"],
)
async def test_nothing_comes(server: ModelServer, silent: list[Any]) -> None:
    server.script(silent)
    told, seconds = await timed(server, first_token_timeout=0.4)
    assert told.failed.code is Code.FIRST_TOKEN_TIMEOUT
    assert not told.failed.refused
    assert 0.35 <= seconds < 3
    await server.calls[0].closed_by_client(2)


@pytest.mark.parametrize(
    "silent",
    [[FOREVER], [b": keep-alive\n\n", 0.05] * 100, [chunk(""), 0.05] * 100],
    ids=["silence", "comments", "empty-chunks"],
)
async def test_nothing_more_comes(server: ModelServer, silent: list[Any]) -> None:
    server.script(stream(*words("one two three"), *silent))
    told, seconds = await timed(server, token_timeout=0.4)
    assert told.failed.code is Code.TOKEN_TIMEOUT
    assert told.beat.text == "one two three"
    assert 0.35 <= seconds < 3
    await server.calls[0].closed_by_client(2)


async def test_a_slow_steady_stream_is_not_killed(server: ModelServer) -> None:
    steps = [step for n in range(12) for step in (0.1, chunk(f"{n} "))]
    server.script(stream(*steps, finish(), DONE))
    told, seconds = await timed(server, token_timeout=0.5, first_token_timeout=0.5)
    assert told.done.text.split() == [str(n) for n in range(12)]
    assert seconds > 1.0


async def test_a_late_first_token_has_a_limit_of_its_own(server: ModelServer) -> None:
    server.script(stream(0.6, *words("late but fine"), finish(), DONE))
    assert (await go(server, first_token_timeout=5, token_timeout=0.3)).done.text == "late but fine"


async def test_reasoning_is_real_output(server: ModelServer) -> None:
    thoughts = [step for _ in range(8) for step in (0.1, chunk(reasoning_content="hm "))]
    server.script(stream(*thoughts, chunk("yes"), finish(), DONE))
    assert (await go(server, token_timeout=0.5)).done.text == "yes"


async def test_a_finished_stream_that_stays_open_ends(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.llm.wire.AFTER_FINISH", 0.3)
    server.script(stream(chunk("a"), finish(), usage(1, 1), FOREVER))
    told, seconds = await timed(server, token_timeout=60)
    assert told.done.text == "a"
    assert told.track.usage(ended_well=True).completion_tokens == 1
    assert seconds < 5


@contextmanager
def deaf_socket() -> Iterator[str]:
    """An address that accepts no connection and refuses none: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        for filler in fillers:
            filler.close()


async def test_nobody_accepts() -> None:
    with deaf_socket() as base_url:
        executor = executor_for(base_url, connect_timeout=0.4, first_token_timeout=30)
        told = await asyncio.wait_for(attempt(executor), 10)
        await executor.aclose()
    assert told.failed.code is Code.CONNECT_TIMEOUT


async def test_nobody_is_there(server: ModelServer) -> None:
    port = server.port
    await server.stop()
    executor = executor_for(f"http://127.0.0.1:{port}/v1")
    fault = (await attempt(executor)).failed
    await executor.aclose()
    assert (fault.code, fault.refused, fault.retryable) == (Code.UPSTREAM_UNAVAILABLE, True, True)
    assert "base_url" in fault.message


# The wire is cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [[0.01, chunk("x ")] * 20_000, [chunk("x "), FOREVER]], ids=["busy", "silent"]
)
async def test_closing_closes_the_connection_at_once(server: ModelServer, steps: list[Any]) -> None:
    server.script(stream(*steps))
    executor = executor_for(server.base_url)
    async with aclosing(executor.run(JOB)) as deltas:
        await anext(deltas)
        call = await server.call(0)
        before = time.monotonic()
    assert await call.closed_by_client(2) - before < 1
    written = call.written
    await asyncio.sleep(0.1)
    assert call.written <= written + 200
    await executor.aclose()


@pytest.mark.parametrize("where", ["headers", "first", "middle"])
async def test_cancelling_closes_the_connection_at_once(server: ModelServer, where: str) -> None:
    script = {"headers": [FOREVER], "first": stream(FOREVER), "middle": stream(chunk("x "), FOREVER)}
    server.script(script[where])
    executor = executor_for(server.base_url, first_token_timeout=60, token_timeout=60)
    work = asyncio.create_task(attempt(executor))
    call = await server.call(0)
    await asyncio.sleep(0.05)
    before = time.monotonic()
    work.cancel()
    assert await call.closed_by_client(2) - before < 1
    await asyncio.wait([work])
    assert work.cancelled()
    await executor.aclose()


async def test_each_request_has_its_own_connection(server: ModelServer) -> None:
    """So no request meets a pooled connection that the server has closed in the meantime."""
    server.script(stream(chunk("a"), finish(), DONE, FOREVER))
    executor = executor_for(server.base_url)
    for _ in range(3):
        assert (await attempt(executor)).done.text == "a"
    for call in server.calls:
        await call.closed_by_client(2)
    server.script([])  # reads the request and closes
    fault = (await attempt(executor)).failed
    assert (fault.code, fault.retryable, fault.refused) == (Code.UPSTREAM_UNAVAILABLE, True, False)
    await executor.aclose()


# Limits of size --------------------------------------------------------------------------------------


async def test_output_is_capped_while_it_streams(server: ModelServer) -> None:
    server.script(stream(*[chunk("x" * 10_000)] * 5000, finish(), DONE))
    executor = executor_for(server.base_url)
    told = await attempt(executor, max_output_bytes=100_000)
    assert (told.failed.code, told.failed.retryable) == (Code.OUTPUT_TOO_LARGE, False)
    await server.calls[0].closed_by_client(2)
    assert server.calls[0].written < 25_000_000  # of 50 MB; the rest is in the sockets' buffers
    server.script(stream(*[chunk(tool_calls=[{"index": 0, "function": {"arguments": "x" * 1000}}])] * 200))
    assert (await attempt(executor, max_output_bytes=100_000)).failed.code is Code.OUTPUT_TOO_LARGE
    await executor.aclose()


async def test_one_huge_line_does_not_hold_up_the_others(server: ModelServer) -> None:
    """Fifty streams on one worker, one of which gets a single 5 MB line."""
    huge = event(json.dumps({"choices": [{"delta": {"content": "x" * 5_000_000}}]}))
    steady = stream(*[0.05, chunk("w ")] * 20, finish(), DONE)
    server.script(*[steady] * 49, stream(huge, finish(), DONE))
    executor = executor_for(server.base_url)
    others = [asyncio.create_task(attempt(executor)) for _ in range(49)]
    await server.call(48, 30)
    async with LoopLag() as lag:
        assert (await attempt(executor)).failed.code is Code.OUTPUT_TOO_LARGE
    assert all(one.done.text == "w " * 20 for one in await asyncio.gather(*others))
    assert lag.worst < 0.2
    await executor.aclose()


async def test_a_line_just_below_the_limit_is_read(server: ModelServer) -> None:
    server.script(stream(chunk("é" * 150_000), finish(), DONE))  # six bytes each as JSON
    executor = executor_for(server.base_url)
    async with LoopLag() as lag:
        assert (await attempt(executor)).done.text == "é" * 150_000
    assert lag.worst < 0.2
    await executor.aclose()


async def test_a_compressed_bomb_is_bounded(server: ModelServer) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = packer.compress(b"data: " + b"x" * 40_000_000) + packer.flush()
    server.script(stream(bomb, Content_Encoding="gzip"))
    executor = executor_for(server.base_url)
    async with LoopLag() as lag:
        assert (await attempt(executor)).failed.code is Code.OUTPUT_TOO_LARGE
    assert lag.worst < 0.2
    await executor.aclose()


# Statuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 413, 422, 408, 409, 425, 429, 500, 502, 503, 504, 529]
)
async def test_one_call_per_attempt_whatever_the_status(server: ModelServer, status: int) -> None:
    server.script(reply(status, json.dumps({"error": {"message": "boom"}}), Retry_After="3"))
    fault = (await go(server)).failed
    assert len(server.calls) == 1
    assert fault.retry_after == 3.0
    assert "boom" in fault.message
    assert fault.retryable == (status in (408, 409, 425, 429) or status >= 500)


async def test_a_refusal_whose_body_never_ends_is_still_named(server: ModelServer) -> None:
    head = b"HTTP/1.1 503 Nope\r\nContent-Length: 100\r\n\r\n"
    server.script([head, b"half", FOREVER])
    told, seconds = await timed(server, first_token_timeout=0.4)
    assert (told.failed.code, told.failed.refused) == (Code.UPSTREAM_UNAVAILABLE, True)
    assert seconds < 3


async def test_no_secret_and_no_prompt_in_messages(server: ModelServer) -> None:
    key = "sk-canary-9876543210"
    protect(key)
    prompt = {"messages": [{"role": "user", "content": "My diary: CANARY-PROMPT is the word of the day."}]}
    error = {
        "message": f"bad header 'Authorization: Bearer {key}' for input {prompt['messages'][0]['content']}"
    }
    server.script(reply(400, json.dumps({"error": error})))
    executor = executor_for(server.base_url, api_key=key)
    message = (await attempt(executor, prompt)).failed.message
    await executor.aclose()
    assert "canary" not in message.lower()
    assert "bad header" in message


# The breaker -----------------------------------------------------------------------------------------


async def test_a_dead_server_is_tried_by_a_few(server: ModelServer) -> None:
    server.script(reply(503, ""))
    executor = executor_for(server.base_url)
    told = [await attempt(executor) for _ in range(50)]
    assert len(server.calls) == 3
    assert executor.state().state == "open"
    assert all(one.failed.refused for one in told)
    assert all(one.failed.retry_after for one in told[3:])
    server.script(stream(chunk("a"), finish(), DONE))
    await asyncio.sleep(1.1)
    assert (await attempt(executor)).done.text == "a"
    assert executor.state().state == "recovering"
    await executor.aclose()


async def test_a_probe_that_is_cancelled_does_not_wedge_the_breaker(server: ModelServer) -> None:
    server.script(reply(503, ""))
    executor = executor_for(server.base_url, first_token_timeout=60)
    for _ in range(3):
        await attempt(executor)
    server.script([FOREVER])
    await asyncio.sleep(1.1)
    probe = asyncio.create_task(attempt(executor))
    await server.call(3)
    assert (await attempt(executor)).failed.refused
    probe.cancel()
    await asyncio.wait([probe])
    server.script(stream(chunk("a"), finish(), DONE))
    assert (await attempt(executor)).done.text == "a"
    await executor.aclose()


async def test_faults_that_are_no_refusal_leave_it_closed(server: ModelServer) -> None:
    server.script(reply(400, ""))
    executor = executor_for(server.base_url)
    for _ in range(6):
        assert (await attempt(executor)).failed.code is Code.INVALID_REQUEST
    assert len(server.calls) == 6
    assert executor.state().state == "closed"
    await executor.aclose()
