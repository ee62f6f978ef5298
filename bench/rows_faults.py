"""Workers and the engine killed while they work: what goes on where, how soon, and what is made twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import orjson

from bench.bare import Bare
from bench.case import Case
from bench.ground import TWO_WORKERS, Ground, lasting, streaming
from bench.servers import Generation
from bench.stats import Spread, sec
from bench.table import Row, met
from perdure.embedded.temporal import wait_until_serving

_RATE = 20.0  # tokens a second
_TOKENS = 400
_RUN = 4.5  # seconds of work before the blow
_PATIENCE = 40.0


@dataclass(frozen=True)
class Handover:
    """From the blow to the next attempt's first token; tokens that were made again."""

    seconds: float
    again: int


async def kill(ground: Ground) -> list[Row]:
    """kill -9 of a GPU worker in mid-stream: alone, with a backlog of tasks, and the bare workflow."""
    alone = [await _ours(ground, signal.SIGKILL) for _ in range(ground.often(3, 1))]
    behind = ground.label("behind")
    await ground.submit_all([lasting("two", behind, 1.0)] * 400)
    await ground.reached(behind, "PROCESSING", 3, seconds=30)
    crowded = [await _ours(ground, signal.SIGKILL) for _ in range(ground.often(2, 1))]
    await ground.cancel_all(behind)
    theirs = await _bare(ground)
    return [
        _kill_row("kill", "", alone, theirs),
        _kill_row("kill.backlog", ", with a backlog", crowded, None),
    ]


def _kill_row(key: str, what: str, found: list[Handover], bare: Handover | None) -> Row:
    seconds = Spread.of(one.seconds for one in found)
    again = max(one.again for one in found)
    return Row(
        key,
        f"kill -9 of a worker{what}: next attempt's first token (worst of {len(found)}); tokens made again",
        f"{sec(seconds.worst, 1)}; {again} ({again / _RATE:.1f} s worth)",
        f"{sec(bare.seconds, 1)}; {bare.again} (all)" if bare else "-",
        reach="<= 12 s; <= 2 s worth",
        met=met(seconds.worst, most=12.0) and again <= 2 * _RATE,
        figures={"worst": seconds.worst, "again": again}
        | ({"bare_seconds": bare.seconds, "bare_again": bare.again} if bare else {}),
    )


async def drain(ground: Ground) -> list[Row]:
    """SIGTERM of a GPU worker in mid-stream: what is left after `drain_seconds` goes on elsewhere."""
    limit = ground.kind.drain_seconds
    found = [await _ours(ground, signal.SIGTERM) for _ in range(ground.often(3, 1))]
    late = Spread.of(one.seconds - limit for one in found)
    again = max(one.again for one in found)
    return [
        Row(
            "drain",
            f"drain of a GPU worker: handed over after drain_seconds ({limit:g} s), worst of {len(found)}; "
            "tokens made again",
            f"{sec(late.worst)}; {again}",
            "not offered",
            reach="<= 1 s; 0",
            met=met(late.worst, most=1.0) and again == 0,
            figures={"worst": late.worst, "again": again},
        )
    ]


async def _ours(ground: Ground, number: signal.Signals) -> Handover:
    """One streaming task, a signal to the worker that runs it, the next attempt as the model sees it."""
    label = ground.label("struck")
    task_id = await ground.submit(streaming(label, label, _TOKENS, _RATE) | {"priority": "HIGH"})
    first = await ground.models.generation(label, 0, _PATIENCE, made=int(_RUN * _RATE))
    await ground.reached(label, "PROCESSING", 1, seconds=10)
    task = await ground.api.expect(200, "GET", f"/v1/tasks/{task_id}")
    pid = int(str(task["attempts"][-1]["worker"]).rsplit(":", 1)[1])
    assert first is not None
    assert pid in ground.stack.worker_pids("two"), f"{task['attempts']} names no worker of ours"
    at = time.time()
    os.kill(pid, number)
    found = await _next(ground, label, first, at)
    await ground.cancel_all(label)
    await _whole(ground)
    return found


async def _next(ground: Ground, label: str, first: Generation, at: float) -> Handover:
    second = await ground.models.generation(label, 1, _PATIENCE, made=1)
    if second is None or second.first_token_at is None:
        raise TimeoutError(f"no next attempt within {_PATIENCE:.0f} s")
    return Handover(second.first_token_at - at, first.made - second.first)


