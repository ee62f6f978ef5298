"""Large prompts and outputs meet our limits before they meet Temporal's."""

from __future__ import annotations

import random

from temporalio.client import Client

from tests.integration.durability.ground import Ground, Service
from tests.support.model_server import DONE, ModelServer, chunk, finish, stream, usage

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"


def noise(size: int) -> str:
    """Text that hardly compresses."""
    return "".join(random.Random(size).choices(LETTERS, k=size))


async def test_a_prompt_is_taken_whole_or_refused_at_submit(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    model.script(stream(chunk("read"), finish(), usage(9, 1), DONE))
    for size, name, code in ((1_100_000, "chat", "body-too-large"), (300_000, "small", "input-too-large")):
        reply = await service.try_submit(name, params=_prompt(noise(size)))
        assert (reply.status_code, reply.json()["code"]) == (413, code)
    text = noise(1_000_000)
    task_id = await service.submit(params=_prompt(text))
    await service.reaches(task_id, "COMPLETED")
    assert model.calls[0].body["messages"][0]["content"] == text
    client = await Client.connect(ground.temporal.address)
    events = (await client.get_workflow_handle(task_id).fetch_history()).events
    assert sum(event.ByteSize() for event in events) < 1_300_000, "the prompt stands there once"


async def test_an_output_is_kept_whole_or_ends_the_task_once(
    ground: Ground, service: Service, model: ModelServer
) -> None:
    whole = noise(1_000_000)
    parts = [chunk(whole[k : k + 50_000]) for k in range(0, len(whole), 50_000)]
    model.script(stream(*parts, finish(), usage(9, 250_000), DONE))
    task_id = await service.submit()
    done = await service.reaches(task_id, "COMPLETED")
    assert done["result"]["text"] == whole

    model.script(stream(*[chunk("word " * 50), 0.01] * 2_000))
    too_much = await service.submit("small")
    failed = await service.reaches(too_much, "FAILED")
    assert failed["error_code"] == "output_too_large"
    assert [a["outcome"] for a in failed["attempts"]] == ["failed"]
    await model.calls[1].closed_by_client(5)
    assert len(model.calls) == 2


def _prompt(text: str) -> dict[str, object]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}
