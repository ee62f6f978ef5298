"""What idle watchers cost one API process: memory and CPU, beside the same process without them.

    python -m bench.watchers [--streams 2000] [--seconds 30]

Starts a Postgres and one API process of its own, opens event streams on tasks that wait, and reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from perdure.embedded.ports import free_port
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.names import new_task_id
from perdure.store import Store, make_engine
from perdure.store.jsontext import to_json
from perdure.store.migrate import migrate
from perdure.store.rows import NewTask

MODELS = '[pools.p]\n[models.m]\npool = "p"\nexecutor = "simulated"\n'
_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "TEMPORAL_"))}


class Process:
    """Memory and CPU time of a process, from /proc."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")

    @property
    def rss(self) -> int:
        """Resident bytes."""
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu(self) -> float:
        """Seconds of CPU since it began."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def share(self, seconds: float) -> float:
        """Part of one core that it uses over the next seconds."""
        before = self.cpu
        await asyncio.sleep(seconds)
        return (self.cpu - before) / seconds


async def make_tasks(url: str, count: int) -> list[str]:
    """Tasks that wait for tomorrow."""
    store = Store(make_engine(url, pool_size=2, application_name="bench"))
    later = datetime.now(UTC) + timedelta(days=1)
    tasks = [NewTask(new_task_id(), "dev", "m", "p", to_json({}), not_before=later) for _ in range(count)]
    for start in range(0, count, 500):
        await store.tasks.create_many(tasks[start : start + 500])
    await store.aclose()
    return [task.task_id for task in tasks]


async def open_stream(port: int, path: str) -> asyncio.StreamWriter:
    """A watcher that has read its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"\ndata: ")
    return writer


async def measure(name: str, port: int, process: Process, paths: Sequence[str], seconds: float) -> None:
    """Opens the streams, looks at the process, closes them."""
    before = process.rss
    streams: list[asyncio.StreamWriter] = []
    for start in range(0, len(paths), 100):
        streams += await asyncio.gather(*(open_stream(port, path) for path in paths[start : start + 100]))
    await asyncio.sleep(3)  # what began to be watched is looked at more often for 2 s
    share = await process.share(seconds)
    grown = process.rss - before
    per = grown / len(paths) / 1024 if paths else 0
    print(
        f"{name:<34} {grown / 1e6:6.1f} MB  {per:5.1f} KiB each  {100 * share:5.1f} % of a core", flush=True
    )
    for writer in streams:
        writer.close()
    await asyncio.sleep(2)


async def look(streams: int, seconds: float, port: int, pid: int, database_url: str) -> None:
    """Measures a process that has just been started."""
    ids = await make_tasks(database_url, streams)
    for _ in range(300):
        try:
            (await open_stream(port, f"/v1/tasks/{ids[0]}/events")).close()
            break
        except OSError:
            await asyncio.sleep(0.2)
    process = Process(pid)
    await asyncio.sleep(5)
    print(f"{'the process alone':<34} {process.rss / 1e6:6.1f} MB in all", flush=True)
    await measure("no watcher", port, process, [], seconds)
    each = [f"/v1/tasks/{task_id}/events" for task_id in ids]
    await measure(f"{streams} watchers of {streams} tasks", port, process, each, seconds)
    await measure(f"{streams} watchers of one task", port, process, each[:1] * streams, seconds)
    partial = [path + "?include=partial" for path in each]
    await measure(f"{streams} of {streams}, with text", port, process, partial, seconds)


def run(streams: int, seconds: float, root: Path) -> None:
    """Starts Postgres and an API, measures, ends both."""
    postgres = EmbeddedPostgres(root / "pg")
    postgres.start()
    migrate(postgres.dsn)
    (root / "models.toml").write_text(MODELS)
    port = free_port()
    env = {
        **_CLEAN,
        "PERDURE_MODELS": str(root / "models.toml"),
        "PERDURE_DATABASE_URL": postgres.dsn,
        "PERDURE_AUTH": "none",
        "PERDURE_PORT": str(port),
        "TEMPORAL_ADDRESS": "127.0.0.1:1",
    }
    with (root / "log").open("wb") as log:
        api = subprocess.Popen([sys.executable, "-m", "perdure", "api"], env=env, stdout=log, stderr=log)
    try:
        asyncio.run(look(streams, seconds, port, api.pid, postgres.dsn))
    finally:
        api.send_signal(signal.SIGTERM)
        api.wait(20)
        postgres.stop()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-watchers-") as root:
        run(chosen.streams, chosen.seconds, Path(root))


if __name__ == "__main__":
    main()
