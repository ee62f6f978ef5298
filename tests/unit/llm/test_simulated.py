"""The simulated model: fixed words at a fixed rate, continued exactly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure.contracts import Beat, Usage
from perdure.llm.simulated import SimulatedExecutor, words
from perdure.task.errors import ErrorCode
from tests.support.generation import Told, attempt

FAST = {"tokens_per_second": 100_000}


async def run(params: dict[str, Any], **more: Any) -> Told:
    return await attempt(SimulatedExecutor("sim"), params, **more)


async def test_defaults_and_shape() -> None:
    told = await run(FAST)
    assert told.done.text == words(0, 100)
    assert len(told.done.text.split()) == 100
    assert (told.done.finish_reason, told.done.model, told.done.resumed) == ("stop", "sim", False)
    assert told.track.usage(ended_well=True) == Usage(prompt_tokens=0, completion_tokens=100)


async def test_no_work_ends_at_once_without_output() -> None:
    began = asyncio.get_running_loop().time()
    told = await run({"tokens": 0})
    assert told.done.text == ""
    assert asyncio.get_running_loop().time() - began < 0.5
    assert len(told.deltas) == 1


async def test_the_rate_is_kept() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    told = await run({"tokens": 15, "tokens_per_second": 30})
    assert told.done.text == words(0, 15)
    assert 0.4 <= loop.time() - began < 5
    assert len(told.deltas) > 5


async def test_nothing_is_waited_for_after_the_last_word() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await run({"tokens": 1, "tokens_per_second": 1})
    assert 0.9 <= loop.time() - began < 1.8


async def test_prompts_are_counted_in_words() -> None:
    told = await run({**FAST, "tokens": 1, "messages": [{"role": "user", "content": "one two three"}]})
    assert told.track.usage(ended_well=True).prompt_tokens == 3


@pytest.mark.parametrize("stop", [1, 2, 5])
async def test_text_is_the_same_however_it_was_interrupted(stop: int) -> None:
    params = {"tokens": 60, "tokens_per_second": 300}
    checkpoint: Beat | None = None
    for number in range(1, 40):
        told = await run(params, number=number, checkpoint=checkpoint, stop_after=stop)
        if told.result:
            break
        assert checkpoint is None or told.beat.text is not None
        checkpoint = told.beat
    assert told.done.text == words(0, 60)
    assert told.track.output_tokens == 60
    assert told.done.resumed
    assert told.track.discarded == 0


async def test_a_checkpoint_of_something_else_starts_over() -> None:
    told = await run(
        {**FAST, "tokens": 5}, number=2, checkpoint=Beat(attempt=1, text="other", output_tokens=3)
    )
    assert told.done.text == words(0, 5)
    assert not told.done.resumed
    assert told.track.discarded == 3


async def test_faults_as_asked() -> None:
    fault = {"code": "upstream_unavailable", "after_tokens": 10, "times": 2, "retry_after": 1}
    params = {**FAST, "tokens": 25, "fault": fault}
    first = await run(params)
    assert (first.failed.code, first.failed.retry_after) == (ErrorCode.UPSTREAM_UNAVAILABLE, 1.0)
    assert not first.failed.refused
    assert first.beat.text == words(0, 10)
    second = await run(params, number=2, checkpoint=first.beat)
    assert second.failed.code is ErrorCode.UPSTREAM_UNAVAILABLE
    assert second.beat.text == words(0, 20)
    third = await run(params, number=3, checkpoint=second.beat)
    assert third.done.text == words(0, 25)


async def test_a_fault_without_times_comes_on_every_attempt() -> None:
    told = await run({"tokens": 5, "fault": {"code": "invalid_request"}}, number=50)
    assert told.failed.code is ErrorCode.INVALID_REQUEST
    assert not told.failed.retryable
    refusal = await run({"fault": {"code": "upstream_unavailable", "refused": True}})
    assert refusal.failed.refused


@pytest.mark.parametrize(
    "params",
    [
        {"tokens": -1},
        {"tokens": 1.5},
        {"tokens": True},
        {"tokens": 10**9},
        {"tokens_per_second": 0},
        {"tokens_per_second": float("nan")},
        {"tokens_per_second": float("inf")},
        {"tokens_per_second": "fast"},
        {"fault": "x"},
        {"fault": {"code": "nope"}},
        {"fault": {"code": "internal", "retry_after": -1}},
        {"fault": {"code": "internal", "after_tokens": "x"}},
    ],
)
async def test_bad_params_are_the_callers_fault(params: dict[str, Any]) -> None:
    fault = (await run(params)).failed
    assert (fault.code, fault.retryable) == (ErrorCode.INVALID_REQUEST, False)
    assert "params." in fault.message


async def test_output_is_bounded() -> None:
    told = await run({"tokens": 1_000_000, "tokens_per_second": 10_000_000}, max_output_bytes=50_000)
    assert told.failed.code is ErrorCode.OUTPUT_TOO_LARGE
