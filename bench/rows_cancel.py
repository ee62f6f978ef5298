"""How soon a cancel closes the connection to the model."""

from __future__ import annotations

import asyncio
import time

import orjson

from bench.bare import Bare
from bench.case import Case
from bench.ground import TWO_WORKERS, Ground, streaming
from bench.servers import Generation
from bench.stats import Spread, pair
from bench.table import Row, met, ratio

_PATIENCE = 20.0


async def cancel(ground: Ground) -> list[Row]:
    """One cancel at a time: of a model that streams, then of one that never says a word."""
    return [await _measured(ground, silent=False), await _measured(ground, silent=True)]


async def _measured(ground: Ground, *, silent: bool) -> Row:
    count = ground.often(50, 20)
    ours = Spread.of([await _ours(ground, n, silent) for n in range(count)])
    async with Bare(ground.stack, ground.receiver, slots=2, pool_workers=2) as bare:
        theirs = Spread.of([await _bare(ground, bare, n, silent) for n in range(count)])
    within = met(ours.p50, most=0.05) and met(ours.p99, most=0.2)
    return Row(
        "cancel.silent" if silent else "cancel",
        f"cancel -> connection to a {'silent' if silent else 'streaming'} model closed, p50 / p99",
        pair(ours),
        pair(theirs),
        ratio(ours.p50, theirs.p50),
        "<= 50 / 200 ms",
        within,
        {"p50": ours.p50, "p99": ours.p99, "bare_p50": theirs.p50, "bare_p99": theirs.p99},
    )


async def _running(ground: Ground, label: str, number: int) -> Generation:
    """The request at the model, some time into it: cancels come at every phase of a heartbeat."""
    made = await ground.models.generation(label, 0, _PATIENCE)
    if made is None:
        raise TimeoutError("the task did not reach the model")
    await asyncio.sleep(0.35 + 0.13 * (number % 8))
    return made


async def _closed(made: Generation, at: float) -> float:
    await asyncio.wait_for(made.over.wait(), _PATIENCE)
    assert made.closed_early, "the task ended before it was cancelled"
    assert made.ended is not None
    return made.ended - at


async def _ours(ground: Ground, number: int, silent: bool) -> float:
    label = ground.label("cancel")
    task_id = await ground.submit(streaming(label, label, 400, 20.0, silent=silent))
    made = await _running(ground, label, number)
    at = time.time()
    await ground.api.expect(202, "POST", f"/v1/tasks/{task_id}/cancel", {"reason": "measured"})
    took = await _closed(made, at)
    await ground.ended(label, seconds=_PATIENCE)
    return took


async def _bare(ground: Ground, bare: Bare, number: int, silent: bool) -> float:
    label = ground.label("bare-cancel")
    order = orjson.dumps({"label": label, "tokens": 400, "rate": 20.0, "silent": silent}).decode()
    handle = await bare.start(label, order=order, model_url=ground.models.base_url)
    made = await _running(ground, label, number)
    at = time.time()
    await handle.cancel()
    return await _closed(made, at)


CASES = [Case("cancel", "cancel of a running task, also with a silent model", TWO_WORKERS, cancel)]
