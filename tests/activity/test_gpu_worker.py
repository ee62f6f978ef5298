"""The GPU worker on a real Temporal server: announcing, cancelling, draining, freezing."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure import names
from perdure.contracts import TaskInput
from perdure.models import Catalogue, CatalogueError, parse_catalogue
from perdure.settings import WorkerSettings
from perdure.task.states import Priority
from perdure.temporal import make_converter
from tests.activity.host import Heard, Host
from tests.support.model_server import DONE, ModelServer, chunk, finish, stream, words
from tests.support.waiting import until
from workers.gpu import GpuWorker

FOREVER = 3600
ROOT = Path(__file__).parents[2]


def models(server: ModelServer, pool: str) -> str:
    return f"""
        [pools."{pool}"]
        slots = 3
        [models.chat]
        pool = "{pool}"
        base_url = "{server.base_url}"
        resume = "trailing"
        first_token_timeout = 60
        token_timeout = 60
        """


class Floor:
    """A pool of its own, a model server, and a workflow worker."""

    def __init__(self, client: Client, server: ModelServer) -> None:
        self.client, self.server = client, server
        self.pool = names.new_task_id()[5:17]
        self.text = models(server, self.pool)
        self.catalogue: Catalogue = parse_catalogue(self.text)

    async def submit(self, *, heartbeat: float = 10, size: int = 0) -> WorkflowHandle[Any, Heard]:
        params = {"messages": [{"role": "user", "content": "hello " + "x" * size}], "max_tokens": 50}
        task = TaskInput(
            task_id=names.new_task_id(),
            user_id="u",
            model_id="chat",
            task_type="chat",
            priority=Priority.NORMAL,
            pool=self.pool,
            params=params,
            created_at=datetime.now(UTC),
            heartbeat_seconds=heartbeat,
        )
        return await self.client.start_workflow(Host.run, task, id=task.task_id, task_queue=self.pool)

    @asynccontextmanager
    async def worker(self, drain_seconds: float = 30, slots: int | None = None) -> AsyncIterator[Running]:
        running = Running(GpuWorker(self.client, self.catalogue, self.pool, slots, None, drain_seconds, {}))
        try:
            yield running
        finally:
            running.asked.set()
            running.hurried.set()
            await asyncio.wait_for(running.task, 30)
            await running.gpu.aclose()


class Running:
    def __init__(self, gpu: GpuWorker) -> None:
        self.gpu, self.asked, self.hurried = gpu, asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(gpu.run(self.asked, self.hurried))


@pytest.fixture
async def floor(temporal_address: str) -> AsyncIterator[Floor]:
    key = base64.b64encode(b"k" * 32).decode()
    converter = make_converter(WorkerSettings(payload_key=SecretStr(key)))
    client = await Client.connect(temporal_address, data_converter=converter)
    async with ModelServer() as server:
        made = Floor(client, server)
        async with Worker(
            client, task_queue=made.pool, workflows=[Host], workflow_runner=UnsandboxedWorkflowRunner()
        ):
            yield made


async def test_a_long_attempt_announces_itself_and_a_quick_one_does_not(floor: Floor) -> None:
    floor.server.script(
        stream(*words("one two"), finish(), DONE), stream(chunk("one"), 1.0, chunk(" two"), finish(), DONE)
    )
    async with floor.worker():
        quick = await (await floor.submit()).result()
        long = await (await floor.submit()).result()
    for heard in (quick, long):
        assert heard.result is not None
        assert heard.result.result is not None
        assert heard.result.result.text == "one two"
        assert heard.result.worker == floor.client.identity
    assert quick.announced == []
    assert [(number, worker) for number, worker, _ in long.announced] == [(1, floor.client.identity)]
    assert long.result is not None
    assert long.announced[0][2] == long.result.started_at


async def test_large_params_are_read_from_the_first_event(floor: Floor) -> None:
    floor.server.script(stream(chunk("a"), finish(), DONE))
    async with floor.worker():
        heard = await (await floor.submit(size=200_000)).result()
    assert heard.result is not None
    assert floor.server.calls[0].body["messages"][0]["content"] == "hello " + "x" * 200_000


@pytest.mark.parametrize("way", ["signal", "terminate"])
async def test_a_silent_model_is_left_at_once(floor: Floor, way: str) -> None:
    floor.server.script(stream(*words("one two"), FOREVER))
    async with floor.worker():
        handle = await floor.submit()
        call = await floor.server.call(0, 30)
        await asyncio.sleep(1.5)
        before = time.monotonic()
        if way == "terminate":
            await handle.terminate()
        else:
            await handle.signal(Host.cancel)
        assert await call.closed_by_client(10) - before < 3  # milliseconds where the server pushes
        if way == "signal":
            heard = await handle.result()
            assert heard.result is not None
            assert (heard.result.kind, heard.result.beat.text) == ("cancelled", "one two")


async def test_a_drain_hands_over_and_another_worker_goes_on(floor: Floor) -> None:
    floor.server.script(stream(*words("one two"), FOREVER), stream(chunk(" three"), finish(), DONE))
    async with floor.worker(drain_seconds=0.3) as first:
        handle = await floor.submit()
        await floor.server.call(0, 30)
        await asyncio.sleep(0.3)
        first.asked.set()
        heard = await asyncio.wait_for(handle.result(), 20)
        assert heard.result is not None
        assert (heard.result.kind, heard.result.beat.text) == ("drained", "one two")
        await asyncio.wait_for(first.task, 20)
    assert len(floor.server.calls) == 1


async def test_a_draining_worker_takes_no_new_work_and_a_second_word_ends_it(floor: Floor) -> None:
    floor.server.script(stream(chunk("one"), FOREVER))
    async with floor.worker(drain_seconds=3000) as first:
        running = await floor.submit()
        await floor.server.call(0, 30)
        first.asked.set()
        await asyncio.sleep(0.5)
        waiting = await floor.submit()
        await asyncio.sleep(1.0)
        assert len(floor.server.calls) == 1
        first.hurried.set()
        heard = await asyncio.wait_for(running.result(), 20)
        assert heard.result is not None
        assert heard.result.kind == "drained"
        await asyncio.wait_for(first.task, 20)
    floor.server.script(stream(chunk("two"), finish(), DONE))
    async with floor.worker():
        heard = await asyncio.wait_for(waiting.result(), 30)
    assert heard.result is not None
    assert heard.result.kind == "generated"


async def test_an_unknown_pool_is_refused_in_words(floor: Floor) -> None:
    with pytest.raises(CatalogueError, match=floor.pool):
        GpuWorker(floor.client, floor.catalogue, "nowhere", None, None, 1, {})


# As a process of its own -----------------------------------------------------------------------------


@asynccontextmanager
async def process(
    floor: Floor, address: str, tmp_path: Path, **env: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`perdure worker gpu` as it is deployed: without any setting of a database."""
    path = tmp_path / "models.toml"
    path.write_text(floor.text)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_", "PG"))}
    clean |= {
        "TEMPORAL_ADDRESS": address,
        "PERDURE_MODELS": str(path),
        "PERDURE_PAYLOAD_KEY": base64.b64encode(b"k" * 32).decode(),
        **env,
    }
    command = [sys.executable, "-m", "perdure.cli", "worker", "gpu", "--pool", floor.pool]
    with (tmp_path / "worker.log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=clean, stdout=log, stderr=log)
        try:
            yield running
        finally:
            if running.returncode is None:
                running.send_signal(signal.SIGCONT)
                running.kill()
                await running.wait()


async def test_sigterm_drains_the_process_and_it_exits_with_0(
    floor: Floor, temporal_address: str, tmp_path: Path
) -> None:
    floor.server.script(stream(*words("one two"), FOREVER))
    async with process(floor, temporal_address, tmp_path, PERDURE_DRAIN_SECONDS="600") as worker:
        handle = await floor.submit()
        call = await floor.server.call(0, 60)
        await asyncio.sleep(0.5)
        worker.terminate()
        await asyncio.sleep(0.5)
        assert worker.returncode is None  # it waits for the attempt
        worker.terminate()
        before = time.monotonic()
        heard = await asyncio.wait_for(handle.result(), 20)
        assert await asyncio.wait_for(worker.wait(), 20) == 0
        assert await call.closed_by_client(5) - before < 3
    assert heard.result is not None
    assert (heard.result.kind, heard.result.beat.text) == ("drained", "one two")
    log = (tmp_path / "worker.log").read_text()
    assert "database" not in log.lower()
    assert "hello" not in log  # no prompt


async def test_a_frozen_worker_fences_itself_and_changes_nothing(
    floor: Floor, temporal_address: str, tmp_path: Path
) -> None:
    """SIGSTOP past the heartbeat time-out, another worker takes over, SIGCONT."""
    floor.server.script(
        stream(chunk("one"), chunk(" two"), *[0.05, chunk(" late")] * 20_000),
        stream(chunk(" three"), finish(), DONE),
    )
    async with process(floor, temporal_address, tmp_path) as frozen:
        handle = await floor.submit(heartbeat=2)
        call = await floor.server.call(0, 60)
        await until(lambda: call.written > 400)
        await asyncio.sleep(1.0)  # a beat with text is on the server
        frozen.send_signal(signal.SIGSTOP)
        async with floor.worker():
            heard = await asyncio.wait_for(handle.result(), 60)  # its open polls may swallow attempts
            frozen.send_signal(signal.SIGCONT)
            await call.closed_by_client(15)
    assert heard.result is not None
    assert heard.result.kind == "generated"
    assert heard.result.result is not None
    text = heard.result.result.text
    assert text.startswith("one two")
    assert text.endswith(" three")
    shown = heard.result.beat.resumed_from_tokens
    assert (
        text.count(" late") == shown - 2
    )  # exactly the checkpoint's, none from the frozen attempt's later output
    assert (await handle.describe()).status is not None
    after = await handle.result()
    assert after == heard


async def test_a_killed_worker_is_replaced_from_its_last_beat(
    floor: Floor, temporal_address: str, tmp_path: Path
) -> None:
    floor.server.script(stream(chunk("one"), chunk(" two"), FOREVER), stream(chunk(" three"), finish(), DONE))
    async with process(floor, temporal_address, tmp_path) as doomed:
        handle = await floor.submit(heartbeat=2)
        call = await floor.server.call(0, 60)
        await asyncio.sleep(2.5)
        doomed.kill()
        await call.closed_by_client(5)
        async with floor.worker():
            heard = await asyncio.wait_for(handle.result(), 30)
    assert heard.result is not None
    assert heard.result.result is not None
    assert (heard.result.result.text, heard.result.result.resumed) == ("one two three", True)
