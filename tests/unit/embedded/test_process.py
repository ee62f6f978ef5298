from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perdure.embedded import process
from perdure.embedded.process import Identity, how_it_ended, identify, spawn, stop_leftovers

SLEEPER = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while True: time.sleep(600)",
]


def until(condition: object, seconds: float = 20) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def says(log: Path, word: str) -> bool:
    return log.exists() and word in log.read_text()


def test_spawned_process_is_the_program_itself_in_its_own_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = spawn(SLEEPER, os.environ, log, tmp_path)
    try:
        until(lambda: says(log, "up"))
        assert os.getsid(child.pid) == child.pid
        assert b"time.sleep(600)" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        assert b"leash" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    finally:
        child.kill()
        child.wait()


def test_identity_tells_a_process_from_a_later_one_with_its_id() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert me.alive()
    assert not Identity(me.pid, "another start").alive()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
def test_a_process_lives_until_its_last_thread_has_gone() -> None:
    """A killed process shows as a zombie while threads of it still end, and until then it holds its ports."""
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start();"
        "print('up', flush=True); ctypes.CDLL(None).pthread_exit(None)"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        known = identify(child.pid)
        assert known is not None
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        assert known.alive()
        child.kill()
        until(lambda: not known.alive())
    finally:
        child.kill()
        child.communicate()


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    known = identify(child.pid)
    assert known is not None
    until(lambda: not known.alive())  # ended, not yet waited for
    assert child.wait() == 0
    assert identify(child.pid) is None


def test_leftovers_are_asked_then_killed_and_strangers_left_alone(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("a", "b", "c")]
    willing, stubborn, stranger = (
        spawn(line, os.environ, log, tmp_path)
        for line, log in zip((SLEEPER, STUBBORN, SLEEPER), logs, strict=True)
    )
    children = (willing, stubborn, stranger)
    try:
        for log in logs:
            until(lambda log=log: says(log, "up"))
        found = {
            "willing": identify(willing.pid),
            "stubborn": identify(stubborn.pid),
            "stranger": Identity(stranger.pid, "long ago"),  # the id was given to another program since
        }
        assert None not in found.values()
        stopped = stop_leftovers(found, {"willing": signal.SIGINT}, 0.3)  # type: ignore[arg-type]
        assert sorted(stopped) == ["stubborn", "willing"]
        assert willing.wait(10) == -signal.SIGINT
        assert stubborn.wait(10) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from perdure.embedded.process import spawn\n"
        f"child = spawn({SLEEPER!r}, os.environ, Path(sys.argv[1]) / 'log', Path(sys.argv[1]))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = identify(int(parent.stdout.readline()))
        assert child is not None
        until(lambda: says(tmp_path / "log", "up"))
        parent.kill()
    until(lambda: not child.alive())


def test_what_ended_is_said_in_words() -> None:
    assert how_it_ended(3) == "ended with exit code 3"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-200) == "was killed by signal 200"


def test_killing_a_group_that_is_gone_is_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"], start_new_session=True)
    child.wait()
    process.kill_group(child.pid)
