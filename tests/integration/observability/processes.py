"""The four kinds of process as they run in production, each writing its log to a file of its own.

with Processes(tmp_path, database_url, temporal_address, models=TOML) as stack:
    httpx.post(stack.url("/v1/tasks"), ...)
    stack.logs()                  everything that all of them logged
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from perdure.embedded.ports import free_port

COMMANDS: Final = {
    "api": ["api"],
    "control": ["worker", "control"],
    "callbacks": ["worker", "callbacks"],
    "gpu": ["worker", "gpu", "--pool", "local"],
}
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 30.0


class Processes:
    """API, control, callbacks and one GPU worker on given servers, or the `commands` by name.

    `env` adds settings for all of them. `later`: commands that only `start` starts.
    """

    def __init__(
        self,
        root: Path,
        database_url: str,
        temporal: str,
        *,
        models: str,
        env: Mapping[str, str] | None = None,
        commands: Mapping[str, list[str]] = COMMANDS,
        later: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.root = root
        self.commands = commands
        self._all = {**commands, **(later or {})}
        self.ports = {name: free_port() for name in self._all}
        (root / "models.toml").write_text(models)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_", "OTEL_"))}
        self.env = clean | {
            "PERDURE_DATABASE_URL": database_url,
            "PERDURE_MODELS": str(root / "models.toml"),
            "PERDURE_AUTH": "none",
            "PERDURE_DRAIN_SECONDS": "1",
            "PERDURE_CALLBACK_ALLOW_HTTP": "true",
            "PERDURE_CALLBACK_ALLOW_CIDRS": "127.0.0.0/8",
            "PERDURE_CALLBACK_PORTS": "",
            "TEMPORAL_ADDRESS": temporal,
            **(env or {}),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def url(self, path: str) -> str:
        """An address of the API."""
        return f"http://127.0.0.1:{self.ports['api']}{path}"

    def page(self, name: str) -> str:
        """The metrics page of a process."""
        return httpx.get(f"http://127.0.0.1:{self.ports[name]}/metrics", trust_env=False).text

    def logs(self) -> str:
        """What all of them wrote."""
        return "".join((self.root / f"{name}.log").read_text() for name in self.commands)

    def run(self, *arguments: str) -> str:
        """Runs a command of `perdure` with the same settings; its output."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "perdure", *arguments],
            env=self.env, cwd=self.root, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def __enter__(self) -> Self:
        try:
            for name in self.commands:
                self._start(name)
            for name in self.commands:
                self._wait(name)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def kill(self, name: str) -> None:
        """Kills a process as a crash does and starts it again."""
        self._running[name].kill()
        self._running[name].wait()
        self.start(name)

    def start(self, name: str) -> None:
        """Starts a process that ended, and waits until it works."""
        self._start(name)
        self._wait(name)

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        self._running[name].send_signal(number)

    def exit_code(self, name: str, seconds: float = _STOP_SECONDS) -> int:
        """Waits until a process ends. Raises subprocess.TimeoutExpired."""
        return self._running[name].wait(seconds)

    def runs(self, name: str) -> bool:
        """Whether the process is there, frozen or not."""
        return self._running[name].poll() is None

    def _start(self, name: str) -> None:
        arguments = self._all[name]
        setting = "PERDURE_PORT" if arguments == ["api"] else "PERDURE_METRICS_PORT"
        environment = self.env | {setting: str(self.ports[name])}
        if name.startswith("gpu"):  # as in production: no database, no caller's secret
            hidden = ("PERDURE_DATABASE_URL", "PERDURE_SECRET_KEY", "PERDURE_CALLBACK_SECRET")
            environment = {key: value for key, value in environment.items() if key not in hidden}
        with (self.root / f"{name}.log").open("wb") as out:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "perdure", *arguments],
                env=environment, cwd=self.root, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def _wait(self, name: str) -> None:
        """Until its page answers and, for workers, until the log says that it works."""
        end = time.monotonic() + _START_SECONDS
        while True:
            log = (self.root / f"{name}.log").read_text()
            assert self._running[name].poll() is None, f"{name} ended:\n{log}"
            assert time.monotonic() < end, f"{name} did not start:\n{log}"
            try:
                reply = httpx.get(f"http://127.0.0.1:{self.ports[name]}/readyz", timeout=2, trust_env=False)
                if reply.status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            time.sleep(0.1)

    def _stop(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self._running.items():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(
                    f"{name} did not stop:\n{(self.root / f'{name}.log').read_text()}"
                ) from None
