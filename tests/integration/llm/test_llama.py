"""The client against a real llama.cpp server with a small model. Texts are compared, never asserted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.contracts import Beat
from perdure.embedded.model_server import command
from perdure.embedded.ports import free_port
from perdure.llm.check import check_model
from perdure.llm.openai import OpenAIExecutor
from perdure.models import parse_catalogue
from perdure.task.errors import ErrorCode as Code
from tests.support.generation import Told, attempt, executor_for
from tests.support.waiting import until

pytestmark = [pytest.mark.llm, pytest.mark.xdist_group("llm"), pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
QUESTION = "Write three sentences about a bridge over a river."


def ask(tokens: int = 40, content: str = QUESTION) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 1,
    }


class Llama:
    """The server as a process that can be killed and started again on its port."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._process = self._spawn()
        await until(self.ready, seconds=120, every=0.1)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(command(self.port), cwd=ROOT, stdout=log, stderr=log)

    async def ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
            try:
                return (await client.get(self.url + "/health")).status_code == 200
            except httpx.HTTPError:
                return False

    @property
    def up(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    async def busy(self) -> int:
        """How many slots work."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            slots = (await client.get(self.url + "/slots")).json()
        return sum(slot["is_processing"] for slot in slots)

    def executor(self, **model: Any) -> OpenAIExecutor:
        settings = {"served_model": "embedded", "first_token_timeout": 60, "token_timeout": 60, **model}
        return executor_for(self.url + "/v1", **settings)


@pytest.fixture
async def llama(tmp_path: Path) -> AsyncIterator[Llama]:
    server = Llama(tmp_path / "llama.log")
    await server.start()
    yield server
    server.kill()


async def run(executor: OpenAIExecutor, params: dict[str, Any], **more: Any) -> Told:
    return await asyncio.wait_for(attempt(executor, params, **more), 120)


async def test_stream_usage_continue_cancel_and_long_prompts(llama: Llama) -> None:
    """One start of the server serves all that needs no kill: a start costs seconds."""
    executor = llama.executor(resume="trailing")
    whole = await run(executor, ask())
    assert whole.done.finish_reason in ("stop", "length")
    assert len(whole.deltas) > 5
    usage = whole.track.usage(ended_well=True)
    assert usage.prompt_tokens
    assert usage.completion_tokens == whole.track.output_tokens
    assert whole.done.text == "".join(delta.text for delta in whole.deltas)

    for stop in (3, 11):
        cut = await run(executor, ask(), stop_after=stop)
        rest = await run(executor, ask(), number=2, checkpoint=cut.beat)
        assert rest.done.text == whole.done.text  # continued = uninterrupted
        assert rest.done.resumed
        assert rest.done.finish_reason == whole.done.finish_reason

    work = asyncio.create_task(run(executor, ask(1500, "Count from one to a thousand in words.")))
    await until(lambda: llama.busy())
    await asyncio.sleep(0.5)
    before = time.monotonic()
    work.cancel()
    await asyncio.wait([work])
    await until(lambda: _idle(llama), seconds=20)
    assert time.monotonic() - before < 10  # the rest would take half a minute and more

    too_long = (await run(executor, ask(5, "word " * 5000))).failed
    assert (too_long.code, too_long.retryable) == (Code.CONTEXT_LENGTH_EXCEEDED, False)
    assert "shorten" in too_long.message
    await executor.aclose()


async def _idle(llama: Llama) -> bool:
    return await llama.busy() == 0


async def test_killed_twice_in_one_generation_and_the_text_is_whole(llama: Llama) -> None:
    """Nothing that was shown is lost, nothing is doubled, and the text is the uninterrupted one."""
    executor = llama.executor(resume="trailing")
    whole = (await run(executor, ask(60))).done.text
    checkpoint: Beat | None = None
    shown: list[str] = []
    kills = 0
    for number in range(1, 30):
        told = await _attempt_with_a_kill(llama, executor, number, checkpoint, kill=kills < 2)
        if told.result:
            break
        if told.failed.refused:  # it is down: patience, as the workflow has it
            await asyncio.sleep(min(1.0, told.failed.retry_after or 0.5))
            if not llama.up:
                await llama.start()
            continue
        assert told.failed.code in (Code.STREAM_TRUNCATED, Code.UPSTREAM_UNAVAILABLE)
        kills += 1
        shown.append(told.beat.text or "")
        checkpoint = told.beat
    assert kills == 2
    assert told.done.text == whole
    assert told.done.resumed
    assert 0 < len(shown[0]) < len(shown[1]) < len(whole)
    assert all(whole.startswith(text) for text in shown)
    assert told.track.discarded == 0
    await executor.aclose()


async def _attempt_with_a_kill(
    llama: Llama, executor: OpenAIExecutor, number: int, checkpoint: Beat | None, *, kill: bool
) -> Told:
    """One attempt; with `kill` the server dies after some tokens of it."""
    told: list[Told] = []

    async def watch() -> None:
        await until(lambda: bool(told) and len(told[0].deltas) >= 8, seconds=60, every=0.001)
        llama.kill()

    work = asyncio.create_task(attempt(executor, ask(60), number=number, checkpoint=checkpoint, into=told))
    killer = asyncio.create_task(watch()) if kill else None
    await asyncio.wait([work], timeout=120)
    if killer is not None:
        killer.cancel()
    return await work


async def test_the_check_finds_out_what_it_can_do(llama: Llama) -> None:
    catalogue = parse_catalogue(
        f"""
        [pools.local]
        [models.smol]
        pool = "local"
        base_url = "{llama.url}/v1"
        served_model = "embedded"
        """
    )
    report = await asyncio.wait_for(check_model(catalogue, "smol", {}), 120)
    assert report.usable
    assert report.resume in ("trailing", "continue_final_message")
    assert (report.tokens_per_second or 0) > 0
    verdicts = {finding.name: finding.ok for finding in report.findings}
    assert verdicts["streams"]
    assert verdicts["usage"]
    assert verdicts["stops on disconnect"]
    assert f'resume = "{report.resume}"' in report.lines
