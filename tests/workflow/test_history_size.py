"""History stays far below Temporal's limits (50 MB, 51,200 events)."""

from __future__ import annotations

import dataclasses
import random

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from perdure import names
from perdure.codec import Codec
from perdure.contracts import Beat, GenerateInput, GenerateResult
from perdure.task import policy
from perdure.task.states import Status
from tests.support.waiting import until
from tests.workflow.conftest import Stage, World, beat_until, generated

WORDS = ("the", "model", "token", "slot", "queue", "checkpoint", "river", "bridge", "ferry", "seventeen")


def prose(size: int, seed: int) -> str:
    """Text that compresses about as well as a model's output."""
    rng = random.Random(seed)
    words = (
        rng.choice(WORDS) if rng.random() < 0.6 else "".join(rng.choices("aeioubcdlmnrst", k=6))
        for _ in range(size // 3)
    )
    return " ".join(words)[:size]


@pytest.fixture
async def temporal_client(temporal_address: str) -> Client:
    """Compressed, then encrypted: what Temporal stores is at its largest."""
    converter = dataclasses.replace(pydantic_data_converter, payload_codec=Codec([b"k" * 32]))
    return await Client.connect(temporal_address, data_converter=converter)


async def test_a_long_prompt_and_sixty_attempts_stay_below_20_mb(stage: Stage, world: World) -> None:
    text = prose(230 * 1024, 1)  # the largest checkpoints there are

    async def drain(given: GenerateInput) -> GenerateResult:
        beat = Beat(attempt=given.attempt, text=text, output_tokens=given.attempt)
        return GenerateResult(kind="drained", beat=beat, worker="w1")

    world.script = [drain] * (policy.MAX_RUNS - 1) + [lambda given: _later(generated(given))]
    async with stage.gpu():
        handle = await stage.start(params={"messages": [{"role": "user", "content": prose(1_000_000, 2)}]})
        outcome = await stage.end(handle)
    assert outcome.projection.status is Status.COMPLETED
    assert len(world.given) == policy.MAX_RUNS
    assert all(given.params is None for given in world.given)
    history = await handle.fetch_history()
    size = sum(event.ByteSize() for event in history.events)
    assert size < 20_000_000
    assert len(history.events) < 1_000


async def test_progress_adds_no_events(stage: Stage, world: World) -> None:
    beats = 0

    async def run(given: GenerateInput) -> GenerateResult:
        def beaten() -> bool:
            nonlocal beats
            beats += 1
            return beats > 200

        await beat_until(beaten)
        return generated(given)

    world.script = [run]
    async with stage.gpu():
        handle = await stage.start()
        await stage.end(handle)
    assert len((await handle.fetch_history()).events) < 30


async def test_many_cancels_converge(stage: Stage, world: World) -> None:
    handle = await stage.start()
    for number in range(200):
        if world.outcomes:
            break
        try:
            await handle.signal(names.SIG_CANCEL, f"again {number}")
        except RPCError:
            break  # it is closed already
    await until(lambda: bool(world.outcomes))
    assert world.outcomes[0].projection.status is Status.CANCELLED
    assert len(world.outcomes) == 1


async def _later(result: GenerateResult) -> GenerateResult:
    return result
