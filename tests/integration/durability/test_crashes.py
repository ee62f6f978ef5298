"""Processes that die or freeze: what goes on where, and that nothing is written by who was given up."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

from perdure.contracts import AttemptRecord
from tests.integration.durability.ground import Ground, Service, counted, counting
from tests.support.model_server import DONE, ModelServer, chunk, finish, stream, usage, words
from tests.support.waiting import until

MANY = {"max_tokens": 100_000, "messages": [{"role": "user", "content": "go on"}]}


async def test_a_frozen_worker_writes_nothing_and_lets_its_model_go(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    """SIGSTOP past the heartbeat time-out, the task ends elsewhere, SIGCONT."""
    model.script(
        stream(*words("one two"), 0.05, *[chunk(" late"), 0.02] * 20_000),
        stream(chunk(" three"), finish(), usage(4, 1), DONE),
    )
    task_id = await service.submit(params=MANY)
    first = await model.call(0, 30)
    await service.shows(task_id, "one two late")
    frozen = ground.worker_of(await service.running(task_id))
    ground.freeze(frozen)
    done = await service.reaches(task_id, "COMPLETED")
    version, text = done["version"], done["result"]["text"]
    ground.thaw(frozen)
    await first.closed_by_client(20)
    await asyncio.sleep(1.0)  # what it still had to say would have come by now
    after = await service.task(task_id)
    assert after == done
    *lost, last = after["attempts"]  # its open polls may have taken the next attempt along
    assert {(a["outcome"], a["error_code"]) for a in lost} == {("lost", "worker_lost")}
    assert last["outcome"] == "completed"
    assert (after["retry_count"], after["version"]) == (0, version)
    assert text.startswith("one two")
    assert text.endswith(" three")
    resumed = last["resumed_from_tokens"]
    assert text.count(" late") == max(0, resumed - 2), "the text is the checkpoint and what came after it"


async def test_a_killed_gpu_worker_costs_its_last_second(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    model.script(counting(rate=20))
    task_id = await service.submit(params=MANY | {"max_tokens": 90})
    first = await model.call(0, 30)
    await until(lambda: first.written > 2_500)
    struck = time.monotonic()
    await ground.kill(ground.worker_of(await service.running(task_id)))
    await first.closed_by_client(5)
    second = await model.call(1, 30)
    assert second.at - struck < 15  # heartbeat time-out of 3 s, and a loaded machine
    done = await service.reaches(task_id, "COMPLETED")
    assert done["result"]["text"] == counted(90)
    assert [a["outcome"] for a in done["attempts"]] == ["lost", "completed"]
    resumed = done["attempts"][1]["resumed_from_tokens"]
    assert len(second.body["messages"][-1]["content"].split()) == resumed
    assert first.written / len(chunk(" w50")) - resumed < 60, (
        "no more than the last beats' words are made again"
    )
    assert done["retry_count"] == 0


async def test_a_killed_control_worker_costs_a_moment(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    """Its tasks stick to it; another control worker has them after the sticky queue's 2 s."""
    await ground.start("control-2")
    try:
        task_ids = [await service.simulated(1000, 1) for _ in range(4)]
        for task_id in task_ids:
            await service.running(task_id)
        await ground.kill("control")
        began = time.monotonic()
        for reply in await asyncio.gather(*(service.cancel(task_id) for task_id in task_ids)):
            assert reply.status_code == 202
        for task_id in task_ids:
            await service.reaches(task_id, "CANCELLED", seconds=30)
        assert time.monotonic() - began < 8
    finally:
        ground.terminate("control-2")
        assert await ground.exit_code("control-2") == 0


async def test_a_killed_api_loses_no_task_and_its_repeat_is_the_same_task(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    """The crash between the commit and the start: another process's dispatcher starts it."""
    key = {"Idempotency-Key": "the-one"}
    replies = [
        asyncio.create_task(service.try_submit("simulated", params={"tokens": 1}, headers=key))
        for _ in range(3)
    ]
    done, _ = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
    await ground.kill("api")
    await asyncio.gather(*replies, return_exceptions=True)
    first = next(iter(done)).result().json()["task_id"]
    await ground.start("api")
    again = await service.try_submit("simulated", params={"tokens": 1}, headers=key)
    assert (again.status_code, again.json()["task_id"]) == (202, first)
    assert again.headers["Idempotent-Replayed"] == "true"
    await service.reaches(first, "COMPLETED")


async def test_a_task_that_kills_its_workers_ends_and_leaves_the_pool_healthy(
    ground: Ground, service: Service
) -> None:
    """Four workers died of it before its workflow was started anew; it may take five."""
    names = ("gpu-frail-0", "gpu-frail-1")
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    params = {"messages": [{"role": "user", "content": "x"}]}
    killer = await service.submit("killer", params=params, not_before=soon)
    died = [AttemptRecord(number=n, outcome="lost", error_code="worker_lost") for n in range(1, 5)]
    await ground.sql(
        "UPDATE tasks SET attempts = $2 WHERE task_id = $1",
        killer,
        json.dumps([record.model_dump(mode="json") for record in died]),
    )
    await ground.start(*names)
    replacing = asyncio.gather(*(_supervise(ground, name) for name in names))
    try:
        beside = await service.submit("neighbour", params={"tokens": 5})
        done = await service.reaches(killer, "FAILED", seconds=120)
        assert done["error_code"] == "worker_lost"
        assert "6 workers were lost" in done["error_message"]
        assert [a["outcome"] for a in done["attempts"]] == ["lost"] * 6
        assert all(a["worker"] for a in done["attempts"][4:])
        assert done["retry_count"] == 0
        await service.reaches(beside, "COMPLETED")
        after = await service.submit("neighbour", params={"tokens": 5})
        await service.reaches(after, "COMPLETED")
    finally:
        replacing.cancel()
        await asyncio.gather(replacing, return_exceptions=True)
        for name in names:
            if ground.processes.runs(name):
                await ground.kill(name)


async def _supervise(ground: Ground, name: str) -> None:
    """Starts a worker again whenever it has died."""
    while True:
        await until(lambda: not ground.processes.runs(name), seconds=600)
        await ground.start(name)
