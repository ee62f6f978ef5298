"""What is done to the stack, in an order that a seed decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import psutil

from bench.stack import Stack


@dataclass
class Strike:
    """One fault: what, when (seconds of the run), and when the stack worked again. A freeze counts whole."""

    kind: str
    at: float
    recovered: float | None = None

    @property
    def took(self) -> float | None:
        return None if self.recovered is None else self.recovered - self.at


KINDS: Final = (
    "kill gpu", "freeze gpu", "drain gpu", "drain gpu twice",
    "kill control", "freeze control", "stop control",
    "kill api", "freeze api", "stop api",
    "kill callbacks", "freeze callbacks",
    "kill temporal", "freeze temporal",
    "kill postgres", "freeze postgres",
)  # fmt: skip
HEARTBEAT: Final = 3.0  # seconds, of every model of the run


@dataclass
class Faults:
    """Strikes at random moments until told to stop.

    `progress` counts finished tasks: one more after a strike shows that the stack works again.
    `all_struck` is set once every kind was.
    """

    stack: Stack
    rng: random.Random
    progress: Callable[[], int]
    kinds: Sequence[str] = KINDS
    every: tuple[float, float] = (1.0, 4.0)
    strikes: list[Strike] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    all_struck: asyncio.Event = field(default_factory=asyncio.Event)

    def now(self) -> float:
        return time.monotonic() - self.began

    async def run(self, stop: asyncio.Event) -> None:
        """Every kind once in random order, then any at random until `stop`."""
        order = list(self.kinds)
        self.rng.shuffle(order)
        while not stop.is_set():
            await self._strike(order.pop() if order else self.rng.choice(self.kinds))
            if not order:
                self.all_struck.set()
            try:
                await asyncio.wait_for(stop.wait(), self.rng.uniform(*self.every))
            except TimeoutError:
                pass

    async def _strike(self, kind: str) -> None:
        strike = Strike(kind, self.now())
        self.strikes.append(strike)
        how, _, what = kind.partition(" ")
        part, _, twice = what.partition(" ")
        before = self.progress()
        try:
            await self._hit(how, self._pid(part), bool(twice))
        except (ProcessLookupError, psutil.NoSuchProcess, KeyError):
            strike.kind += " (was down)"
        await self._recovered(strike, before)

    def _pid(self, part: str) -> int:
        children: dict[str, int] = self.stack.description["children"]
        if part == "gpu":
            part = self.rng.choice(sorted(name for name in children if name.startswith("gpu:")))
        return children[part]

    async def _hit(self, how: str, pid: int, twice: bool) -> None:
        match how:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "freeze":
                await self._freeze(pid)
            case _:
                os.kill(pid, signal.SIGTERM)
                if twice:
                    await asyncio.sleep(0.2)
                    _signal(pid, signal.SIGTERM)

    async def _freeze(self, pid: int) -> None:
        """The process and all that it runs, past the heartbeat time-out."""
        parent = psutil.Process(pid)
        frozen = [parent, *parent.children(recursive=True)]
        try:
            for one in frozen:
                _signal(one.pid, signal.SIGSTOP)
            await asyncio.sleep(self.rng.uniform(HEARTBEAT + 1, HEARTBEAT * 3))
        finally:
            for one in frozen:
                _signal(one.pid, signal.SIGCONT)

    async def _recovered(self, strike: Strike, before: int) -> None:
        """Waits until another task has finished, a minute at most."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.progress() > before:
                strike.recovered = self.now()
                return
            await asyncio.sleep(0.05)


def _signal(pid: int, number: signal.Signals) -> None:
    """To a process that may have gone meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
