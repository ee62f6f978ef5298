"""Continuing a generation: what is sent, and how the answer joins what stands."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contracts import Beat
from perdure.llm.resume import Seam, from_start, plan_request
from perdure.models import Model

USER = {"role": "user", "content": "Tell me."}


def model(resume: str) -> Model:
    return Model.model_validate({"pool": "local", "base_url": "http://x/v1", "resume": resume})


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 100, **more}


def beat(text: str | None = "Once upon a time", tokens: int = 4, **more: Any) -> Beat:
    return Beat(attempt=1, text=text, output_tokens=tokens, **more)


def test_the_first_attempt_is_sent_as_it_is() -> None:
    for checkpoint in (None, beat("", 0)):
        plan = plan_request(model("trailing"), body(), checkpoint)
        assert (plan.body, plan.tokens_left, plan.restart, plan.text) == (body(), 100, False, "")


@pytest.mark.parametrize(
    ("resume", "message", "flags"),
    [
        ("trailing", {"role": "assistant", "content": "Once upon a time"}, {}),
        (
            "continue_final_message",
            {"role": "assistant", "content": "Once upon a time"},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        ("prefix_flag", {"role": "assistant", "content": "Once upon a time", "prefix": True}, {}),
    ],
)
def test_dialects(resume: str, message: dict[str, Any], flags: dict[str, Any]) -> None:
    plan = plan_request(model(resume), body(), beat("Once upon a time \n"))
    assert plan.body == {"messages": [USER, message], "max_tokens": 96, **flags}
    assert (plan.tokens_left, plan.text, plan.restart) == (96, "Once upon a time \n", False)


def test_every_name_of_the_limit_is_lowered() -> None:
    asked = body(max_completion_tokens=50, min_tokens=10)
    plan = plan_request(model("trailing"), asked, beat())
    assert (plan.body["max_completion_tokens"], plan.body["max_tokens"], plan.body["min_tokens"]) == (
        46,
        46,
        6,
    )


def test_nothing_left_means_no_request() -> None:
    assert plan_request(model("trailing"), body(max_tokens=4), beat()).tokens_left == 0
    assert plan_request(model("trailing"), body(max_tokens=3), beat()).tokens_left == 0


def test_the_callers_own_prefill_is_part_of_the_turn() -> None:
    prefill = {"role": "assistant", "content": "Well, "}
    plan = plan_request(model("trailing"), body(messages=[USER, prefill]), beat("once"))
    assert plan.body["messages"] == [USER, {"role": "assistant", "content": "Well, once"}]
    assert plan.text == "once"


@pytest.mark.parametrize(
    ("more", "checkpoint"),
    [
        ({"tools": [{"type": "function"}]}, beat()),
        ({"functions": [{}]}, beat()),
        ({"response_format": {"type": "json_object"}}, beat()),
        ({"guided_json": {}}, beat()),
        ({"n": 2}, beat()),
        ({"logprobs": True}, beat()),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]}, beat()),
        ({}, beat("", reasoning="hmm")),
        ({}, beat(None)),
        ({}, beat("")),
    ],
)
def test_what_cannot_be_continued_starts_over(more: dict[str, Any], checkpoint: Beat) -> None:
    if more.get("guided_json") == {}:
        more = {"guided_json": {"type": "object"}}
    plan = plan_request(model("trailing"), body(**more), checkpoint)
    assert plan.restart
    assert plan.why
    assert plan.body == body(**more)
    assert (plan.text, plan.prefix, plan.tokens_left) == ("", "", 100)


def test_a_model_without_a_dialect_starts_over() -> None:
    assert plan_request(model("none"), body(), beat()).restart


def test_plain_text_formats_are_continued() -> None:
    asked = body(response_format={"type": "text"}, n=1, logprobs=False, tools=[])
    assert not plan_request(model("trailing"), asked, beat()).restart


def test_reasoning_that_is_over_stands() -> None:
    plan = plan_request(model("trailing"), body(), beat(reasoning="hmm"))
    assert (plan.restart, plan.reasoning) == (False, "hmm")


def test_white_space_alone_is_no_prefix() -> None:
    plan = plan_request(model("trailing"), body(), beat("\n\n", 1))
    assert plan.body == body(max_tokens=99)
    assert plan.seam().feed("\n\nHello") == "Hello"


def test_back_to_the_start() -> None:
    plan = plan_request(model("trailing"), body(), beat())
    again = from_start(plan, body(), "refused")
    assert (again.body, again.text, again.restart, again.tokens_left) == (body(), "", True, 100)


def joined(text: str, answer: list[str], may_echo: bool = True) -> str:
    prefix = text.rstrip()
    seam = Seam(prefix, text[len(prefix) :], may_echo)
    return text + "".join(seam.feed(piece) for piece in answer) + seam.end()


LONG = "The council has voted to close the old bridge."


@pytest.mark.parametrize(
    ("text", "answer", "whole"),
    [
        ("the", [" next"], "the next"),
        ("the ", [" next"], "the next"),
        ("the ", ["next"], "the next"),
        ("the\n\n", ["\n\nnext"], "the\n\nnext"),
        ("the\n\n", ["\n", "\nnext"], "the\n\nnext"),
        ("the\n", ["\n\nnext"], "the\n\nnext"),
        ("the\n", [" next"], "the\n next"),
        ("the ", ["  next"], "the  next"),
        ("wo", ["rd"], "word"),
        ("the ", [], "the "),
        ("the ", [" "], "the "),
        (LONG, [LONG + " Now"], LONG + " Now"),
        (LONG, [LONG[:10], LONG[10:], " Now"], LONG + " Now"),
        (LONG + " ", [LONG, " Now"], LONG + " Now"),
        (LONG, [" " + LONG], LONG + " " + LONG),
        (LONG, [LONG[:10]], LONG + LONG[:10]),
        (LONG, [LONG[:10] + "x"], LONG + LONG[:10] + "x"),
        ("ha ha ha ha ha ha ha", ["ha ha ha ha ha ha ha"], "ha ha ha ha ha ha ha" * 2),
    ],
)
def test_the_seam_loses_and_doubles_nothing(text: str, answer: list[str], whole: str) -> None:
    assert joined(text, answer) == whole


def test_an_echo_is_kept_where_it_could_be_the_models_own() -> None:
    assert joined(LONG, [LONG], may_echo=False) == LONG + LONG


def test_short_repeats_are_an_echo_only_where_the_dialect_echoes() -> None:
    short = beat("Yes")
    assert not plan_request(model("trailing"), body(), short).may_echo
    assert plan_request(model("prefix_flag"), body(), short).may_echo
    assert not plan_request(model("trailing"), body(), beat(" " + LONG)).may_echo
    assert plan_request(model("trailing"), body(), beat(LONG)).may_echo


def test_a_huge_prefix_is_looked_through_quickly() -> None:
    assert joined("ab" * 120_000, ["ab"]) == "ab" * 120_001
    assert joined("x".join(map(str, range(40_000))), ["!"]).endswith("39999!")


TEXT = st.text(st.sampled_from("ab \n.🙂"), max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    text=TEXT,
    rest=TEXT,
    cuts=st.lists(st.integers(0, 30), max_size=6),
    trims=st.booleans(),
    echo=st.booleans(),
)
def test_any_split_of_any_answer_joins_alike(
    text: str, rest: str, cuts: list[int], trims: bool, echo: bool
) -> None:
    """A server is given the trimmed prefix and writes the rest; whatever it repeats of the seam goes."""
    space = text[len(text.rstrip()) :]
    answer = (text.rstrip() if echo else "") + ("" if trims else space) + rest
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[a:b] for a, b in itertools.pairwise(edges)]
    for may_echo in (True, False):
        whole = joined(text, [answer], may_echo)
        assert joined(text, pieces, may_echo) == whole
        assert whole.startswith(text)
