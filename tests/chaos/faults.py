"""What is done to the stack, in an order that a seed decides."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.stack import Stack


@dataclass
class Strike:
    """One fault: what, at when (seconds of the run), and when the stack worked again."""

    kind: str
    at: float
    recovered: float | None = None

    @property
    def took(self) -> float | None:
        return None if self.recovered is None else self.recovered - self.at


@dataclass
class Faults:
    """Strikes at random moments until told to stop.

    `progress` counts finished tasks: one more after a strike shows that the stack works again.
    """

    stack: Stack
    rng: random.Random
    progress: Callable[[], int]
    every: tuple[float, float] = (2.0, 5.0)
    strikes: list[Strike] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    KINDS = (
        "kill gpu", "kill gpu", "freeze gpu", "drain gpu", "drain gpu twice", "kill control", "kill api",
        "kill callbacks", "kill temporal", "kill postgres", "freeze temporal", "freeze postgres",
        "stop control",
    )  # fmt: skip

    def now(self) -> float:
        return time.monotonic() - self.began

    async def run(self, stop: asyncio.Event, most: int | None = None) -> None:
        """Every kind once in random order, then at random; `most` ends it by itself."""
        order = list(dict.fromkeys(self.KINDS))
        self.rng.shuffle(order)
        while not stop.is_set() and (most is None or len(self.strikes) < most):
            kind = order.pop() if order else self.rng.choice(self.KINDS)
            await self._strike(kind)
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
        except (ProcessLookupError, KeyError):
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
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self.rng.uniform(4.0, 9.0))  # past the heartbeat time-out of 3 s
                finally:
                    os.kill(pid, signal.SIGCONT)
            case _:
                os.kill(pid, signal.SIGTERM)
                if twice:
                    await asyncio.sleep(0.2)
                    os.kill(pid, signal.SIGTERM)

    async def _recovered(self, strike: Strike, before: int) -> None:
        """Waits until another task has finished, a minute at most."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.progress() > before:
                strike.recovered = self.now()
                return
            await asyncio.sleep(0.05)
