"""Continuing over a real socket: what the server is asked, and one whole text in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.contracts import Beat, Usage
from perdure.task.errors import ErrorCode as Code
from tests.support.generation import HELLO, attempt, executor_for
from tests.support.model_server import (
    DONE,
    RESET,
    Call,
    ModelServer,
    chunk,
    finish,
    reply,
    stream,
    usage,
    words,
)

STORY = "Once upon a time there was a bridge.\n\nIt was old and   it was 好 🙂, and everybody loved it."
DIALECTS = ["trailing", "continue_final_message", "prefix_flag"]


def story_teller(dies_after: list[int], *, echoes: bool = False) -> Any:
    """A server that knows one story, goes on from a trailing assistant message, and breaks off."""
    pieces = [" " + word if number else word for number, word in enumerate(STORY.split(" "))]

    def script(call: Call) -> list[Any]:
        last = call.body["messages"][-1]
        given = last["content"] if last["role"] == "assistant" else ""
        left = STORY[len(given) :]
        made, position = [], 0
        for piece in pieces:
            position += len(piece)
            if position > len(given):
                made.append(
                    piece[-(position - len(given)) :] if position - len(given) < len(piece) else piece
                )
        assert "".join(made) == left
        chunks = [chunk(piece) for piece in ([given] if echoes and given else []) + made]
        if dies_after:
            return stream(*chunks[: dies_after.pop(0)], 0.02, RESET)
        return stream(*chunks, finish(), usage(10, len(made)), DONE)

    return script


@pytest.mark.parametrize("resume", DIALECTS)
@pytest.mark.parametrize("echoes", [False, True])
async def test_killed_twice_and_not_a_character_lost_or_doubled(
    server: ModelServer, resume: str, echoes: bool
) -> None:
    server.script(story_teller([9, 6], echoes=echoes))
    executor = executor_for(server.base_url, resume=resume)
    checkpoint: Beat | None = None
    shown: list[str] = []
    for number in (1, 2, 3):
        told = await attempt(executor, number=number, checkpoint=checkpoint)
        shown.append(told.beat.text or "")
        checkpoint = told.beat
    assert told.done.text == STORY
    assert told.done.resumed
    assert all(STORY.startswith(text) for text in shown)
    assert 0 < len(shown[0]) < len(shown[1])
    assert told.track.discarded == 0
    limits = [call.body["max_tokens"] for call in server.calls]
    assert limits[0] == 100
    assert limits[0] > limits[1] > limits[2]
    assert told.track.usage(ended_well=True).prompt_tokens == 10
    await executor.aclose()


@pytest.mark.parametrize("cut", range(0, len(STORY), 3))
async def test_any_cut_is_joined(server: ModelServer, cut: int) -> None:
    server.script(story_teller([]))
    executor = executor_for(server.base_url, resume="trailing")
    checkpoint = Beat(attempt=1, text=STORY[:cut], output_tokens=cut // 4)
    told = await attempt(executor, number=2, checkpoint=checkpoint)
    assert told.done.text == STORY
    await executor.aclose()


async def test_a_model_that_cannot_continue_starts_over_and_counts_it(server: ModelServer) -> None:
    server.script(story_teller([9]))
    executor = executor_for(server.base_url, resume="none")
    first = await attempt(executor)
    second = await attempt(executor, number=2, checkpoint=first.beat)
    assert second.done.text == STORY
    assert not second.done.resumed
    assert second.track.usage(ended_well=True).discarded_tokens == 9
    assert second.beat.restarted
    await executor.aclose()


async def test_tools_start_over(server: ModelServer) -> None:
    server.script(story_teller([]))
    executor = executor_for(server.base_url, resume="trailing")
    params = {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}
    checkpoint = Beat(attempt=1, text="Once upon", output_tokens=2)
    told = await attempt(executor, params, number=2, checkpoint=checkpoint)
    assert len(server.calls[0].body["messages"]) == 1
    assert told.track.discarded == 2
    await executor.aclose()


async def test_a_server_that_refuses_to_continue_is_asked_from_the_start(server: ModelServer) -> None:
    message = "Assistant response prefill is incompatible with enable_thinking."
    server.script(reply(400, json.dumps({"error": {"message": message}})), story_teller([]))
    executor = executor_for(server.base_url, resume="trailing")
    checkpoint = Beat(attempt=1, text="Once upon", output_tokens=2)
    told = await attempt(executor, number=2, checkpoint=checkpoint)
    assert told.done.text == STORY
    assert not told.done.resumed
    assert told.track.discarded == 2
    assert [len(call.body["messages"]) for call in server.calls] == [2, 1]
    await executor.aclose()


async def test_a_request_that_is_itself_wrong_is_not_asked_twice(server: ModelServer) -> None:
    server.script(reply(400, ""))
    executor = executor_for(server.base_url, resume="trailing")
    assert (await attempt(executor)).failed.code is Code.INVALID_REQUEST
    assert len(server.calls) == 1
    await executor.aclose()


async def test_a_generation_that_was_complete_needs_no_call(server: ModelServer) -> None:
    executor = executor_for(server.base_url, resume="trailing")
    checkpoint = Beat(attempt=1, text="all of it", output_tokens=100)
    told = await attempt(executor, number=2, checkpoint=checkpoint)
    assert (told.done.text, told.done.finish_reason, told.done.resumed) == ("all of it", "length", True)
    assert server.calls == []
    await executor.aclose()


async def test_the_last_word_may_be_all_that_was_missing(server: ModelServer) -> None:
    server.script(stream(chunk(role="assistant"), finish(), usage(20, 0), DONE))
    executor = executor_for(server.base_url, resume="trailing")
    told = await attempt(executor, number=2, checkpoint=Beat(attempt=1, text="all of it", output_tokens=3))
    assert (told.done.text, told.done.finish_reason, told.done.warnings) == ("all of it", "stop", None)
    assert told.track.output_tokens == 3
    await executor.aclose()


async def test_a_cut_in_mid_thought_starts_over(server: ModelServer) -> None:
    server.script(stream(*words("the answer"), finish(), DONE))
    executor = executor_for(server.base_url, resume="trailing")
    checkpoint = Beat(attempt=1, text="", reasoning="hmm", output_tokens=1)
    told = await attempt(executor, number=2, checkpoint=checkpoint)
    assert (told.done.text, told.done.reasoning) == ("the answer", None)
    assert told.track.usage(ended_well=True) == Usage(discarded_tokens=1)
    await executor.aclose()
