"""A whole service whose every part can be killed, frozen, stopped and started by itself.

One Ground serves all tests of this folder: `heal` brings back what a test took away and ends its tasks. The
model server is the test's own, on a port that stays, so that its calls are the test's alone.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
import httpx
from temporalio.client import Client

from perdure.embedded.ports import free_port
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.embedded.temporal import EmbeddedTemporal, temporal_binary
from perdure.store.migrate import migrate
from tests.integration.observability.processes import Processes
from tests.support.model_server import DONE, Call, Steps, chunk, finish, stream, usage
from tests.support.postgres import FAST
from tests.support.waiting import until

ROOT: Final = Path(__file__).parents[3]
SLOTS: Final = 2  # of each of the two GPU workers
DRAIN: Final = 2.0  # seconds
FOREVER: Final = 3600.0
FINAL: Final = ("COMPLETED", "FAILED", "CANCELLED")
KEY: Final = base64.b64encode(b"d" * 32).decode()  # payloads are encrypted in all of these tests
MODELS: Final = """
[pools.p]
slots = 2
[models.chat]
pool = "p"
base_url = "{base_url}"
resume = "trailing"
heartbeat_timeout = 3
first_token_timeout = 60
token_timeout = 60
max_input_bytes = 1048576
[models.small]
pool = "p"
base_url = "{base_url}"
max_output_bytes = 2000
[models.simulated]
pool = "p"
executor = "simulated"
heartbeat_timeout = 3
[pools.frail]
slots = 2
[models.killer]
pool = "frail"
executor = "python"
import_path = "tests.integration.durability.killer:kill"
heartbeat_timeout = 2
[models.neighbour]
pool = "frail"
executor = "simulated"
heartbeat_timeout = 2
"""
COMMANDS: Final = {
    "api": ["api"],
    "control": ["worker", "control"],
    "callbacks": ["worker", "callbacks"],
    "gpu-0": ["worker", "gpu", "--pool", "p"],
    "gpu-1": ["worker", "gpu", "--pool", "p"],
}
# Processes that single tests start: their ports are ready.
LATER: Final = {
    "control-2": ["worker", "control"],
    "gpu-frail-0": ["worker", "gpu", "--pool", "frail"],
    "gpu-frail-1": ["worker", "gpu", "--pool", "frail"],
}
_T = TypeVar("_T")


class Ground:
    """Postgres, Temporal, an API, a control, a callbacks and two GPU workers, each a process of its own."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="perdure-durability-"))
        self.root.chmod(0o755)  # Postgres may run under another account
        self.postgres = EmbeddedPostgres(self.root / "pg", settings=FAST)
        self.temporal = EmbeddedTemporal(self.root / "temporal")
        self.model_port = free_port()
        self._processes: Processes | None = None

    def up(self) -> None:
        self.postgres.start()
        migrate(self.postgres.dsn)
        self.temporal.start()
        processes = Processes(
            self.root,
            self.postgres.dsn,
            self.temporal.address,
            models=MODELS.format(base_url=f"http://127.0.0.1:{self.model_port}/v1"),
            env={
                "PERDURE_PAYLOAD_KEY": KEY,
                "PERDURE_SECRET_KEY": KEY,
                "PERDURE_DRAIN_SECONDS": str(DRAIN),
                "PYTHONPATH": str(ROOT),
            },
            commands=COMMANDS,
            later=LATER,
        )
        processes.__enter__()
        self._processes = processes

    def down(self) -> None:
        if self._processes is not None:
            for name in COMMANDS:
                self.processes.signal(name, signal.SIGCONT)
            self.processes.__exit__(None, None, None)
        self.temporal.stop(5)
        self.postgres.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def processes(self) -> Processes:
        assert self._processes is not None
        return self._processes

    # Parts --------------------------------------------------------------------------------------------
    async def start(self, *names: str) -> None:
        """Starts processes at once and waits until they work."""
        await asyncio.gather(*(_aside(self.processes.start, name) for name in names))

    async def kill(self, name: str) -> None:
        """As a crash does; it stays away."""
        self.processes.signal(name, signal.SIGKILL)
        await _aside(self.processes.exit_code, name)

    def freeze(self, name: str) -> None:
        self.processes.signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.processes.signal(name, signal.SIGCONT)

    def terminate(self, name: str) -> None:
        self.processes.signal(name, signal.SIGTERM)

    async def exit_code(self, name: str) -> int:
        return await _aside(self.processes.exit_code, name)

    async def temporal_away(self) -> None:
        await _aside(self.temporal.kill)

    async def temporal_back(self) -> None:
        await _aside(self.temporal.start)

    async def postgres_away(self) -> None:
        await _aside(self.postgres.kill)

    async def postgres_back(self) -> None:
        await _aside(self.postgres.start)

    async def cli(self, *words: str) -> int:
        """The `temporal` command line on this service's server. Its exit code."""
        line = [str(temporal_binary()), *words, "--address", self.temporal.address]
        done = await _aside(partial(subprocess.run, line, capture_output=True, timeout=30, check=False))
        return done.returncode

    async def sql(self, words: str, *values: Any) -> None:
        """A change that no call of ours can make."""
        connection = await asyncpg.connect(self.postgres.dsn)
        try:
            await connection.execute(words, *values)
        finally:
            await connection.close()

    async def pending_activity(self, task_id: str) -> str | None:
        """The activity that a task's workflow waits for."""
        client = await Client.connect(self.temporal.address)
        described = await client.get_workflow_handle(task_id).describe()
        return next((one.activity_type.name for one in described.raw_description.pending_activities), None)

    def log(self, name: str) -> str:
        """What a process has written since its start."""
        return (self.root / f"{name}.log").read_text()

    def worker_of(self, task: dict[str, Any]) -> str:
        """The name of the GPU worker that has a task's last attempt."""
        pid = int(task["attempts"][-1]["worker"].rsplit(":", 1)[1])
        return next(name for name in COMMANDS if self.processes.pid(name) == pid)

    def other(self, name: str) -> str:
        return "gpu-1" if name == "gpu-0" else "gpu-0"

    async def heal(self) -> None:
        """Everything runs again, every task is final, no attempt is left on a GPU worker."""
        if self.temporal.proc is None:
            await self.temporal_back()
        await self.postgres_back()
        for name in COMMANDS:
            self.thaw(name)
        await self.start(*(name for name in COMMANDS if not self.processes.runs(name)))
        async with Service(self) as service:
            await until(service.cancel_all, seconds=60, every=0.2)


