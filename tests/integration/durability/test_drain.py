"""A deploy: SIGTERM to workers while they work."""

from __future__ import annotations

import asyncio
import time

from tests.integration.durability.ground import DRAIN, FOREVER, Ground, Service, counted, counting
from tests.support.model_server import (
    DONE,
    Call,
    ModelServer,
    Steps,
    chunk,
    finish,
    reply,
    stream,
    usage,
    words,
)
from tests.support.waiting import until


async def test_a_drain_finishes_what_fits_and_hands_the_rest_over(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    """One worker with a short stream and a long one, and a task in back-off beside them."""
    may_end = asyncio.Event()

    def answer(call: Call) -> Steps:
        match call.body["messages"][0]["content"], len(call.body["messages"]):
            case "short", _:
                return stream(*words("short one"), may_end, finish(), usage(1, 2), DONE)
            case "long", 1:
                return stream(*words("one two"), FOREVER)
            case "long", _:
                return stream(chunk(" three"), finish(), usage(3, 1), DONE)
            case _:
                return reply(429, '{"error": {"message": "slow down"}}', Retry_After="300")

    model.script(answer)
    ground.terminate("gpu-1")
    assert await ground.exit_code("gpu-1") == 0
    waiting = await service.submit("small", params=_say("waiting"))
    await _in_back_off(service, waiting)
    short, long = [await service.submit(params=_say(word)) for word in ("short", "long")]
    await service.shows(long, "one two")
    await service.shows(short, "short one")
    await ground.start("gpu-1")
    ground.terminate("gpu-0")
    began = time.monotonic()
    await asyncio.sleep(0.5)
    may_end.set()
    done = await service.reaches(short, "COMPLETED")
    assert [a["outcome"] for a in done["attempts"]] == ["completed"]
    again = await model.call(3, 30)
    assert again.body["messages"][-1] == {"role": "assistant", "content": "one two"}, "no token is made again"
    assert again.at - began < DRAIN + 4  # a second by design; this machine is shared
    assert await ground.exit_code("gpu-0") == 0
    done = await service.reaches(long, "COMPLETED")
    assert done["result"]["text"] == "one two three"
    assert [a["outcome"] for a in done["attempts"]] == ["drained", "completed"]
    assert done["retry_count"] == 0
    assert done["usage"]["discarded_tokens"] == 0
    still = await service.task(waiting)
    assert (still["status"], still["retry_count"], len(still["attempts"])) == ("QUEUED", 1, 1)


async def test_a_second_sigterm_hands_over_at_once(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    model.script(stream(*words("one two"), FOREVER), stream(chunk(" three"), finish(), usage(3, 1), DONE))
    task_id = await service.submit()
    await service.shows(task_id, "one two")
    draining = ground.worker_of(await service.running(task_id))
    ground.terminate(draining)
    await until(lambda: "worker drains" in ground.log(draining))
    began = time.monotonic()
    ground.terminate(draining)
    again = await model.call(1, 30)
    assert again.at - began < DRAIN  # sooner than without the second word
    done = await service.reaches(task_id, "COMPLETED")
    assert done["result"]["text"] == "one two three"
    assert [a["outcome"] for a in done["attempts"]] == ["drained", "completed"]
    assert await ground.exit_code(draining) == 0


async def test_every_process_replaced_under_twenty_tasks(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    """A rolling deploy: processes are stopped in order and started again, one or two at a time."""
    model.script(counting(rate=8))
    task_ids = [await service.submit(params=_say("count") | {"max_tokens": 20}) for _ in range(10)]
    task_ids += [await service.simulated(20, 15, priority="HIGH") for _ in range(5)]
    task_ids += [await service.simulated(0, 50, priority="LOW") for _ in range(5)]
    await service.running(task_ids[0])
    for together in (("gpu-0", "control"), ("gpu-1", "callbacks", "api")):
        for name in together:
            ground.terminate(name)
        assert [await ground.exit_code(name) for name in together] == [0] * len(together)
        await ground.start(*together)
    for number, task_id in enumerate(task_ids):
        task = await service.reaches(task_id, "COMPLETED", seconds=120)
        assert task["retry_count"] == 0
        assert {a["outcome"] for a in task["attempts"][:-1]} <= {"drained"}, task["attempts"]
        if number < 10:
            assert task["result"]["text"] == counted(20)


def _say(word: str) -> dict[str, object]:
    return {"max_tokens": 50, "messages": [{"role": "user", "content": word}]}


async def _in_back_off(service: Service, task_id: str) -> None:
    async def waits() -> bool:
        return (await service.task(task_id))["next_attempt_at"] is not None

    await until(waits)
