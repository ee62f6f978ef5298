"""One task at a time on an idle system: to its start, to its end, to its callback."""

from __future__ import annotations

import asyncio
import time

import orjson

from bench.bare import Bare
from bench.case import Case
from bench.ground import ONE_WORKER, Ground, lasting
from bench.stats import Spread, ms, pair
from bench.table import Row, met, ratio

_PAUSE = 0.1  # seconds between samples: the system is idle again


class _Samples:
    """Seconds from the submit: to the attempt's start, to the end seen by the caller, to the callback; and
    from the commit of the outcome to the callback."""

    def __init__(self) -> None:
        self.start: list[float] = []
        self.end: list[float] = []
        self.callback: list[float] = []
        self.commit: list[float] = []


async def latency(ground: Ground) -> list[Row]:
    """Ours and bare in turn."""
    ours, bare = _Samples(), _Samples()
    count = ground.often(60, 20)
    async with Bare(ground.stack, ground.receiver, slots=8) as yardstick:
        for kept in (False, True):  # the first few warm everything up
            for _ in range(count if kept else 5):
                await _ours(ground, ours if kept else _Samples())
                await asyncio.sleep(_PAUSE)
                await _bare(ground, yardstick, bare if kept else _Samples())
                await asyncio.sleep(_PAUSE)
    return _rows(ours, bare)


async def _ours(ground: Ground, samples: _Samples) -> None:
    user = ground.label("idle")
    body = lasting("zero", user, 0) | {"callback_url": ground.receiver.url(user)}
    began = time.time()
    status, task = await ground.api.call("POST", "/v1/tasks", body, {"Prefer": "wait=20"})
    seen = time.time()
    if status != 200 or not await ground.receiver.wait(user, 1, 20):
        raise RuntimeError(f"an idle system did not finish a task in 20 s: {status} {task}")
    (row,) = await ground.tasks(user)
    (called,) = ground.receiver.times(user).values()
    samples.start.append(row["started"] - began)
    samples.end.append(seen - began)
    samples.callback.append(called - began)
    samples.commit.append(called - row["updated"])


async def _bare(ground: Ground, yardstick: Bare, samples: _Samples) -> None:
    label = ground.label("bare-idle")
    began = time.time()
    handle = await yardstick.start(label, webhook=ground.receiver.url(label))
    await handle.result()
    seen = time.time()
    ((called, body),) = ground.receiver.bodies(label)
    (started,) = (await yardstick.started_at([handle.id])).values()
    samples.start.append(started - began)
    samples.end.append(seen - began)
    samples.callback.append(called - began)
    samples.commit.append(called - orjson.loads(body)["committed"])


def _rows(ours: _Samples, bare: _Samples) -> list[Row]:
    start, bare_start = Spread.of(ours.start), Spread.of(bare.start)
    called, bare_called = Spread.of(ours.callback), Spread.of(bare.callback)
    end, bare_end = Spread.of(ours.end), Spread.of(bare.end)
    commit, bare_commit = Spread.of(ours.commit), Spread.of(bare.commit)
    share = ratio(called.p50, bare_called.p50)
    return [
        Row(
            "latency.start",
            "idle system: submit -> attempt started, p50 / p99",
            pair(start),
            pair(bare_start),
            ratio(start.p50, bare_start.p50),
            "<= 40 ms p50",
            met(start.p50, most=0.040),
            {"p50": start.p50, "p99": start.p99, "bare_p50": bare_start.p50},
        ),
        Row(
            "latency.end",
            "idle system: zero-work task, submit -> its callback arrives, p50 / p99",
            pair(called),
            pair(bare_called),
            share,
            "<= 1.3 x",
            met(share, most=1.3),
            {"p50": called.p50, "p99": called.p99, "bare_p50": bare_called.p50},
        ),
        Row(
            "latency.seen",
            "idle system: zero-work task, submit -> caller has the result (Prefer: wait), p50 / p99",
            pair(end),
            f"{pair(bare_end)} (result())",
            ratio(end.p50, bare_end.p50),
            figures={"p50": end.p50, "p99": end.p99, "bare_p50": bare_end.p50},
        ),
        Row(
            "latency.callback",
            "outcome committed -> callback arrives, p50 / p99",
            pair(commit),
            f"{ms(bare_commit.p50)} / {ms(bare_commit.p99)}",
            ratio(commit.p50, bare_commit.p50),
            "<= 40 ms p50",
            met(commit.p50, most=0.040),
            {"p50": commit.p50, "p99": commit.p99, "bare_p50": bare_commit.p50},
        ),
    ]


CASES = [Case("latency", "one task at a time on an idle system", ONE_WORKER, latency)]
