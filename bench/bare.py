"""Drives the yardstick of `bare_worker`: its processes, its starts, and when its tasks ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import asyncpg  # type: ignore[import-untyped]
from temporalio.client import Client, WorkflowHandle
from temporalio.common import Priority

from bench.bare_worker import CONTROL, TABLE, BareInput
from bench.servers import Receiver
from bench.stack import Stack, tree_cpu
from perdure.embedded import process

_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_DATABASE = "bench"  # beside the product's, on the same server


class Bare:
    """The bare workflow on the stack's Temporal and Postgres, with a pool of `slots` x `pool_workers`."""

    def __init__(self, stack: Stack, receiver: Receiver, *, slots: int, pool_workers: int = 1) -> None:
        self._stack, self._receiver = stack, receiver
        self._roles = ["control", *["pool"] * pool_workers, "hooks"]
        self._slots = slots
        self.processes: list[subprocess.Popen[bytes]] = []
        self._runs = 0

    async def __aenter__(self) -> Self:
        self._address = self._stack.url("temporal")
        dsn = self._stack.database_url
        self._dsn = f"{dsn.rpartition('/')[0]}/{_DATABASE}"
        await self._make_table(dsn)
        self.client = await Client.connect(self._address)
        root = Path(__file__).parent.parent
        try:
            for number, role in enumerate(self._roles):
                line = [sys.executable, "-m", "bench.bare_worker", role, self._address, self._dsn]
                log = self._stack.root / f"bare-{number}-{role}.log"
                self.processes.append(process.spawn([*line, str(self._slots)], {}, log, root))
            handle = await self.start("ready", webhook=self._receiver.url("bare-ready"))
            await asyncio.wait_for(handle.result(), _READY_SECONDS)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _make_table(self, dsn: str) -> None:
        server = await asyncpg.connect(dsn)
        if not await server.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", _DATABASE):
            await server.execute(f"CREATE DATABASE {_DATABASE}")
        await server.close()
        self.rows = await asyncpg.connect(self._dsn)
        await self.rows.execute(TABLE)

    async def __aexit__(self, *_: object) -> None:
        for one in self.processes:
            one.send_signal(signal.SIGTERM)
        for one in self.processes:
            try:
                await asyncio.to_thread(one.wait, _STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            process.kill_group(one.pid)
        await self.rows.close()

    @property
    def pool_processes(self) -> list[subprocess.Popen[bytes]]:
        return [one for one, role in zip(self.processes, self._roles, strict=True) if role == "pool"]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by part, and of the servers that it shares with the stack."""
        used: dict[str, float] = {}
        for one, role in zip(self.processes, self._roles, strict=True):
            used[role] = used.get(role, 0.0) + tree_cpu(one.pid)
        shared = self._stack.cpu()
        return used | {part: shared[part] for part in ("temporal", "postgres")}

    # Tasks ----------------------------------------------------------------------------------------------
    async def start(
        self,
        label: str,
        *,
        seconds: float = 0.0,
        webhook: str = "",
        order: str = "",
        model_url: str = "",
        prompt: str = "",
        priority: Priority | None = None,
    ) -> WorkflowHandle[Any, Any]:
        """Starts one workflow; its id begins with the label."""
        self._runs += 1
        return await self.client.start_workflow(
            "BareTask",
            BareInput(label, seconds, webhook, order, model_url, prompt),
            id=f"bare-{label}-{self._runs}-{time.time_ns()}",
            task_queue=CONTROL,
            priority=priority or Priority.default,
        )

    async def through(self, label: str, count: int, at_once: int) -> float:
        """Seconds until `count` zero-work tasks with webhooks are through, `at_once` of them open at a time.

        Counted at the receiver: nobody polls the server for results.
        """
        url, began = self._receiver.url(label), time.perf_counter()
        started = 0
        starting: set[asyncio.Task[Any]] = set()
        while self._receiver.count(label) < count:
            while started < count and started - self._receiver.count(label) < at_once:
                starting.add(task := asyncio.create_task(self.start(label, webhook=url)))
                task.add_done_callback(starting.discard)
                started += 1
            seen = self._receiver.count(label)
            if not await self._receiver.wait(label, seen + 1, 60):
                raise TimeoutError(f"bare workflow: {seen} of {count} came through")
        took = time.perf_counter() - began
        await asyncio.gather(*starting)
        return took

    async def started_at(self, ids: Sequence[str]) -> dict[str, float]:
        """When the model activity of finished tasks began, by workflow id."""
        found = await self.rows.fetch("SELECT id, started FROM bare_tasks WHERE id = ANY($1)", list(ids))
        return {row["id"]: row["started"] for row in found}

    async def finished(self, prefix: str) -> list[asyncpg.Record]:
        """Rows whose id begins so, in the order of their start."""
        pattern = f"bare-{prefix}-%"
        sql = "SELECT id, started, ended FROM bare_tasks WHERE id LIKE $1 ORDER BY started"
        found: list[asyncpg.Record] = await self.rows.fetch(sql, pattern)
        return found

    async def drop(self, handles: Sequence[WorkflowHandle[Any, Any]]) -> None:
        """Terminates what is left of a row."""
        limit = asyncio.Semaphore(16)

        async def one(handle: WorkflowHandle[Any, Any]) -> None:
            async with limit:
                try:
                    await handle.terminate()
                except Exception:  # it is over already
                    return

        await asyncio.gather(*map(one, handles))
