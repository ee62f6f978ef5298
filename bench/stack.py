"""The stack that is measured: `perdure dev` in a process of its own, with ports and data of its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psutil

from perdure.embedded import ports, process
from perdure.embedded.plan import Ports

_UP_SECONDS = 120.0
_DOWN_SECONDS = 30.0
_FIRST_BASE, _LAST_BASE = 20_000, 31_000  # below the ports that outgoing connections take


class StackDidNotStart(RuntimeError):  # noqa: N818 - says what is
    """`perdure dev` ended or was not ready in time; the message holds the end of its output."""


class Stack:
    """One `perdure dev`. `models` is the text of its models.toml.

    Closing it stops everything and removes the folder. Should the bench be killed, the kernel stops `dev`.
    """

    def __init__(self, models: str, *, gpu_workers: int = 1, env: dict[str, str] | None = None) -> None:
        self._models = models
        self._gpu_workers = gpu_workers
        self._env = env or {}
        self._dev: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self.root = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        self.root.chmod(0o755)  # Postgres runs under another account when we are root
        models = self.root / "models.toml"
        models.write_text(self._models)
        self.data = self.root / "data"
        line = [sys.executable, "-P", "-m", "perdure", "dev", "--no-model"]
        line += ["--data-dir", str(self.data), "--port-base", str(_free_base(40))]
        line += ["--models", str(models), "--gpu-workers", str(self._gpu_workers)]
        self._process = process.spawn(line, _environment() | self._env, self.root / "dev.log", self.root)
        try:
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _ready(self) -> None:
        end = time.monotonic() + _UP_SECONDS
        while not (self.data / "dev.json").exists():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = (self.root / "dev.log").read_text(errors="replace")[-2000:]
                raise StackDidNotStart(f"perdure dev did not become ready:\n{tail}")
            await asyncio.sleep(0.05)

    async def __aexit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self._process.wait, _DOWN_SECONDS)
            except Exception:  # it must go, whatever keeps it
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    child.kill()
                process.kill_group(self._process.pid)
        shutil.rmtree(self.root, ignore_errors=True)

    # What it says of itself -------------------------------------------------------------------------------
    @property
    def description(self) -> dict[str, Any]:
        """dev.json as it is now: children are replaced when they crash."""
        found: dict[str, Any] = json.loads((self.data / "dev.json").read_text())
        return found

    def url(self, name: str) -> str:
        return str(self.description["urls"][name])

    @property
    def database_url(self) -> str:
        return str(self.description["database_url"])

    def pid(self, child: str) -> int:
        return int(self.description["children"][child])

    def worker_pids(self, pool: str) -> list[int]:
        """The GPU workers of a pool."""
        children = self.description["children"]
        return [int(pid) for name, pid in children.items() if name.startswith(f"gpu:{pool}:")]

    def signal(self, child: str, number: signal.Signals) -> None:
        """Sends a signal to one child."""
        os.kill(self.pid(child), number)

    # What it costs ----------------------------------------------------------------------------------------
    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by part: api, control, callbacks, gpu, temporal, postgres and its backends."""
        used: dict[str, float] = {}
        for name, pid in self.description["children"].items():
            part = name.split(":")[0]
            used[part] = used.get(part, 0.0) + tree_cpu(int(pid))
        return used

    def tree_cpu(self) -> float:
        """CPU seconds so far of everything the stack runs."""
        return tree_cpu(self._process.pid)


def tree_cpu(pid: int) -> float:
    """CPU seconds so far of a process, of all that it runs, and of its children that ended."""
    try:
        parent = psutil.Process(pid)
        every = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for one in every:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += sum(times[:4])  # own and ended children's, user and system
    return total


def _environment() -> dict[str, str]:
    """Ours without what would change the product's settings or slow its imports."""
    ours = ("PERDURE_", "TEMPORAL_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _free_base(workers: int) -> int:
    """A --port-base whose ports are all free now."""
    for _ in range(200):
        base = random.randrange(_FIRST_BASE, _LAST_BASE, 100)
        if all(map(ports.is_free, Ports.of(base).used(model=True, workers=workers).values())):
            return base
    raise StackDidNotStart("no free block of ports between 20000 and 31000")
