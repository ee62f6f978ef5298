"""Whether GPU slots stay busy, what waits and idles holds in memory, and how good estimates are."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

import orjson
import psutil

from bench.bare import Bare
from bench.case import Case
from bench.ground import ONE_WORKER, Ground, lasting, streaming
from bench.stats import Spread, busy_share, sec
from bench.table import Row, met, ratio

_SLOTS = 4
_SECOND = {"tokens": 4, "rate": 4.0}  # one second of work
_MIB = 2**20


async def busy(ground: Ground) -> list[Row]:
    """Slots seen from the model server: how much of the time it has work from all of them. First and last
    wave are left out. The bare workflow streams from the same server."""
    count = ground.often(80, 40)
    label = ground.label("second")
    await ground.submit_all([streaming(label, label, 4, 4.0) for _ in range(count)])
    await ground.ended(label, seconds=count)
    ours = _share(ground, label)
    label = ground.label("bare-second")
    order = orjson.dumps({"label": label, **_SECOND}).decode()
    async with Bare(ground.stack, ground.receiver, slots=_SLOTS) as bare:
        starts = [bare.start(label, order=order, model_url=ground.models.base_url) for _ in range(count)]
        await asyncio.gather(*[handle.result() for handle in await asyncio.gather(*starts)])
    theirs = _share(ground, label)
    return [
        Row(
            "busy",
            f"GPU slots busy with a backlog ({count} tasks of 1 s, {_SLOTS} slots), as the model sees it",
            f"{ours:.1%}",
            f"{theirs:.1%}",
            ratio(ours, theirs),
            ">= 98 %",
            met(ours, least=0.98),
            {"busy": ours, "bare_busy": theirs},
        )
    ]


def _share(ground: Ground, label: str) -> float:
    spans = sorted((made.began, made.ended or made.began) for made in ground.models.seen[label])
    start, end = spans[_SLOTS][0], spans[-_SLOTS][0]
    return busy_share(spans, _SLOTS, start, end)


async def memory(ground: Ground) -> list[Row]:
    """Resident memory of the idle GPU worker, and what 1,000 waiting tasks add to the control worker.

    They are left waiting: it comes last on its stack."""
    idle = [_rss(pid) for pid in ground.stack.worker_pids("wide")]
    await asyncio.sleep(5)  # what earlier rows left behind is done
    used = ground.stack.cpu()
    seconds = 10.0
    await asyncio.sleep(seconds)
    after = ground.stack.cpu()
    idle_cpu = {part: (after[part] - used[part]) / seconds for part in after}
    count, user = 1000, ground.label("waiting")
    blocker = ground.label("blocker")
    await ground.submit(lasting("wide", blocker, 600))
    await ground.reached(blocker, "PROCESSING", 1, seconds=30)
    before = _rss(ground.stack.pid("control"))
    prompt = {"messages": [{"role": "user", "content": "x" * 1024}], "tokens": 1}
    body = lasting("wide", user, 0) | {"params": prompt}
    await ground.submit_all([body] * count)
    await ground.reached(user, "QUEUED", count, seconds=180)
    await asyncio.sleep(2)
    grown = _rss(ground.stack.pid("control")) - before
    part = ", ".join(f"{name} {share:.1%}" for name, share in idle_cpu.items())
    return [
        Row(
            "memory.control",
            f"control worker: memory added by {count:,} waiting tasks of 1 KiB prompts",
            f"{grown:.0f} MiB (on {before:.0f})",
            reach="<= 100 MB",
            met=met(grown * _MIB, most=100e6),
            figures={"added_mib": grown, "before_mib": before},
        ),
        Row(
            "memory.gpu",
            "GPU worker, idle: resident memory",
            f"{max(idle):.0f} MiB",
            reach="<= 120 MB",
            met=met(max(idle) * _MIB, most=120e6),
            figures={"rss_mib": max(idle)},
        ),
        Row(
            "memory.cpu",
            "idle stack: CPU, of one core",
            f"{sum(idle_cpu.values()):.1%} ({part})",
            figures=idle_cpu,
        ),
    ]


def _rss(pid: int) -> float:
    """Resident MiB of a process."""
    return float(psutil.Process(pid).memory_info().rss) / _MIB


async def estimates(ground: Ground) -> list[Row]:
    """Position and start of waiting tasks, as the API estimates them once, against their real starts."""
    learn, user = ground.label("learn"), ground.label("guess")
    await ground.submit_all([lasting("four", learn, 0.5)] * 16)  # it judges by recent service times
    await ground.ended(learn, seconds=60)
    ids = await ground.submit_all([lasting("four", user, 0.5)] * ground.often(60, 40))
    await ground.reached(user, "PROCESSING", _SLOTS, seconds=20)
    given: dict[str, tuple[int, float]] = {}
    asked_at = time.time()
    for task_id in ids[4::4]:
        queue = (await ground.api.expect(200, "GET", f"/v1/tasks/{task_id}"))["queue"]
        if queue is not None:
            at = datetime.fromisoformat(queue["estimated_start_at"]).timestamp()
            given[task_id] = (int(queue["position"]), at)
    await ground.ended(user, seconds=120)
    rows = await ground.tasks(user)
    order = [row["task_id"] for row in rows if row["started"] > asked_at]
    started = {row["task_id"]: row["started"] for row in rows}
    places = Spread.of(abs(place - 1 - order.index(one)) for one, (place, _) in given.items() if one in order)
    errors = Spread.of(abs(at - started[one]) for one, (_, at) in given.items())
    waits = Spread.of(started[one] - asked_at for one in given)
    return [
        Row(
            "estimates",
            f"estimates for {errors.count} waiting tasks: error of the start, p50 / worst; of the position",
            f"{sec(errors.p50)} / {sec(errors.worst)} (waits up to {sec(waits.worst, 1)}); "
            f"{places.p50:.0f} / {places.worst:.0f} places",
            figures={"start_p50": errors.p50, "start_worst": errors.worst, "places_worst": places.worst},
        )
    ]


CASES = [
    Case("busy", "GPU slots busy with a backlog", ONE_WORKER, busy),
    Case("estimates", "queue position and start estimates", ONE_WORKER, estimates),
]
LAST = Case("memory", "memory and CPU of what waits and idles", ONE_WORKER, memory)
