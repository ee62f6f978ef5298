"""Processes of the local stack: how one is started, known again after its parent crashed, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LEASH = Path(__file__).with_name("leash.py")


@dataclass(frozen=True)
class Identity:
    """A process, told apart from a later one with the same id by when it started."""

    pid: int
    started: str

    def alive(self) -> bool:
        """Whether this very process still runs, be it with one thread (a zombie does not)."""
        return started_at(self.pid) == self.started


def identify(pid: int) -> Identity | None:
    """The identity of a running process; None when there is none."""
    started = started_at(pid)
    return None if started is None else Identity(pid, started)


def started_at(pid: int) -> str | None:
    """When a process started, in a form that is only good for comparing. None: not running."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _started_by_ps(pid)
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    threads = int(fields[17])  # one that was killed shows as a zombie while other threads hold its ports yet
    return None if fields[0] in "ZX" and threads <= 1 else fields[19]


def _started_by_ps(pid: int) -> str | None:
    answer = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def spawn(command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own, so that Ctrl-C in the terminal reaches the parent alone.

    Its output is appended to `log`. Call it from the main thread: the leash ends with the calling thread.
    """
    line = [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *command]
    with log.open("ab") as out:
        return subprocess.Popen(
            line,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def kill_group(pid: int) -> None:
    """Kills a session leader and everything that it started and left in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        pass


def send(identity: Identity, number: signal.Signals) -> None:
    """Signals a process, if it is still the same."""
    if identity.alive():
        try:
            os.kill(identity.pid, number)
        except ProcessLookupError:
            pass


def stop_leftovers(
    found: Mapping[str, Identity], stop_signals: Mapping[str, signal.Signals], patience: float
) -> list[str]:
    """Stops processes that an earlier parent left. Returns the names of those that were alive.

    Asks all at once, waits `patience` seconds, then kills the rest with all they started.
    """
    alive = {name: identity for name, identity in found.items() if identity.alive()}
    for name, identity in alive.items():
        send(identity, stop_signals.get(name, signal.SIGTERM))
    deadline = time.monotonic() + patience
    waiting = dict(alive)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.05)
        waiting = {name: identity for name, identity in waiting.items() if identity.alive()}
    for identity in waiting.values():
        kill_group(identity.pid)
    while any(identity.alive() for identity in waiting.values()):
        time.sleep(0.02)
    return list(alive)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