async def _aside(call: Callable[..., _T], *given: Any) -> _T:
    return await asyncio.to_thread(call, *given)


class Service:
    """The API as a caller sees it, in the loop of one test."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    async def __aenter__(self) -> Service:
        self.http = httpx.AsyncClient(base_url=self.ground.processes.url(""), timeout=30, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def try_submit(self, model: str = "chat", **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        params = more.pop("params", {"max_tokens": 20, "messages": [{"role": "user", "content": "count"}]})
        body = {"model_id": model, "user_id": "ann", "params": params, **more}
        return await self.http.post("/v1/tasks", json=body, headers=headers)

    async def submit(self, model: str = "chat", **more: Any) -> str:
        reply = await self.try_submit(model, **more)
        assert reply.status_code == 202, reply.text
        return str(reply.json()["task_id"])

    async def simulated(self, tokens: int, rate: float, **more: Any) -> str:
        return await self.submit("simulated", params={"tokens": tokens, "tokens_per_second": rate}, **more)

    async def task(self, task_id: str) -> dict[str, Any]:
        reply = await self.http.get(f"/v1/tasks/{task_id}?include=result,attempts,partial")
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    async def cancel(self, task_id: str, reason: str | None = None) -> httpx.Response:
        return await self.http.post(f"/v1/tasks/{task_id}/cancel", json={"reason": reason} if reason else {})

    async def reaches(self, task_id: str, *states: str, seconds: float = 60) -> dict[str, Any]:
        """The task in one of these states. A final one that is not among them fails at once."""
        end = time.monotonic() + seconds
        while True:
            task = await self.task(task_id)
            if task["status"] in states:
                return task
            assert task["status"] not in FINAL, task
            assert time.monotonic() < end, task
            await asyncio.sleep(0.05)

    async def running(self, task_id: str) -> dict[str, Any]:
        """The task once its attempt is announced."""
        return await self.reaches(task_id, "PROCESSING")

    async def shows(self, task_id: str, text: str) -> None:
        """Waits until the live view begins with this text: it has reached Temporal as a heartbeat."""

        async def shown() -> bool:
            return str((await self.task(task_id)).get("partial_text")).startswith(text)

        await until(shown)

    async def cancel_all(self) -> bool:
        """Asks every open task to stop. True when none is open."""
        reply = await self.http.post("/v1/tasks/cancel", json={"user_id": "ann", "reason": "the test ends"})
        if reply.status_code != 202:
            return False
        open_tasks = [
            task
            for state in ("PENDING", "QUEUED", "PROCESSING")
            for task in (await self.http.get(f"/v1/tasks?status={state}")).json()["data"]
        ]
        return not open_tasks


def counting(rate: float = 20.0) -> Callable[[Call], Steps]:
    """Counts `w0 w1 …` to `max_tokens` at `rate` words a second, and goes on as it is told."""

    def answer(call: Call) -> Steps:
        last = call.body["messages"][-1]
        start = len(last["content"].split()) if last["role"] == "assistant" else 0
        wanted = int(call.body["max_tokens"])
        steps: list[Any] = []
        for k in range(start, start + wanted):
            steps += [chunk("w0" if k == 0 else f" w{k}"), 1 / rate]
        return stream(*steps, finish("length"), usage(3 + start, wanted), DONE)

    return answer


def counted(words: int) -> str:
    """The one right text of so many words."""
    return " ".join(f"w{k}" for k in range(words))
