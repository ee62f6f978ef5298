"""A cancel in every state and by every way converges, is told truly, and frees what the task held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.integration.durability.ground import FOREVER, SLOTS, Ground, Service
from tests.support.model_server import ModelServer, chunk, reply, stream, words
from tests.support.receiver import Receiver
from tests.support.waiting import until

WAYS = ("api", "signal", "signal with input", "temporal's own")


async def cancel(ground: Ground, service: Service, way: str, task_id: str) -> None:
    """Each way as a person takes it."""
    if way == "api":
        told = await service.cancel(task_id, "no longer needed")
        assert told.status_code == 202
        assert told.json()["cancel_requested"] is True
        return
    words = {
        "signal": ["signal", "--name", "cancel"],
        "signal with input": ["signal", "--name", "cancel", "--input", '{"reason": "from a shell"}'],
        "temporal's own": ["cancel"],
    }[way]
    assert await ground.cli("workflow", *words, "--workflow-id", task_id) == 0


async def four_ways(
    ground: Ground,
    service: Service,
    submit: Callable[[], Awaitable[str]],
    ready: Callable[[str], Awaitable[Any]],
) -> list[dict[str, Any]]:
    """One task for each way, cancelled once it is `ready`; how they ended."""
    task_ids = [await submit() for _ in WAYS]
    for task_id in task_ids:
        await ready(task_id)
    await asyncio.gather(
        *(cancel(ground, service, way, task_id) for way, task_id in zip(WAYS, task_ids, strict=True))
    )
    return [await service.reaches(task_id, "CANCELLED") for task_id in task_ids]


async def test_running_and_silent(ground: Ground, service: Service, model: ModelServer) -> None:
    """The model says two words and then nothing: no chunk carries the cancel along."""
    model.script(stream(*words("one two"), FOREVER))
    ended = await four_ways(
        ground, service, service.submit, lambda task_id: service.shows(task_id, "one two")
    )
    for call in model.calls:
        await call.closed_by_client(5)
    for task in ended:
        assert task["result"]["text"] == "one two"
        assert [a["outcome"] for a in task["attempts"]] == ["cancelled"]
        assert task["completed_at"] >= task["started_at"]
        assert task["error_code"] is None
    assert len(model.calls) == len(WAYS)


async def test_running_and_streaming(ground: Ground, service: Service, model: ModelServer) -> None:
    model.script(stream(*[chunk(" more"), 0.02] * 20_000))
    ended = await four_ways(
        ground, service, service.submit, lambda task_id: service.shows(task_id, " more more")
    )
    for call in model.calls:
        await call.closed_by_client(5)
    assert all(task["result"]["text"].startswith(" more more") for task in ended)


async def test_queued_behind_a_full_pool(ground: Ground, service: Service) -> None:
    fillers = [await service.simulated(100_000, 20) for _ in range(2 * SLOTS)]
    for task_id in fillers:
        await service.running(task_id)
    ended = await four_ways(
        ground, service, lambda: service.simulated(5, 50), lambda task_id: service.reaches(task_id, "QUEUED")
    )
    for task in ended:
        assert (task["started_at"], task["result"]) == (None, None)
    assert [(await service.task(task_id))["status"] for task_id in fillers] == ["PROCESSING"] * 2 * SLOTS


async def test_backing_off(ground: Ground, service: Service, model: ModelServer) -> None:
    model.script(reply(429, '{"error": {"message": "slow down"}}', Retry_After="300"))

    async def waits(task_id: str) -> None:
        async def waiting() -> bool:
            return (await service.task(task_id))["next_attempt_at"] is not None

        await until(waiting)

    ended = await four_ways(ground, service, service.submit, waits)
    for task in ended:
        assert [a["error_code"] for a in task["attempts"]] == ["rate_limited"]
        assert task["next_attempt_at"] is None
    assert len(model.calls) == len(WAYS)


async def test_pending_and_final(ground: Ground, service: Service, model: ModelServer) -> None:
    """What never started is cancelled in its row; what is over stays what it is, and the reply says so."""
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    pending = await service.submit("simulated", params={"tokens": 1}, not_before=later)
    first, second = await service.cancel(pending, "changed my mind"), await service.cancel(pending)
    assert (first.status_code, first.json()["status"]) == (202, "CANCELLED")
    assert (second.status_code, second.json()["version"]) == (202, first.json()["version"])
    assert await ground.cli("workflow", "describe", "--workflow-id", pending) != 0, "it never had a workflow"

    done = await service.submit("simulated", params={"tokens": 0})
    before = await service.reaches(done, "COMPLETED")
    refused = await service.cancel(done)
    assert refused.status_code == 409
    assert (refused.json()["code"], refused.json()["current_status"]) == (
        "task-already-finished",
        "COMPLETED",
    )

    async def closed() -> bool:
        return await ground.cli("workflow", "signal", "--name", "cancel", "--workflow-id", done) != 0

    await until(closed, every=0.2)
    assert await service.task(done) == before


async def test_a_worker_that_does_not_answer(ground: Ground, service: Service, model: ModelServer) -> None:
    """Frozen: the row is CANCELLED within 5 s all the same, with the text of its last heartbeat."""
    model.script(stream(*words("one two"), FOREVER))
    task_id = await service.submit()
    await service.shows(task_id, "one two")
    frozen = ground.worker_of(await service.running(task_id))
    ground.freeze(frozen)
    began = time.monotonic()
    await service.cancel(task_id)
    task = await service.reaches(task_id, "CANCELLED", seconds=30)
    assert time.monotonic() - began < 8  # 4 s, the commit, and a loaded machine
    assert task["result"]["text"] == "one two"
    ground.thaw(frozen)
    await model.calls[0].closed_by_client(20)
    assert await service.task(task_id) == task


async def test_a_terminate_is_settled_as_failed(ground: Ground, service: Service, model: ModelServer) -> None:
    model.script(stream(*words("one two"), FOREVER))
    async with Receiver() as receiver:
        task_id = await service.submit(callback_url=receiver.url())
        await service.shows(task_id, "one two")
        assert await ground.cli("workflow", "terminate", "--workflow-id", task_id) == 0
        await model.calls[0].closed_by_client(10)
        task = await service.reaches(task_id, "FAILED", seconds=60)  # a pass is due every 5 s
        assert task["error_code"] == "terminated"
        (came,) = await receiver.received(1, timeout=40)
        assert b'"terminated"' in came.body
    assert (await service.cancel(task_id)).status_code == 409
