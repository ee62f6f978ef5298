"""How fast tasks are taken in: with the engine down, and while everything runs."""

from __future__ import annotations

import signal
from typing import Any

from bench.bare import Bare
from bench.case import Case
from bench.client import Load, closed_loop
from bench.ground import ONE_WORKER, Ground
from bench.stats import Spread, pair
from bench.table import Row, met, ratio

CLIENTS = 32
_PROMPT = [{"role": "user", "content": "Summarise this in one sentence: " + "lorem ipsum " * 16}]


def _body(user: str) -> dict[str, Any]:
    return {"model_id": "zero", "params": {"messages": _PROMPT, "tokens": 0}, "user_id": user}


async def _submit(ground: Ground, user: str, count: int) -> Load:
    async def once(_: int) -> int:
        status, _answer = await ground.api.call("POST", "/v1/tasks", _body(user))
        return status

    return await closed_loop(CLIENTS, count, once)


async def _bare_submit(bare: Bare, ground: Ground, label: str, count: int) -> Load:
    url = ground.receiver.url(label)

    async def once(_: int) -> int:
        await bare.start(label, webhook=url, prompt=_PROMPT[0]["content"])
        return 200

    load = await closed_loop(CLIENTS, count, once)
    await ground.receiver.wait(label, count, 180)
    return load


async def submit(ground: Ground) -> list[Row]:
    """Intake alone with Temporal stopped (SIGSTOP: it answers nothing), then with everything running."""
    warm = ground.label("warm")
    await _submit(ground, warm, 200)
    await ground.ended(warm, seconds=120)
    user = ground.label("intake")
    ground.stack.signal("temporal", signal.SIGSTOP)
    try:
        alone = await _submit(ground, user, ground.often(6000, 2000))
    finally:
        ground.stack.signal("temporal", signal.SIGCONT)
    await ground.cancel_all(user)
    user = ground.label("busy-intake")
    busy = await _submit(ground, user, ground.often(2000, 800))
    await ground.cancel_all(user)
    async with Bare(ground.stack, ground.receiver, slots=8) as bare:
        bare_load = await _bare_submit(bare, ground, ground.label("bare-intake"), ground.often(1000, 400))
    return [
        _row("submit.alone", "intake alone (engine down)", alone, None, (0.025, 0.060, 1200)),
        _row("submit.busy", "while dispatching", busy, bare_load, (0.050, 0.120, 400)),
    ]


def _row(key: str, what: str, load: Load, bare: Load | None, reach: tuple[float, float, float]) -> Row:
    spread, (p50, p99, least) = Spread.of(load.seconds), reach
    within = [met(spread.p50, most=p50), met(spread.p99, most=p99), met(load.per_second, least=least)]
    refused = f"; refused: {load.refused}" if load.refused else ""
    figures = {"p50": spread.p50, "p99": spread.p99, "per_second": load.per_second}
    if bare is not None:
        figures |= {"bare_p50": Spread.of(bare.seconds).p50, "bare_per_second": bare.per_second}
    return Row(
        key,
        f"submit, {CLIENTS} clients, {what}: p50 / p99; per second",
        f"{pair(spread)}; {load.per_second:.0f}/s{refused}",
        f"{pair(Spread.of(bare.seconds))}; {bare.per_second:.0f}/s" if bare else "-",
        ratio(load.per_second, bare.per_second) if bare else None,
        f"<= {p50 * 1000:.0f} / {p99 * 1000:.0f} ms; >= {least:.0f}/s",
        all(within) and not load.refused,
        figures,
    )


CASES = [Case("submit", "intake by 32 clients", ONE_WORKER, submit)]
