"""Temporal or Postgres goes away for a while: what callers see meanwhile, and that all goes on by itself."""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.integration.durability.ground import FOREVER, Ground, Service, counted, counting
from tests.support.model_server import DONE, ModelServer, chunk, finish, stream, usage, words
from tests.support.receiver import Receiver
from tests.support.waiting import until


async def ready(service: Service) -> httpx.Response:
    return await service.http.get("/readyz")


async def test_temporal_is_away(ground: Ground, service: Service, model: ModelServer) -> None:
    model.script(stream(*words("one two"), FOREVER))
    running = await service.submit()
    await service.shows(running, "one two")
    await ground.temporal_away()

    began = time.monotonic()
    accepted = [await service.simulated(3, 50) for _ in range(5)]
    doomed = await service.simulated(3, 50)
    assert (time.monotonic() - began) / 6 < 1.0, "submits are as fast as ever"
    shown = await service.task(running)
    assert (shown["status"], shown["attempts"][0]["number"]) == ("PROCESSING", 1)
    assert len((await service.http.get("/v1/tasks?status=PENDING")).json()["data"]) >= 6

    began = time.monotonic()
    for task_id in (running, doomed, running):
        told = await service.cancel(task_id, "while it was away")
        assert (told.status_code, told.json()["cancel_requested"]) == (202, True)
    assert time.monotonic() - began < 6  # a second each at most, by design
    assert (await service.task(running))["status"] == "PROCESSING", "the reply tells what is"
    assert (await service.http.get("/healthz")).status_code == 200

    async def told_so() -> bool:
        seen = await ready(service)
        assert seen.status_code == 200
        return bool(seen.json()["temporal"] == "unavailable")

    await until(told_so, seconds=10)  # a look serves for two seconds
    await ground.temporal_back()
    task = await service.reaches(running, "CANCELLED")
    assert task["result"]["text"] == "one two"
    await model.calls[0].closed_by_client(10)
    for task_id in accepted:
        task = await service.reaches(task_id, "COMPLETED")
        assert len(task["attempts"]) == 1
    stopped = await service.reaches(doomed, "CANCELLED")
    assert stopped["started_at"] is None
    assert len(model.calls) == 1, "nothing ran twice"


async def test_a_worker_that_is_cut_off_lets_its_model_go(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    """Its heartbeats do not arrive for the time-out (3 s) and 3 s more: it may no longer generate."""
    model.script(stream(*words("one two"), FOREVER), stream(chunk(" three"), finish(), usage(3, 1), DONE))
    task_id = await service.submit()
    await service.shows(task_id, "one two")
    began = time.monotonic()
    await ground.temporal_away()
    await model.calls[0].closed_by_client(40)
    assert 3 < time.monotonic() - began < 10, "a shorter outage costs no attempt"
    await ground.temporal_back()
    task = await service.reaches(task_id, "COMPLETED")
    assert task["result"]["text"] == "one two three"
    first, last = task["attempts"]
    assert first["outcome"] in ("lost", "drained")  # whichever Temporal hears first when it is back
    assert last["outcome"] == "completed"
    assert task["retry_count"] == 0


async def test_postgres_is_away(ground: Ground, service: Service, model: ModelServer) -> None:
    model.script(counting(rate=20))
    params = {"max_tokens": 60, "messages": [{"role": "user", "content": "count"}]}
    async with Receiver() as receiver:
        finishing = await service.submit(params=params, callback_url=receiver.url())
        waiting = await service.simulated(400, 20)
        await service.running(finishing)
        await service.running(waiting)
        await ground.postgres_away()

        refused = await service.try_submit()
        assert (refused.status_code, refused.json()["code"]) == (503, "store-unavailable")
        assert int(refused.headers["Retry-After"]) > 0
        assert (await service.http.get(f"/v1/tasks/{finishing}")).status_code == 503
        assert (await service.cancel(finishing)).status_code == 503
        assert (await service.http.get("/healthz")).status_code == 200

        async def told_so() -> bool:
            return (await ready(service)).status_code == 503

        await until(told_so, seconds=10)  # a look serves for two seconds

        async def committing() -> bool:
            return await ground.pending_activity(finishing) == "commit_outcome"

        await until(committing, every=0.2)  # the generation went on to its end
        assert await ground.cli("workflow", "signal", "--name", "cancel", "--workflow-id", finishing) == 0
        assert await ground.cli("workflow", "cancel", "--workflow-id", finishing) == 0
        assert all(ground.processes.runs(name) for name in ground.processes.commands), "nothing restarts"

        await ground.postgres_back()
        task = await service.reaches(finishing, "COMPLETED")
        assert task["result"]["text"] == counted(60)
        assert (len(task["attempts"]), len(model.calls)) == (1, 1), "no attempt was lost"
        await receiver.received(1, timeout=60)
    began = time.monotonic()
    await service.simulated(0, 50)
    assert time.monotonic() - began < 5, "the pool has mended itself"

    async def ready_again() -> bool:
        return (await ready(service)).status_code == 200

    await until(ready_again, seconds=10)
    assert (await service.task(waiting))["status"] == "PROCESSING"
    assert (await service.cancel(waiting)).status_code == 202
    await service.reaches(waiting, "CANCELLED")


async def test_postgres_dies_just_as_outcomes_are_written(ground: Ground, service: Service) -> None:
    """A commit may have been made although its answer was lost: it is the same outcome when tried again."""
    task_ids = [await service.simulated(n % 7, 20) for n in range(30)]
    for _ in range(3):
        await asyncio.sleep(0.3)
        await ground.postgres_away()
        await ground.postgres_back()
    for task_id in task_ids:
        task = await service.reaches(task_id, "COMPLETED")
        assert [a["outcome"] for a in task["attempts"]] == ["completed"]
