"""A real stack for watchers: Postgres, Temporal, one control and one GPU worker, three API processes behind a
TCP proxy that hands each connection to the next of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from perdure.embedded.ports import free_port
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.embedded.temporal import EmbeddedTemporal
from perdure.store.migrate import migrate
from tests.support.waiting import until

COMMAND = [sys.executable, "-P", "-m", "perdure"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "TEMPORAL_"))}
MODELS = """
[pools.p]
slots = 8
[models.simulated]
pool = "p"
executor = "simulated"
[pools.nobody]
[models.waiting]
pool = "nobody"
executor = "simulated"
"""


class Proxy:
    """Round robin over ports, connection by connection. `cut` breaks every connection that is open."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = list(ports)
        self._next = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.served: list[int] = []
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        for _ in self._ports:
            port = self._ports[self._next % len(self._ports)]
            self._next += 1
            try:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue  # this process is gone: the next one
            self.served.append(port)
            await asyncio.gather(self._copy(reader, up_writer), self._copy(up_reader, writer))
            break
        writer.close()
        self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other end broke
        finally:
            self._open.discard(writer)
            writer.close()

    def cut(self) -> None:
        """Breaks all connections without a goodbye."""
        for writer in list(self._open):
            writer.transport.abort()

    async def aclose(self) -> None:
        self._server.close()
        while self._tasks:
            self.cut()
            await asyncio.wait(self._tasks, timeout=0.1)
        await self._server.wait_closed()


class Stack:
    """The processes. Everything is in a folder of its own and ends with `stop`."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="perdure-live-"))
        (self.root / "models.toml").write_text(MODELS)
        self.postgres = EmbeddedPostgres(
            self.root / "pg", settings={"fsync": "off", "synchronous_commit": "off"}
        )
        self.temporal = EmbeddedTemporal(self.root / "temporal")
        self.ports = [free_port() for _ in range(3)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.apis: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.postgres.start()
        migrate(self.postgres.dsn)
        self.temporal.start()
        self.processes = [self._run("worker", "control"), self._run("worker", "gpu", "--pool", "p")]
        self.apis = [self.start_api(port) for port in self.ports]

    def start_api(self, port: int) -> subprocess.Popen[bytes]:
        return self._run("api", PERDURE_PORT=str(port), PERDURE_AUTH="none", PERDURE_DATABASE_POOL="5")

    def _run(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        env = {
            **CLEAN,
            "PERDURE_MODELS": str(self.root / "models.toml"),
            "PERDURE_DATABASE_URL": self.postgres.dsn,
            "TEMPORAL_ADDRESS": self.temporal.address,
            "PERDURE_DRAIN_SECONDS": "0",
            "PERDURE_GRACE_SECONDS": "5",
            **environment,
        }
        with (self.root / "log").open("ab") as log:
            return subprocess.Popen(
                [*COMMAND, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def ready(self) -> None:
        """Waits until every API process serves and a task has run through."""
        async with httpx.AsyncClient(trust_env=False) as client:
            for port in self.ports:
                await until(lambda port=port: self._serves(client, port), seconds=60)  # type: ignore[misc]

    async def _serves(self, client: httpx.AsyncClient, port: int) -> bool:
        assert all(process.poll() is None for process in [*self.processes, *self.apis]), self.log
        try:
            return (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def log(self) -> str:
        return (self.root / "log").read_text()[-4000:]

    def stop(self) -> None:
        running = [*self.apis, *self.processes]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.temporal.stop(5)
        self.postgres.stop()
        shutil.rmtree(self.root, ignore_errors=True)
