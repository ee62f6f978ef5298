"""A whole stack as a person runs it: `perdure dev` as a process, on ports of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from perdure.embedded.plan import Ports
from tests.support.port_blocks import free_port_base

START_SECONDS = 120.0
COMMAND = [sys.executable, "-P", "-m", "perdure"]
# Nothing of the caller's settings, and no name of a foreign Temporal.
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "TEMPORAL_"))}
ENV["PERDURE_DRAIN_SECONDS"] = "0.3"  # a quick machine must not finish a task while it is being stopped


def until(condition: Callable[[], Any], seconds: float = 60, what: str = "") -> Any:
    """Waits until a condition holds and returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds} s: {what}"
        time.sleep(0.1)
    return found


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


class DevStack:
    """One data folder and the `perdure dev` that runs on it, if one does."""

    def __init__(self, root: Path, *options: str) -> None:
        self.data = root / "data"
        self.base = free_port_base()
        self.options = ["--data-dir", str(self.data), "--port-base", str(self.base), *options]
        self.output = root / "dev.log"
        self.process: subprocess.Popen[bytes] | None = None

    # The process --------------------------------------------------------------------------------------
    def start(self) -> None:
        """Starts it and waits until dev.json says that all is ready."""
        self.launch()
        until(self._ready, START_SECONDS, "dev.json of the stack")

    def launch(self) -> None:
        """Starts it."""
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [*COMMAND, "dev", *self.options], env=ENV, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.output.read_text()
        return (self.data / "dev.json").exists() and self.dev["pid"] == self.process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> float:
        """Stops it as a person does. Returns the seconds that it took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(60) == 0, self.output.read_text()
        self.process = None
        return time.monotonic() - began

    def kill(self) -> None:
        """Kills the parent alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def end(self) -> None:
        """Leaves nothing, whatever a test did."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        recorded = self.data / "children.json"
        for pid, _ in json.loads(recorded.read_text()).values() if recorded.exists() else ():
            if alive(pid):
                os.killpg(pid, signal.SIGKILL)

    @property
    def dev(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data / "dev.json").read_text())
        return found

    @property
    def children(self) -> dict[str, int]:
        found: dict[str, int] = self.dev["children"]
        return found

    # The service --------------------------------------------------------------------------------------
    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, self.dev["urls"]["api"] + path, timeout=30, trust_env=False, **more)

    def submit(self, prompt: str, model: str = "smollm2-135m", **params: Any) -> str:
        messages = [{"role": "user", "content": prompt}]
        body = {"model_id": model, "params": {"messages": messages, "temperature": 0} | params}
        answer = self.call("POST", "/v1/tasks", json=body)
        assert answer.status_code == 202, answer.text
        task_id: str = answer.json()["task_id"]
        return task_id

    def task(self, task_id: str, include: str = "") -> dict[str, Any]:
        answer = self.call("GET", f"/v1/tasks/{task_id}", params={"include": include} if include else {})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def until_status(self, task_id: str, *wanted: str, seconds: float = 90) -> dict[str, Any]:
        """Waits for one of the states; a final one that is not wanted fails at once."""
        deadline = time.monotonic() + seconds
        while (task := self.task(task_id))["status"] not in wanted:
            assert task["status"] not in ("COMPLETED", "FAILED", "CANCELLED"), task
            assert time.monotonic() < deadline, task
            time.sleep(0.1)
        return task

    def busy_slots(self) -> int:
        """How many of the model server's slots generate now."""
        slots = httpx.get(
            f"http://127.0.0.1:{Ports.of(self.base).model}/slots", timeout=30, trust_env=False
        ).json()
        return sum(slot["is_processing"] for slot in slots)
