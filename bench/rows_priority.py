"""Who starts first: classes behind backlogs, users beside users, shares, and what keeps LOW from starving."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from temporalio.client import WorkflowHandle
from temporalio.common import Priority

from bench.bare import Bare
from bench.case import Case
from bench.ground import ONE_WORKER, OPEN, Ground, lasting
from bench.stats import Spread, pair, sec
from bench.table import Row, met, ratio

_SLOTS = 4
_BETWEEN = 0.4  # seconds between probes
_SHORT, _LONG = 0.25, 0.75  # seconds that a task of the backlog takes


def _backlog(user: str, count: int, priority: str = "LOW", model: str = "four") -> list[dict[str, Any]]:
    chance = random.Random(7)
    return [lasting(model, user, chance.uniform(_SHORT, _LONG), priority) for _ in range(count)]


async def _probe(count: int, once: Callable[[], Awaitable[tuple[str, float]]]) -> dict[str, float]:
    """Starts `count` probes one after the other; when each was submitted, by id."""
    sent: dict[str, float] = {}
    for _ in range(count):
        began = time.time()
        task_id, _at = await once()
        sent[task_id] = began
        await asyncio.sleep(_BETWEEN)
    return sent


async def _high(ground: Ground, count: int, model: str = "four") -> Spread:
    """Submit -> start of HIGH tasks."""
    user = ground.label("high")

    async def once() -> tuple[str, float]:
        return await ground.submit(lasting(model, user, _SHORT, "HIGH")), 0.0

    sent = await _probe(count, once)
    await ground.ended(user, seconds=60)
    return Spread.of(row["started"] - sent[row["task_id"]] for row in await ground.tasks(user))


async def _bare_high(ground: Ground, bare: Bare, count: int) -> Spread:
    handles: list[WorkflowHandle[Any, Any]] = []

    async def once() -> tuple[str, float]:
        handle = await bare.start("high", seconds=_SHORT, priority=Priority(priority_key=1))
        handles.append(handle)
        return handle.id, 0.0

    sent = await _probe(count, once)
    await asyncio.gather(*(handle.result() for handle in handles))
    started = await bare.started_at(list(sent))
    return Spread.of(started[one] - began for one, began in sent.items())


async def high(ground: Ground) -> list[Row]:
    """HIGH behind 400 LOW that wait for slots."""
    probes = ground.often(40, 15)
    low = ground.label("low")
    await ground.submit_all(_backlog(low, 400))
    await ground.reached(low, "QUEUED", 32, seconds=60)
    ours = await _high(ground, probes)
    await ground.cancel_all(low)
    async with Bare(ground.stack, ground.receiver, slots=_SLOTS) as bare:
        chance, lowest = random.Random(7), Priority(priority_key=5)
        starts = [
            bare.start("low", seconds=chance.uniform(_SHORT, _LONG), priority=lowest) for _ in range(400)
        ]
        backlog = await asyncio.gather(*starts)
        theirs = await _bare_high(ground, bare, probes)
        await bare.drop(backlog)
    return [_high_row("high", "HIGH behind 400 LOW of 0.25-0.75 s on 4 slots", ours, theirs)]


async def burst(ground: Ground) -> list[Row]:
    """HIGH behind a burst of 5,000 that is only rows yet, and a start in another, empty pool meanwhile."""
    probes = ground.often(20, 10)
    low = ground.label("burst")
    began = time.perf_counter()
    await ground.submit_all(_backlog(low, 5000))
    took = time.perf_counter() - began
    empty = asyncio.create_task(_empty(ground, probes))
    ours = await _high(ground, probes)
    elsewhere = await empty
    left = await ground.count(low, "PENDING")
    await ground.cancel_all(low)
    row = _high_row("burst", f"HIGH behind a burst of 5,000 ({left} not started at the end)", ours, None)
    return [
        row,
        Row(
            "burst.empty",
            "time to first start in an empty pool beside that burst, p50 / p99",
            pair(elsewhere),
            figures={"p50": elsewhere.p50, "p99": elsewhere.p99},
        ),
        Row("burst.intake", "5,000 tasks taken in by bulk", sec(took, 1), figures={"seconds": took}),
    ]


async def _empty(ground: Ground, count: int) -> Spread:
    user = ground.label("elsewhere")

    async def once() -> tuple[str, float]:
        return await ground.submit(lasting("zero", user, _SHORT)), 0.0

    sent = await _probe(count, once)
    await ground.ended(user, seconds=60)
    return Spread.of(row["started"] - sent[row["task_id"]] for row in await ground.tasks(user))


def _high_row(key: str, what: str, ours: Spread, theirs: Spread | None) -> Row:
    within = met(ours.p50, most=0.15) and met(ours.p99, most=0.3)
    return Row(
        key,
        f"{what}: submit -> start, p50 / p99",
        pair(ours, "s"),
        pair(theirs, "s") if theirs else "-",
        ratio(ours.p50, theirs.p50) if theirs else None,
        "<= 0.15 / 0.30 s",
        within,
        {"p50": ours.p50, "p99": ours.p99} | ({"bare_p50": theirs.p50} if theirs else {}),
    )


async def users(ground: Ground) -> list[Row]:
    """User B's 5 tasks behind user A's 300: A's in the window, then A's all unstarted."""
    spreads: list[Spread] = []
    for waiting in (True, False):
        first, second = ground.label("user-a"), ground.label("user-b")
        await ground.submit_all(_backlog(first, 300, "NORMAL"))
        if waiting:
            await ground.reached(first, "QUEUED", 32, seconds=60)
        began = time.time()
        await ground.submit_all(_backlog(second, 5, "NORMAL"))
        await ground.ended(second, seconds=120)
        spreads.append(Spread.of(row["started"] - began for row in await ground.tasks(second)))
        await ground.cancel_all(first)
    theirs = await _bare_users(ground)
    names = ("users", "users.unstarted"), ("", ", A's just submitted")
    return [
        Row(
            key,
            f"user B's 5 tasks behind user A's 300{more}: submit -> start, median / last",
            f"{sec(ours.p50)} / {sec(ours.worst)}",
            f"{sec(theirs.p50)} / {sec(theirs.worst)}" if key == "users" else "-",
            ratio(ours.p50, theirs.p50) if key == "users" else None,
            "<= 0.6 s median",
            met(ours.p50, most=0.6),
            {"p50": ours.p50, "worst": ours.worst},
        )
        for key, more, ours in zip(*names, spreads, strict=True)
    ]


async def _bare_users(ground: Ground) -> Spread:
    async with Bare(ground.stack, ground.receiver, slots=_SLOTS) as bare:
        chance = random.Random(7)

        async def start(user: str) -> WorkflowHandle[Any, Any]:
            share = Priority(priority_key=3, fairness_key=user)
            return await bare.start(user, seconds=chance.uniform(_SHORT, _LONG), priority=share)

        backlog = await asyncio.gather(*(start("a") for _ in range(300)))
        began = time.time()
        probes = await asyncio.gather(*(start("b") for _ in range(5)))
        await asyncio.gather(*(probe.result() for probe in probes))
        started = await bare.started_at([probe.id for probe in probes])
        await bare.drop(backlog)
    return Spread.of(at - began for at in started.values())


async def shares(ground: Ground) -> list[Row]:
    """The first 120 starts of a weighted pool with a backlog of every class, LOW submitted first."""
    blocker, user = ground.label("blocker"), ground.label("shares")
    await ground.submit_all([lasting("shared", blocker, 4.0)] * _SLOTS)
    await ground.reached(blocker, "PROCESSING", _SLOTS, seconds=30)
    for priority in ("LOW", "NORMAL", "HIGH"):
        await ground.submit_all([lasting("shared", user, 0.2, priority)] * 120)
    await ground.reached(user, "COMPLETED", 125, seconds=120)
    rows = [row for row in await ground.tasks(user) if row["started"]]
    await ground.cancel_all(user, blocker)
    found = Counter(row["priority"] for row in rows[:120])
    seen = [found[name] for name in ("HIGH", "NORMAL", "LOW")]
    off = max(abs(count - share) for count, share in zip(seen, (60, 40, 20), strict=True))
    return [
        Row(
            "shares",
            "weighted pool: HIGH : NORMAL : LOW among the first 120 starts",
            " : ".join(map(str, seen)),
            "1 key per task: classes or users",
            reach="60 : 40 : 20, 6 off at most",
            met=off <= 6,
            figures={"off": off},
        )
    ]


async def flood(ground: Ground) -> list[Row]:
    """LOW while 40 HIGH tasks are open at any time, in a pool of 4 slots with max_wait = 3 s."""
    most = 3.0
    seconds, step = ground.often(25, 15), 0.25
    hot, cold = ground.label("hot"), ground.label("cold")
    deep = 40  # HIGH tasks that are open at any time
    await ground.submit_all([lasting("ageing", hot, 0.25, "HIGH")] * deep)
    await ground.reached(hot, "COMPLETED", _SLOTS, seconds=60)
    began = time.time()
    await ground.submit_all([lasting("ageing", cold, 0.25, "LOW")] * 5)
    while time.time() - began < seconds:
        if missing := deep - await ground.count(hot, *OPEN):
            await ground.submit_all([lasting("ageing", hot, 0.25, "HIGH")] * max(1, missing))
        await asyncio.sleep(step)
    await ground.cancel_all(hot)
    await ground.ended(cold, seconds=60)
    rows = await ground.tasks(cold)
    waits = Spread.of(row["started"] - began for row in rows)
    reach = 2 * most * 1.1 + 1.0
    share = _share_of_time(rows, seconds, began)
    return [
        Row(
            "flood",
            f"LOW under a HIGH flood, max_wait {most:.0f} s: submit -> start, p50 / worst of {waits.count}",
            f"{sec(waits.p50)} / {sec(waits.worst)} ({share:.0%} of LOW started under the flood)",
            "0 % (never while HIGH waits)",
            reach=f"<= {reach:.1f} s: two classes of max_wait, 10 % jitter, 1 s to start",
            met=met(waits.worst, most=reach),
            figures={"p50": waits.p50, "worst": waits.worst},
        )
    ]


def _share_of_time(rows: Sequence[dict[str, Any]], seconds: float, began: float) -> float:
    starts: list[float] = [row["started"] - began for row in rows]
    return sum(start < seconds for start in starts) / len(starts)


CASES = [
    Case("high", "HIGH behind 400 LOW", ONE_WORKER, high),
    Case("burst", "HIGH, and an empty pool, behind a burst of 5,000", ONE_WORKER, burst),
    Case("users", "user B behind user A", ONE_WORKER, users),
    Case("shares", "shares of a weighted pool", ONE_WORKER, shares),
    Case("flood", "LOW under a HIGH flood", ONE_WORKER, flood),
]
