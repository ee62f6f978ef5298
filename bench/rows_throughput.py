"""Tasks per second from end to end, what each costs in CPU, and what it leaves in Temporal's history."""

from __future__ import annotations

import time

from temporalio.client import Client

from bench.bare import Bare
from bench.case import Case
from bench.client import closed_loop
from bench.ground import ONE_WORKER, Ground, lasting
from bench.stats import median
from bench.table import Row, met, ratio

_CLIENTS = 32
_WINDOW = 64  # of the dispatcher for 8 slots: the bare workflow has as many open
_PARTS = ("api", "control", "gpu", "callbacks", "temporal", "postgres")


class _Side:
    """Rates of one side, and CPU seconds by part, summed over its runs."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.cpu: dict[str, float] = {}
        self.tasks = 0

    def add(self, count: int, seconds: float, before: dict[str, float], after: dict[str, float]) -> None:
        self.rates.append(count / seconds)
        self.tasks += count
        for part, used in after.items():
            self.cpu[part] = self.cpu.get(part, 0.0) + used - before[part]

    @property
    def rate(self) -> float:
        return median(self.rates)

    def cost(self) -> dict[str, float]:
        """CPU milliseconds per task, by part."""
        return {part: 1000 * used / self.tasks for part, used in self.cpu.items()}


async def _ours(ground: Ground, count: int, *, callbacks: bool) -> float:
    user = ground.label("through")
    body = lasting("zero", user, 0)
    if callbacks:
        body["callback_url"] = ground.receiver.url(user)

    async def once(_: int) -> int:
        return (await ground.api.call("POST", "/v1/tasks", body))[0]

    began = time.perf_counter()
    load = await closed_loop(_CLIENTS, count, once)
    if load.refused:
        raise RuntimeError(f"submits were refused: {load.refused}")
    if callbacks:
        await ground.receiver.wait(user, count, 300)
    return await ground.ended(user, seconds=300, every=0.02) - began


async def throughput(ground: Ground) -> list[Row]:
    """Runs of each side in turn, so that what else the machine does falls on all; medians of the rates."""
    count, runs = ground.often(600, 250), ground.often(3, 1)
    bare, plain, called = _Side(), _Side(), _Side()
    async with Bare(ground.stack, ground.receiver, slots=8) as yardstick:
        await yardstick.through(ground.label("bare-warm"), 100, _WINDOW)
        await _ours(ground, 100, callbacks=True)
        for _ in range(runs):
            before = yardstick.cpu()
            took = await yardstick.through(ground.label("bare-through"), count, _WINDOW)
            bare.add(count, took, before, yardstick.cpu())
            for side, callbacks in ((plain, False), (called, True)):
                before = ground.stack.cpu()
                took = await _ours(ground, count, callbacks=callbacks)
                side.add(count, took, before, ground.stack.cpu())
    return [
        _rate_row("throughput.plain", "no callbacks", plain, bare, 1.0),
        _rate_row("throughput.callbacks", "with callbacks", called, bare, 0.85),
        _cost_row(called, bare),
    ]


def _rate_row(key: str, what: str, side: _Side, bare: _Side, reach: float) -> Row:
    share = ratio(side.rate, bare.rate)
    return Row(
        key,
        f"tasks per second, end to end, zero work, 8 slots, {what}",
        f"{side.rate:.1f}/s",
        f"{bare.rate:.1f}/s",
        share,
        f">= {reach:.2f} x",
        met(share, least=reach),
        {"per_second": side.rate, "bare_per_second": bare.rate},
    )


def _cost_row(side: _Side, bare: _Side) -> Row:
    ours, theirs = side.cost(), bare.cost()

    def words(cost: dict[str, float]) -> str:
        parts = ", ".join(f"{part} {value:.1f}" for part, value in sorted(cost.items(), key=lambda i: -i[1]))
        return f"{sum(cost.values()):.1f} ms ({parts})"

    return Row(
        "throughput.cpu",
        "CPU per task with callbacks, by part",
        words(ours),
        words(theirs),
        ratio(sum(ours.values()), sum(theirs.values())),
        figures={f"cpu_{part}": value for part, value in ours.items()}
        | {f"bare_cpu_{part}": value for part, value in theirs.items()},
    )


async def history(ground: Ground) -> list[Row]:
    """What a task leaves: zero work, with a callback, and one that runs a second with a callback."""
    user = ground.label("history")
    url = ground.receiver.url(user)
    quick = await ground.submit(lasting("zero", user, 0) | {"callback_url": url})
    slow = await ground.submit(lasting("zero", user, 1.0) | {"callback_url": url})
    plain = await ground.submit(lasting("zero", user, 0))
    await ground.ended(user, seconds=60)
    await ground.receiver.wait(user, 2, 30)
    async with Bare(ground.stack, ground.receiver, slots=8) as bare:
        handle = await bare.start("history", webhook=ground.receiver.url(ground.label("bare-history")))
        await handle.result()
        theirs = await _size(bare.client, handle.id)
        sizes = [await _size(bare.client, one) for one in (plain, quick, slow)]
    names = ("zero work, no callback", "zero work, callback", "1 s of work, callback")
    return [
        Row(
            f"history.{number}",
            f"history of a task: {name}",
            f"{events} events, {size:,} bytes",
            f"{theirs[0]} events, {theirs[1]:,} bytes",
            ratio(events, theirs[0]),
            figures={"events": events, "bytes": size, "bare_events": theirs[0], "bare_bytes": theirs[1]},
        )
        for number, (name, (events, size)) in enumerate(zip(names, sizes, strict=True), 1)
    ]


async def _size(client: Client, workflow_id: str) -> tuple[int, int]:
    """Events and bytes of a closed run."""
    handle = client.get_workflow_handle(workflow_id)
    await handle.result()
    info = (await handle.describe()).raw_description.workflow_execution_info
    return info.history_length, info.history_size_bytes


CASES = [
    Case("throughput", "tasks per second and CPU per task", ONE_WORKER, throughput),
    Case("history", "events and bytes per task", ONE_WORKER, history),
]