async def _whole(ground: Ground) -> None:
    """Waits until the supervisor has replaced the worker, so that the next blow finds two again."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        queues = await ground.api.expect(200, "GET", "/v1/queues")
        seen = {str(worker["worker"]).rsplit(":", 1)[1] for worker in queues["data"][0]["workers"]}
        if {str(pid) for pid in ground.stack.worker_pids("two")} <= seen:
            return
        await asyncio.sleep(0.2)
    raise TimeoutError("the killed worker was not replaced")


async def _bare(ground: Ground) -> Handover:
    label = ground.label("bare-struck")
    order = orjson.dumps({"label": label, "tokens": _TOKENS, "rate": _RATE}).decode()
    async with Bare(ground.stack, ground.receiver, slots=2, pool_workers=2) as bare:
        handle = await bare.start(label, order=order, model_url=ground.models.base_url)
        first = await ground.models.generation(label, 0, _PATIENCE, made=int(_RUN * _RATE))
        assert first is not None
        (pending,) = (await handle.describe()).raw_description.pending_activities
        at = time.time()
        os.kill(int(pending.last_worker_identity.split("@")[0]), signal.SIGKILL)
        found = await _next(ground, label, first, at)
        await bare.drop([handle])
    return found


# The engine -----------------------------------------------------------------------------------------------
async def engine(ground: Ground) -> list[Row]:
    """kill -9 of Temporal with 4 running and many queued; the supervisor starts it again."""
    queued = ground.often(300, 100)
    label = ground.label("engine")
    tasks = [streaming(f"{label}/{n}", label, 5, 10.0) for n in range(queued + 4)]
    await ground.submit_all(tasks)
    await ground.reached(label, "PROCESSING", 4, seconds=30)
    down, back = await _kill_engine(ground)
    await ground.ended(label, seconds=queued + 60)
    ours = _after(ground, label, down, back, await ground.count(label, "COMPLETED"))
    theirs = await _bare_engine(ground, queued)
    return [
        Row(
            "engine",
            f"kill -9 of Temporal, {queued} queued, 4 running, back after {back - down:.1f} s: "
            "lost; run twice; going on after it is back",
            _engine_words(ours),
            _engine_words(theirs),
            reach="0; 0; <= 1 s",
            met=ours["lost"] == 0 and ours["twice"] == 0 and ours["going_on"] <= 1.0,
            figures=ours | {f"bare_{name}": value for name, value in theirs.items()},
        )
    ]


def _engine_words(found: dict[str, float]) -> str:
    return f"{found['lost']:.0f}; {found['twice']:.0f}; {found['going_on']:.1f} s"


async def _kill_engine(ground: Ground) -> tuple[float, float]:
    """When it was killed, and when it served again."""
    address, pid = ground.stack.url("temporal"), ground.stack.pid("temporal")
    await asyncio.sleep(1.0)
    down = time.time()
    os.kill(pid, signal.SIGKILL)
    while ground.stack.pid("temporal") == pid:  # noqa: ASYNC110 - the supervisor writes a file
        await asyncio.sleep(0.02)
    await wait_until_serving(address, 60)
    return down, time.time()


def _after(ground: Ground, label: str, down: float, back: float, completed: int) -> dict[str, float]:
    """What the model server saw: tasks it got twice, and the first request after the engine was back."""
    labels = {name: many for name, many in ground.models.seen.items() if name.startswith(label + "/")}
    expected = ground.often(300, 100) + 4
    later = [made.began for many in labels.values() for made in many if made.began > down + 0.1]
    return {
        "lost": expected - completed,
        "twice": sum(len(many) > 1 for many in labels.values()),
        "going_on": max(0.0, min(later) - back) if later else float("nan"),
        "down_seconds": back - down,
    }


async def _bare_engine(ground: Ground, queued: int) -> dict[str, float]:
    label = ground.label("bare-engine")
    async with Bare(ground.stack, ground.receiver, slots=2, pool_workers=2) as bare:

        def start(number: int) -> Any:
            order = {"label": f"{label}/{number}", "tokens": 5, "rate": 10.0}
            return bare.start(label, order=orjson.dumps(order).decode(), model_url=ground.models.base_url)

        handles = await asyncio.gather(*(start(n) for n in range(queued + 4)))
        await ground.models.generation(f"{label}/0", 0, 30)
        down, back = await _kill_engine(ground)
        end = time.monotonic() + queued + 60
        done = 0
        while done < len(handles) and time.monotonic() < end:
            await asyncio.sleep(0.2)
            done = len(await bare.finished(label))
        return _after(ground, label, down, back, done)


CASES = [
    Case("kill", "kill -9 of a GPU worker", TWO_WORKERS, kill),
    Case("drain", "drain of a GPU worker", TWO_WORKERS, drain),
    Case("engine", "kill -9 of Temporal", TWO_WORKERS, engine),
]
