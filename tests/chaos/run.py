"""One run: the stack, a doubtful model, a doubtful receiver, tasks and faults, and the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from bench.stack import Stack
from tests.chaos.faults import HEARTBEAT, KINDS, Faults, Strike
from tests.chaos.load import Load
from tests.chaos.model import ChaosModel
from tests.chaos.verdict import TRIGGER, Verdict, judge, settled
from tests.support.receiver import Receiver, Reply, Request, answer

MODELS = """
[pools.sim]
slots = 4
[pools.scripted]
slots = 4
[models.simulated]
pool = "sim"
executor = "simulated"
heartbeat_timeout = {heartbeat}
[models.scripted]
pool = "scripted"
executor = "openai"
base_url = "{base_url}"
resume = "trailing"
heartbeat_timeout = {heartbeat}
token_timeout = 10
"""
SETTLE_SECONDS = 300.0
DRAIN_SECONDS = "2"


@dataclass
class Report:
    strikes: list[Strike]
    verdict: Verdict


async def chaos(
    tasks: int,
    seed: int,
    pace: float,
    *,
    say: Callable[[str], None] = lambda line: None,
    kinds: Sequence[str] = KINDS,
    every: tuple[float, float] = (1.0, 4.0),
) -> Report:
    """Runs `tasks` tasks under faults, and more until every kind was there once.

    `every`: seconds from one fault's recovery to the next fault, at least and at most.
    """
    rng = random.Random(seed)
    model = ChaosModel(random.Random(rng.random()))
    dice = random.Random(rng.random())

    def doubtful(request: Request) -> Reply:
        return answer(500) if dice.random() < 0.1 else answer(200)

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(model.server)
        receiver = await stack.enter_async_context(Receiver(doubtful))
        running = await stack.enter_async_context(
            Stack(
                MODELS.format(base_url=model.server.base_url, heartbeat=HEARTBEAT),
                gpu_workers=2,
                env={"PERDURE_DRAIN_SECONDS": DRAIN_SECONDS},
            )
        )
        say(f"the stack runs, data in {running.data}")
        database = running.database_url
        await _install(database)
        load = Load(running, random.Random(rng.random()), tasks, receiver.url(), pace)
        watch = _Watch(database)
        watching = asyncio.create_task(watch.run())
        stop = asyncio.Event()
        attack = Faults(running, random.Random(rng.random()), lambda: watch.finished, kinds, every)
        attacking = asyncio.create_task(attack.run(stop))
        await load.run(attack.all_struck)
        stop.set()
        say(f"{len(load.accepted)} tasks are in, after {len(attack.strikes)} faults")
        await attacking
        waited = await settled(database, load, SETTLE_SECONDS)
        watching.cancel()
        verdict = await judge(
            database, load, receiver, running.description["callback_secret"], attack.strikes
        )
        verdict.figures["settled after the last fault (s)"] = round(waited, 1)
        verdict.figures["faults of the model server"] = model.faults
        verdict.figures["words streamed by the model server"] = model.words
        made_again = model.words - verdict.words_kept
        verdict.figures["of them made again, or dropped with a cancel"] = made_again
        await _slots(verdict, load)
        verdict.check("model connections left open", model.server.open)
        if verdict.broken:
            kept = Path(tempfile.mkdtemp(prefix=f"perdure-chaos-{seed}-"))
            shutil.copytree(running.data / "logs", kept, dirs_exist_ok=True)
            say(f"the logs of the broken run are kept in {kept}")
        return Report(attack.strikes, verdict)


async def _install(database: str) -> None:
    connection = await asyncpg.connect(database)
    try:
        await connection.execute(TRIGGER)
    finally:
        await connection.close()


async def _slots(verdict: Verdict, load: Load) -> None:
    """Every slot takes a task at once: none leaked."""
    async with load.client() as client:
        slots = sum(pool["slots"] for pool in (await client.get("/v1/queues")).json()["data"])
        ids = []
        for _ in range(8):  # two workers of four slots
            body = {"model_id": "simulated", "params": {"tokens": 200, "tokens_per_second": 20}}
            ids.append((await client.post("/v1/tasks", json=body)).json()["task_id"])
        end = asyncio.get_running_loop().time() + 8  # each runs for ten
        started = 0
        while started < len(ids) and asyncio.get_running_loop().time() < end:
            states = [(await client.get(f"/v1/tasks/{one}")).json()["status"] for one in ids]
            started = sum(state == "PROCESSING" for state in states)
            await asyncio.sleep(0.2)
        for one in ids:
            await client.post(f"/v1/tasks/{one}/cancel")
    verdict.figures["slots seen"] = slots
    verdict.check("leaked slots", len(ids) - started)


class _Watch:
    """Counts finished tasks through the database, whatever is down."""

    def __init__(self, database: str) -> None:
        self._database = database
        self.finished = 0

    async def run(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
                connection = await asyncpg.connect(self._database, timeout=3, command_timeout=3)
                try:
                    while True:
                        self.finished = await connection.fetchval(
                            "SELECT count(*) FROM tasks WHERE completed_at IS NOT NULL"
                        )
                        await asyncio.sleep(0.1)
                finally:
                    connection.terminate()
            await asyncio.sleep(0.2)
