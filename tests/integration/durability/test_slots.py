"""No slot leaks, whatever becomes of the attempts that held it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.integration.durability.ground import SLOTS, Ground, Service
from tests.support.waiting import until


async def test_every_slot_takes_work_after_many_odd_ends(ground: Ground, service: Service) -> None:
    """Cancels, faults and deadlines at random, all at once; then one task for each slot."""
    rng = random.Random(43)

    async def one(number: int) -> None:
        params: dict[str, Any] = {"tokens": rng.randrange(1, 30), "tokens_per_second": 40}
        if number % 5 == 0:
            params["fault"] = {"code": "invalid_request", "after_tokens": rng.randrange(3)}
        deadline = {"deadline_seconds": 1 + rng.random()} if number % 7 == 0 else {}
        task_id = await service.submit("simulated", params=params, **deadline)
        await asyncio.sleep(rng.random())
        if number % 3 == 0:
            await service.cancel(task_id)
        await service.reaches(task_id, "COMPLETED", "FAILED", "CANCELLED", seconds=90)

    await asyncio.gather(*(one(number) for number in range(60)))
    filling = [await service.simulated(100_000, 20) for _ in range(2 * SLOTS)]
    for task_id in filling:
        await service.reaches(task_id, "PROCESSING", seconds=20)
    for task_id in filling:
        await service.cancel(task_id)

    async def all_free() -> bool:
        pools = (await service.http.get("/v1/queues")).json()["data"]
        pool = next(pool for pool in pools if pool["pool"] == "p")
        return bool(pool["running"] == 0 and pool["slots_in_use"] == 0 and pool["slots"] == 2 * SLOTS)

    await until(all_free, seconds=60, every=0.3)  # slots are told by live workers, not counted by us
