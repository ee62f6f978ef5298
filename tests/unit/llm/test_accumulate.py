"""The answer put together: tool calls whole and in order, characters whole, everything bounded."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contracts import Usage
from perdure.llm.accumulate import Accumulator, Joiner, OutputTooLargeError, Step, ToolCalls
from perdure.llm.chunks import Chunk, ToolPart


def test_text_reasoning_and_refusal_stay_apart() -> None:
    total = Accumulator(1000)
    steps = [
        total.add(Chunk(reasoning="hm ")),
        total.add(Chunk(text="a", reasoning="yes")),
        total.add(Chunk(refusal="no")),
        total.add(Chunk()),
    ]
    assert steps == [Step("", "hm ", 1), Step("a", "yes", 1), Step("", "", 1), Step()]
    assert total.refusal == "no"


def test_the_last_report_of_usage_counts() -> None:
    total = Accumulator(1000)
    for usage in (
        Usage(prompt_tokens=1, completion_tokens=1),
        Usage(prompt_tokens=1, completion_tokens=9),
        None,
    ):
        total.add(Chunk(usage=usage))
    assert total.usage == Usage(prompt_tokens=1, completion_tokens=9)
    assert Accumulator(1000).usage is None


def test_logprobs_count_tokens_and_lose_infinities() -> None:
    total = Accumulator(1000)
    step = total.add(Chunk(text="ab", logprobs=({"logprob": float("-inf")}, {"logprob": -0.5})))
    assert step.tokens == 2
    assert total.logprobs == {"content": [{"logprob": None}, {"logprob": -0.5}]}
    total.add(Chunk(text="c", logprobs=({"bytes": 10**30},)))  # no JSON of ours holds that
    assert len(total.logprobs["content"]) == 2
    assert Accumulator(1000).logprobs is None


def test_a_pair_split_over_chunks_is_one_character() -> None:
    total = Accumulator(1000)
    assert total.add(Chunk(text="a\ud83d")).text == "a"
    assert total.add(Chunk(reasoning="between")).text == ""
    assert total.add(Chunk(text="\ude00b")).text == "😀b"
    assert total.end() == Step()


def test_a_lone_half_and_a_nul_become_replacement_marks() -> None:
    total = Accumulator(1000)
    assert total.add(Chunk(text="a\x00b\udc00c\ud83d")).text == "a\ufffdb\ufffdc"
    assert total.end().text == "\ufffd"


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-16"), max_size=30), st.lists(st.integers(0, 60), max_size=10))
def test_any_split_of_utf16_units_joins_to_the_same_text(text: str, cuts: list[int]) -> None:
    text = text.replace("\x00", "")
    raw = text.encode("utf-16-le", "surrogatepass")
    units = [raw[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(raw), 2)]
    edges = [0, *sorted(min(cut, len(units)) for cut in cuts), len(units)]
    joiner = Joiner()
    pieces = [joiner.feed("".join(units[a:b])) for a, b in itertools.pairwise(edges)]
    assert "".join(pieces) + joiner.end() == text


def test_output_is_bounded_whatever_kind_it_is() -> None:
    for chunk in (
        Chunk(text="é" * 6),
        Chunk(reasoning="x" * 11),
        Chunk(refusal="x" * 11),
        Chunk(tools=(ToolPart(arguments="x" * 11),)),
        Chunk(logprobs=("x" * 11,)),
    ):
        with pytest.raises(OutputTooLargeError):
            Accumulator(10).add(chunk)
    assert Accumulator(12).add(Chunk(text="é" * 6)).text == "é" * 6


def calls_of(*parts: ToolPart) -> list[tuple[str, str, str]]:
    calls = ToolCalls()
    for part in parts:
        calls.add(part)
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls.result() or []]


def test_no_tool_calls_are_none() -> None:
    assert ToolCalls().result() is None


def test_fragments_by_index() -> None:
    assert calls_of(
        ToolPart(0, "a", "f", ""),
        ToolPart(1, "b", "g", '{"y"'),
        ToolPart(0, None, None, '{"x":'),
        ToolPart(1, None, None, ":2}"),
        ToolPart(0, None, None, "1}"),
    ) == [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]


def test_a_later_index_may_come_first() -> None:
    parts = [ToolPart(1, "b", "g", "{}"), ToolPart(0, "a", "f", "{}")]
    assert calls_of(*parts) == [("a", "f", "{}"), ("b", "g", "{}")]


def test_fragments_without_an_index_follow_their_id_or_the_last_call() -> None:
    assert calls_of(
        ToolPart(None, "a", "f", "{"),
        ToolPart(None, None, None, "}"),
        ToolPart(None, "b", "g", "["),
        ToolPart(None, "b", None, "]"),
        ToolPart(None, "a", None, "!"),
    ) == [("a", "f", "{}!"), ("b", "g", "[]")]


def test_servers_that_number_every_call_zero() -> None:
    parts = [ToolPart(0, "a", "f", "{}"), ToolPart(0, "b", "f", "[]")]
    assert calls_of(*parts) == [("a", "f", "{}"), ("b", "f", "[]")]


def test_servers_that_repeat_id_and_name() -> None:
    assert calls_of(ToolPart(0, "a", "f", "{"), ToolPart(0, "a", "f", "}")) == [("a", "f", "{}")]


def test_a_name_in_two_pieces_and_a_late_id() -> None:
    parts = [ToolPart(0, None, "get_", ""), ToolPart(0, "a", "weather", "{}")]
    assert calls_of(*parts) == [("a", "get_weather", "{}")]


def test_a_call_without_an_id_gets_one() -> None:
    assert calls_of(ToolPart(0, None, "f", "{}")) == [("call_0", "f", "{}")]


@settings(max_examples=60, deadline=None)
@given(
    arguments=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_any_interleaving_of_fragments_gives_whole_calls(arguments: list[str], seed: int) -> None:
    rng = random.Random(seed)
    queues = []
    for index, text in enumerate(arguments):
        cut = rng.randint(0, len(text))
        queues.append(
            [
                ToolPart(index, f"id{index}", f"f{index}", ""),
                ToolPart(index, None, None, text[:cut]),
                ToolPart(index, None, None, text[cut:]),
            ]
        )
    parts = []
    while any(queues):
        parts.append(rng.choice([queue for queue in queues if queue]).pop(0))
    clean = [text.replace("\x00", "\ufffd") for text in arguments]
    assert calls_of(*parts) == [(f"id{n}", f"f{n}", text) for n, text in enumerate(clean)]
