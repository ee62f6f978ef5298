from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from perdure.embedded.process import spawn
from perdure.embedded.supervisor import ChildFailedError, Program, Supervisor

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
NOTE_END = (
    "import signal, sys, time\n"
    "def end(*_):\n"
    "    open(sys.argv[1], 'a').write(sys.argv[2] + '\\n'); sys.exit()\n"
    "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
)


class Bench:
    """A supervisor with what it said and how often ids changed."""

    def __init__(self, tmp_path: Path, back_off: tuple[float, ...] = (0.01,)) -> None:
        self.path = tmp_path
        self.said: list[str] = []
        self.changes: list[dict[str, int]] = []
        self.supervisor = Supervisor(self.said.append, self.changed, self.size, self.tail, back_off)

    def changed(self) -> None:
        self.changes.append({name: who.pid for name, who in self.supervisor.identities().items()})

    def size(self, name: str) -> int:
        return len(self.log(name))

    def tail(self, name: str, since: int) -> list[str]:
        return [f"tail of {name} after {since}"]

    def program(self, name: str, code: str, *args: str, group: int = 0, patience: float = 5.0) -> Program:
        line = [sys.executable, "-S", "-c", code, *args]
        launch = partial(spawn, line, os.environ, self.path / name, self.path)
        return Program(name, launch, group, patience=patience)

    async def up(self, name: str, times: int = 1) -> None:
        await self.until(lambda: self.log(name).count("up\n") >= times)

    def log(self, name: str) -> str:
        path = self.path / name
        return path.read_text() if path.exists() else ""

    def pid(self, name: str) -> int:
        return self.supervisor.identities()[name].pid

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_crashed_child_is_replaced_and_said_so(bench: Bench) -> None:
    await bench.supervisor.start(bench.program("a", SLEEP))
    await bench.up("a")
    old = bench.pid("a")
    os.kill(old, signal.SIGKILL)
    await bench.up("a", times=2)
    assert bench.pid("a") != old
    assert bench.changes[-1] == {"a": bench.pid("a")}
    assert bench.said == ["a was killed by SIGKILL; starting it again in 0.01 s"]
    await bench.supervisor.stop(10)


async def test_back_off_grows_and_the_end_of_the_log_is_shown(tmp_path: Path) -> None:
    bench = Bench(tmp_path, back_off=(0.01, 0.02, 0.04))
    await bench.supervisor.start(bench.program("a", "import sys; print('up'); sys.exit(3)"))
    await bench.up("a", times=5)
    await bench.supervisor.stop(10)
    waits = [line.split()[-2] for line in bench.said if "starting it again" in line]
    assert waits[:4] == ["0.01", "0.02", "0.04", "0.04"]
    assert bench.said[:2] == [
        "a ended with exit code 3; starting it again in 0.01 s",
        "  a | tail of a after 0",
    ]
    assert bench.said[3] == "  a | tail of a after 3"


async def test_children_stop_in_reverse_by_group(bench: Bench, tmp_path: Path) -> None:
    order = tmp_path / "order"
    for name, group in (("first", 0), ("second", 1), ("third", 2)):
        await bench.supervisor.start(bench.program(name, NOTE_END, str(order), name, group=group))
        await bench.up(name)
    await bench.supervisor.stop(10)
    assert order.read_text().split() == ["third", "second", "first"]
    assert bench.changes[-1] == {}


async def test_child_that_does_not_stop_is_killed_in_time(bench: Bench) -> None:
    await bench.supervisor.start(bench.program("deaf", DEAF, patience=0.2))
    await bench.up("deaf")
    pid = bench.pid("deaf")
    began = time.monotonic()
    await bench.supervisor.stop(10)
    assert time.monotonic() - began < 8
    assert bench.said == ["deaf does not stop; killing it"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_whole_stop_keeps_its_time_however_many_are_deaf(bench: Bench) -> None:
    for n in range(3):
        await bench.supervisor.start(bench.program(f"deaf{n}", DEAF, group=n, patience=60))
        await bench.up(f"deaf{n}")
    began = time.monotonic()
    await bench.supervisor.stop(0.5)
    assert time.monotonic() - began < 8


async def test_grandchildren_do_not_outlive_the_stop(bench: Bench) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); print('up', flush=True); child.wait()"
    )
    await bench.supervisor.start(bench.program("parent", code))
    await bench.up("parent")
    grandchild = Path(f"/proc/{int(bench.log('parent').split()[0])}/stat")
    assert grandchild.exists()
    await bench.supervisor.stop(10)
    await bench.until(lambda: not grandchild.exists() or ") Z" in grandchild.read_text())


async def test_wrong_settings_end_the_start_instead_of_trying_again(bench: Bench) -> None:
    failure = asyncio.create_task(bench.supervisor.failure())
    await asyncio.sleep(0)
    await bench.supervisor.start(bench.program("api", "import sys; sys.exit(2)"))
    with pytest.raises(ChildFailedError, match="api ended with exit code 2"):
        await asyncio.wait_for(failure, 20)
    assert bench.said == []
    await bench.supervisor.stop(10)


async def test_wrong_settings_later_are_a_crash_like_any_other(bench: Bench) -> None:
    failure = asyncio.create_task(bench.supervisor.failure())
    await asyncio.sleep(0)
    failure.cancel()
    await asyncio.gather(failure, return_exceptions=True)
    await bench.supervisor.start(bench.program("api", "import sys; print('up'); sys.exit(2)"))
    await bench.up("api", times=2)
    await bench.supervisor.stop(10)
    assert bench.said[0].startswith("api ended with exit code 2; starting it again")


async def test_stop_finds_the_process_of_a_launch_under_way(bench: Bench) -> None:
    inner = bench.program("slow", SLEEP).launch
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def launch() -> object:
        loop.call_soon_threadsafe(began.set)
        time.sleep(0.3)
        return inner()

    start = asyncio.create_task(bench.supervisor.start(Program("slow", launch, slow=True)))  # type: ignore[arg-type]
    await began.wait()
    start.cancel()
    await bench.supervisor.stop(10)
    assert not bench.supervisor.running("slow")
    assert len(bench.changes) == 2  # it was there, and it is gone


async def test_launch_that_fails_is_tried_again(bench: Bench) -> None:
    good = bench.program("a", SLEEP)
    tries = 0

    def launch() -> object:
        nonlocal tries
        tries += 1
        if tries in (2, 3):
            raise OSError("no memory")
        return good.launch()

    await bench.supervisor.start(Program("a", launch))  # type: ignore[arg-type]
    await bench.up("a")
    os.kill(bench.pid("a"), signal.SIGKILL)
    await bench.up("a", times=2)
    assert tries == 4
    assert any("could not be started: no memory" in line for line in bench.said)
    await bench.supervisor.stop(10)


async def test_kill_ends_all_at_once(bench: Bench) -> None:
    await bench.supervisor.start(bench.program("deaf", DEAF, patience=60))
    await bench.up("deaf")
    stopping = asyncio.create_task(bench.supervisor.stop(60))
    await asyncio.sleep(0.1)
    bench.supervisor.kill()
    await asyncio.wait_for(stopping, 20)
