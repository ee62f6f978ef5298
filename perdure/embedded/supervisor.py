"""Keeps a set of processes running: starts them, replaces what crashes with back-off, stops them in reverse.

    supervisor = Supervisor(say, on_change)
    await supervisor.start(Program("api", launch))
    await supervisor.stop(within=14)

One asyncio task watches each process. `say` gets a line for people; `on_change` is called whenever a process
id changes, before anything else happens with it.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure.embedded.process import Identity, how_it_ended, identify, kill_group

BACK_OFF = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)  # seconds before each start after a crash
STEADY_SECONDS = 30.0  # after which a crash counts as the first again
CONFIGURATION_EXIT = 2  # our commands end so when their settings are wrong: trying again mends nothing
_TICK = 0.05  # seconds between looks at a process


@dataclass(frozen=True)
class Program:
    """How one child is started and stopped.

    `launch` starts it and returns the process; with `slow` it blocks until the program serves, so a thread
    calls it. Children of one `group` are stopped together. `patience`: seconds from the signal to the kill.
    """

    name: str
    launch: Callable[[], subprocess.Popen[bytes]]
    group: int = 0
    slow: bool = False
    stop_signal: signal.Signals = signal.SIGTERM
    patience: float = 2.0


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    identity: Identity | None = None
    started: float = 0.0
    crashes: int = 0
    log_start: int = 0  # where the output of this launch begins
    launching: asyncio.Task[None] | None = None
    watcher: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class ChildFailedError(RuntimeError):
    """A child cannot run with the settings it was given."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(f"{name} {how}")
        self.name = name


class Supervisor:
    """Owns the children. Use it from one event loop, in the main thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        log_size: Callable[[str], int] = lambda name: 0,
        log_tail: Callable[[str, int], Sequence[str]] = lambda name, since: (),
        back_off: Sequence[float] = BACK_OFF,
    ) -> None:
        self._say = say
        self._on_change = on_change
        self._log_size = log_size
        self._log_tail = log_tail
        self._back_off = back_off
        self._children: dict[str, _Child] = {}
        self._stopping = False
        self._failed: asyncio.Future[None] | None = None

    def identities(self) -> dict[str, Identity]:
        """The last known process of every child, in the order of their start."""
        return {name: child.identity for name, child in self._children.items() if child.identity}

    def running(self, name: str) -> bool:
        child = self._children.get(name)
        return child is not None and child.running

    async def start(self, program: Program) -> None:
        """Starts a child and watches it from now on. What `launch` raises is raised."""
        child = _Child(program)
        self._children[program.name] = child
        await self._launch(child)
        child.watcher = asyncio.create_task(self._watch(child), name=f"watch {program.name}")

    async def failure(self) -> None:
        """Waits; raises ChildFailedError when a child ends because of wrong settings."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await self._failed
        finally:
            self._failed = None  # from now on such an end is a crash like any other

    async def _launch(self, child: _Child) -> None:
        child.launching = asyncio.create_task(self._launch_now(child))
        await asyncio.shield(child.launching)  # a stop must find the process of a launch that was under way

    async def _launch_now(self, child: _Child) -> None:
        launch = child.program.launch
        child.log_start = self._log_size(child.program.name)
        process = await asyncio.to_thread(launch) if child.program.slow else launch()
        child.process, child.identity = process, identify(process.pid)
        child.started = time.monotonic()
        self._on_change()

    async def _watch(self, child: _Child) -> None:
        name = child.program.name
        while True:
            code = await self._exit_of(child)
            if self._stopping:
                return
            if child.process is not None:
                kill_group(child.process.pid)  # what it started must not outlive it
            if code == CONFIGURATION_EXIT and self._failed is not None and not self._failed.done():
                self._failed.set_exception(ChildFailedError(name, how_it_ended(code)))
                return
            await self._replace(child, how_it_ended(code))

    async def _exit_of(self, child: _Child) -> int:
        assert child.process is not None
        while (code := child.process.poll()) is None:  # noqa: ASYNC110 - a process has no event everywhere
            await asyncio.sleep(_TICK)
        return code

    async def _replace(self, child: _Child, how: str) -> None:
        """Starts a child again, as often as it takes."""
        name = child.program.name
        if time.monotonic() - child.started > STEADY_SECONDS:
            child.crashes = 0
        while True:
            delay = self._back_off[min(child.crashes, len(self._back_off) - 1)]
            child.crashes += 1
            self._say(f"{name} {how}; starting it again in {delay:g} s")
            if child.crashes > 1 or not how.startswith("was killed"):
                for line in self._log_tail(name, child.log_start):
                    self._say(f"  {name} | {line}")
            await asyncio.sleep(delay)
            try:
                await self._launch(child)
            except Exception as error:  # whatever it was, the answer is another try
                how = f"could not be started: {error}"
            else:
                return

    async def stop(self, within: float) -> None:
        """Ends every child, the last group first, within so many seconds; those that are late are killed.

        Nothing that a child started in its own group is left.
        """
        self._stopping = True
        deadline = time.monotonic() + within
        watchers = [child.watcher for child in self._children.values() if child.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        launches = [child.launching for child in self._children.values() if child.launching is not None]
        await asyncio.gather(*watchers, *launches, return_exceptions=True)
        groups: dict[int, list[_Child]] = {}
        for child in reversed(self._children.values()):
            groups.setdefault(child.program.group, []).append(child)
        for number in sorted(groups, reverse=True):
            await asyncio.gather(*(self._stop_one(child, deadline) for child in groups[number]))
        self._on_change()

    async def _stop_one(self, child: _Child, deadline: float) -> None:
        process = child.process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(child.program.stop_signal)
            left = deadline - time.monotonic()
            try:
                await asyncio.wait_for(self._exit_of(child), min(left, child.program.patience))
            except TimeoutError:
                self._say(f"{child.program.name} does not stop; killing it")
        kill_group(process.pid)
        await self._exit_of(child)
        child.identity = None

    def kill(self) -> None:
        """Kills every child at once: the second Ctrl-C."""
        self._stopping = True
        for child in self._children.values():
            if child.process is not None and child.running:
                kill_group(child.process.pid)
