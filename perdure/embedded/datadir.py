"""The data folder of a local stack (`.perdure`): its lock, secrets, logs, and what runs on it.

lock              held while a stack runs here
dev.json          written when all is ready; other programs read it
children.json     every process started, so that a killed parent's children are found again
secrets/          made once, readable by the owner only
logs/NAME.log     output of each child; NAME.log.1 that of the start before
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from perdure.embedded.process import Identity

MAX_TAIL_LINE = 300
MAX_LOG_BYTES = 20 * 1024 * 1024  # then it moves to NAME.log.1


class InUseError(RuntimeError):
    """Another stack runs on this data folder."""


class DataDir:
    """One data folder. `open()` makes it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.logs = self.root / "logs"
        self.dev_json = self.root / "dev.json"
        self._children = self.root / "children.json"
        self._lock_file = self.root / "lock"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Makes the folder. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(mode=0o700, exist_ok=True)
        (self.root / "secrets").mkdir(mode=0o700, exist_ok=True)

    # The lock -----------------------------------------------------------------------------------------
    def lock(self) -> None:
        """Takes the folder for this process until it ends, however it ends. Raises InUseError."""
        handle = self._lock_file.open("a+")
        deadline = time.monotonic() + 0.5
        while not _flock(handle, fcntl.LOCK_EX):
            if time.monotonic() < deadline:  # `in_use` of another process holds it for a moment
                time.sleep(0.05)
                continue
            handle.seek(0)
            pid = handle.read().strip()
            handle.close()
            who = f"pid {pid}" if pid else "another process"
            raise InUseError(
                f"a stack already runs on {self.root} ({who}); "
                "stop it, or give this one a folder of its own with --data-dir and ports with --port-base"
            )
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        self._lock = handle

    @property
    def locked(self) -> bool:
        """Whether this process holds the folder."""
        return self._lock is not None

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def in_use(self) -> bool:
        """Whether a stack holds the folder now."""
        try:
            with self._lock_file.open("r") as handle:
                return not _flock(handle, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    # Secrets ------------------------------------------------------------------------------------------
    def secret(self, name: str, make: Callable[[], str]) -> str:
        """A secret text, made on the first call."""
        path = self.root / "secrets" / name
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            value = make()
            temporary = path.with_suffix(".new")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
                out.write(value)
            temporary.rename(path)
            return value

    # What runs ----------------------------------------------------------------------------------------
    def record_children(self, children: Mapping[str, Identity]) -> None:
        write_json(self._children, {name: [who.pid, who.started] for name, who in children.items()})

    def recorded_children(self) -> dict[str, Identity]:
        """What an earlier parent wrote down; empty when there is nothing readable."""
        try:
            found = json.loads(self._children.read_text())
            return {str(name): Identity(int(pid), str(started)) for name, (pid, started) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def write_dev(self, content: Mapping[str, Any]) -> None:
        write_json(self.dev_json, content, mode=0o600)  # it holds the database's password

    def read_dev(self) -> dict[str, Any] | None:
        """dev.json; None while nothing is ready."""
        try:
            content = json.loads(self.dev_json.read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    # Logs ---------------------------------------------------------------------------------------------
    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace(':', '-')}.log"

    def new_log(self, name: str) -> Path:
        """An empty log for this start; the one of the start before is kept as NAME.log.1."""
        path = self.log(name)
        if path.exists():
            path.replace(path.with_suffix(".log.1"))
        return path

    def link_log(self, name: str, place: Path) -> None:
        """Shows a log that is kept elsewhere among the others."""
        path = self.log(name)
        path.unlink(missing_ok=True)
        path.symlink_to(place)

    def bound_log(self, name: str) -> None:
        """Moves a log that has grown too long aside. The writer appends, so it goes on at the start."""
        path = self.log(name)
        try:
            if path.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)
        except OSError:  # not written yet, or the disk is full: the log is no reason to stop
            pass

    def log_size(self, name: str) -> int:
        """Bytes in a child's log."""
        try:
            return self.log(name).stat().st_size
        except OSError:
            return 0

    def log_tail(self, name: str, since: int = 0, lines: int = 8) -> list[str]:
        """The last lines of a child's log after its first `since` bytes, each cut to a readable length."""
        try:
            with self.log(name).open("rb") as log:
                log.seek(max(since, self.log_size(name) - 16_384))
                found = log.read().decode(errors="replace").splitlines()[-lines:]
        except OSError:
            return []
        return [line if len(line) <= MAX_TAIL_LINE else f"{line[:MAX_TAIL_LINE]} …" for line in found]


def _flock(handle: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_json(path: Path, content: Mapping[str, Any], mode: int = 0o644) -> None:
    """Replaces a file in one step: a reader sees the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as out:
        json.dump(content, out, indent=2)
        out.write("\n")
    temporary.replace(path)
