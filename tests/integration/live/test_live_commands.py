"""The commands as a person or a script runs them, against a real stack."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from contextlib import suppress
from typing import Any

import pytest

from perdure.client import Client
from tests.integration.live.stack import CLEAN, COMMAND, Proxy, Stack
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("live_stack")

FAST = '{"tokens": 30, "tokens_per_second": 300}'
SLOW = '{"tokens": 100000, "tokens_per_second": 20}'


async def perdure(url: str, *arguments: str, stdin: bytes = b"", code: int | None = 0) -> tuple[str, str]:
    """Runs a command in a pipe. Returns stdout and stderr; the exit code must be `code`."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        env={**CLEAN, "PERDURE_URL": url},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin)
    assert code is None or process.returncode == code, (process.returncode, out, err)
    return out.decode(), err.decode()


def submit(*more: str, params: str = FAST) -> list[str]:
    return ["submit", "--model", "simulated", "--params", params, *more]


async def test_submit_get_list_and_cancel(stack: Stack, proxy: Proxy) -> None:
    url = proxy.url
    out, _ = await perdure(url, *submit("--priority", "low", "--metadata", "job=7", "hello"))
    task_id = out.strip()
    out, err = await perdure(url, *submit("--wait"), stdin=b"from a pipe")
    assert len(out.split()) == 30
    assert err.startswith("task_")
    async with Client(url) as client:
        first = await client.finished(task_id)
    assert (first["priority"], first["metadata"]) == ("LOW", {"job": "7"})
    assert first["params"]["messages"] == [{"role": "user", "content": "hello"}]
    out, _ = await perdure(url, "get", task_id)
    assert "status:    COMPLETED\n" in out
    out, _ = await perdure(url, "get", "--text", task_id)
    assert out.strip() == first["result"]["text"]
    out, _ = await perdure(url, "get", "--json", task_id)
    assert json.loads(out)["task_id"] == task_id
    out, _ = await perdure(url, "list", "--limit", "2", "--status", "completed")
    assert len(out.splitlines()) == 2
    assert all(len(line.split("\t")) == 6 for line in out.splitlines())
    out, _ = await perdure(url, *submit("--json", "x", params=SLOW))
    running = json.loads(out)["task_id"]
    out, _ = await perdure(url, "cancel", "--reason", "enough", running)
    assert running in out
    async with Client(url) as client:
        assert (await client.finished(running))["status"] == "CANCELLED"
    out, _ = await perdure(url, "cancel", running)
    assert out.strip() == f"{running} CANCELLED"


async def test_a_watch_in_a_pipe_and_its_exit_codes(stack: Stack, proxy: Proxy) -> None:
    url = proxy.url
    out, _ = await perdure(url, *submit("--watch", "x"))
    lines = out.splitlines()
    assert lines[0].split()[1] in ("PENDING", "QUEUED", "PROCESSING")
    assert [line.split()[1] for line in lines if line.startswith("task_")][-1] == "COMPLETED"
    task_id = lines[0].split()[0]
    out, _ = await perdure(url, "watch", "--json", task_id)
    assert [json.loads(line)["status"] for line in out.splitlines()] == ["COMPLETED", "COMPLETED"]
    fault = '{"fault": {"code": "invalid_request"}}'
    _, err = await perdure(url, *submit("--wait", "x", params=fault), code=1)
    assert "FAILED invalid_request" in err
    out, _ = await perdure(url, *submit("x", params=SLOW))
    watching = asyncio.create_task(perdure(url, "watch", out.strip(), code=3))
    interrupted = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("watch", out.strip()),
        env={**CLEAN, "PERDURE_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert interrupted.stdout is not None
    await interrupted.stdout.readline()  # it watches
    interrupted.send_signal(signal.SIGINT)
    _, err = await interrupted.communicate()
    assert (interrupted.returncode, err) == (130, b"")
    await perdure(url, "cancel", out.strip())
    out, _ = await watching
    assert "CANCELLED" in out


async def test_mistakes_are_one_line_and_a_code(stack: Stack, proxy: Proxy) -> None:
    cases: list[tuple[list[str], int, str]] = [
        (["submit", "x"], 2, "--model"),  # two models: one must be named
        (submit("--params", "[]", "x"), 2, "JSON object"),
        (["submit", "--model", "simulated"], 2, "no prompt"),
        (["get", "task_" + "0" * 32], 5, "task-not-found"),
        (["watch", "../../healthz"], 5, "task-not-found"),
        (["submit", "--model", "nope", "x"], 5, "model-unknown"),
    ]
    runs = [perdure(proxy.url, *arguments, code=code) for arguments, code, _ in cases]
    runs.append(perdure("http://127.0.0.1:1", "get", "task_x", code=4))
    words = [*(word for _, _, word in cases), "does not answer"]
    for (_, err), word in zip(await asyncio.gather(*runs), words, strict=True):
        assert word in err
        assert len(err.strip().splitlines()) == 1, err


async def test_a_watch_goes_on_when_its_api_process_ends(stack: Stack, proxy: Proxy) -> None:
    """A deploy of the API: the process that serves the watch stops, another one goes on."""
    out, _ = await perdure(proxy.url, *submit("x", params='{"tokens": 200, "tokens_per_second": 25}'))
    task_id = out.strip()
    served = len(proxy.served)
    watching = asyncio.create_task(perdure(proxy.url, "watch", "--json", task_id))
    await until(lambda: len(proxy.served) > served)
    await asyncio.sleep(1.5)
    victim = stack.ports.index(proxy.served[served])
    stack.apis[victim].send_signal(signal.SIGTERM)
    try:
        out, _ = await watching
    finally:
        await asyncio.to_thread(stack.apis[victim].wait, 15)
        stack.apis[victim] = stack.start_api(stack.ports[victim])
    events: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert len(proxy.served) > served + 1
    text = ""
    for event in events[:-1]:
        if part := event["partial"]:
            assert part["offset"] == len(text)
            text += part["text"]
    assert text == events[-1]["result"]["text"]


async def test_a_person_sees_a_bar_and_the_text(stack: Stack, proxy: Proxy) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *submit("--watch", "x", params='{"tokens": 60, "tokens_per_second": 30}'),
        env={**CLEAN, "PERDURE_URL": proxy.url, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""

    def take() -> bytes:
        with suppress(OSError):  # the other side is closed
            return os.read(ours, 65536)
        return b""

    while chunk := await asyncio.to_thread(take):
        seen += chunk
    os.close(ours)
    assert await process.wait() == 0
    screen = seen.decode()
    assert "PROCESSING" in screen
    assert "\u2501" in screen, "a bar"
    assert "COMPLETED" in screen.splitlines()[-1] or "COMPLETED" in screen
    assert "the durable task keeps its place" in screen
    assert sys.executable not in screen
