"""Deltas in, beats out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contracts import MAX_CHECKPOINT_BYTES, MAX_RESULT_BYTES, Beat, Usage
from perdure.llm.base import Delta
from perdure.llm.track import Track, beat_interval, encoded_size
from perdure.task.errors import ErrorCode, TaskFault

MIB = 1024 * 1024
BEFORE = Beat(attempt=1, text="one two", output_tokens=2, progress=20, reasoning="r", prompt_tokens=9)


def track(checkpoint: Beat | None = None, expect: int = 10) -> Track:
    made = Track(2, checkpoint, MIB)
    made.expect(expect)
    return made


def test_the_first_beat_holds_the_checkpoint_of_the_attempt_before() -> None:
    beat = track(BEFORE).beat()
    assert (beat.attempt, beat.seq, beat.text, beat.reasoning) == (2, 1, "one two", "r")
    assert (beat.output_tokens, beat.resumed_from_tokens, beat.progress) == (2, 2, 20)


def test_deltas_add_up() -> None:
    one = track(BEFORE)
    one.apply(Delta(text=" three", tokens=1))
    one.apply(Delta(reasoning="s", tokens=1, message="thinking"))
    beat = one.beat()
    assert (beat.text, beat.reasoning, beat.output_tokens) == ("one two three", "rs", 4)
    assert (beat.progress, beat.message) == (40, "thinking")


def test_a_restart_drops_and_counts() -> None:
    one = track(BEFORE)
    one.apply(Delta(restart=True))
    one.apply(Delta(text="eins", tokens=1))
    beat = one.beat()
    assert (beat.text, beat.reasoning, beat.output_tokens, beat.discarded_tokens) == ("eins", "", 1, 2)
    assert (beat.restarted, beat.resumed_from_tokens, beat.progress) == (True, 0, 10)


def test_a_restart_may_keep_the_start() -> None:
    one = track(BEFORE)
    one.apply(Delta(restart=True, keep_chars=3, keep_tokens=1, state={"page": 1}))
    beat = one.beat()
    assert (beat.text, beat.output_tokens, beat.discarded_tokens, beat.restarted) == ("one", 1, 1, False)
    assert (beat.resumed_from_tokens, beat.state) == (1, {"page": 1})


def test_the_servers_count_replaces_ours() -> None:
    one = track(BEFORE)
    for _ in range(3):
        one.apply(Delta(text="x", tokens=1))
    one.apply(Delta(usage=Usage(prompt_tokens=5, completion_tokens=7)))
    assert one.output_tokens == 9
    one.apply(Delta(text="x", tokens=1, usage=Usage(prompt_tokens=5, completion_tokens=8)))
    assert one.output_tokens == 10
    assert one.usage(ended_well=True) == Usage(prompt_tokens=5, completion_tokens=8)


def test_usage_that_nobody_reported_is_unknown_when_it_ended_well() -> None:
    one = track()
    one.apply(Delta(text="x", tokens=3))
    assert one.usage(ended_well=True) == Usage()
    assert one.usage(ended_well=False) == Usage(completion_tokens=3)


def test_usage_after_a_restart_within_the_attempt() -> None:
    one = track(BEFORE)
    one.apply(Delta(text="x", tokens=4))
    one.apply(Delta(restart=True))
    one.apply(Delta(text="y", tokens=1))
    one.apply(Delta(usage=Usage(completion_tokens=2)))
    assert one.output_tokens == 2
    assert one.usage(ended_well=False) == Usage(completion_tokens=6, discarded_tokens=6)


def test_progress_is_the_executors_own_where_it_has_one() -> None:
    one = track(expect=0)
    one.apply(Delta(progress=50))
    one.apply(Delta(text="x", tokens=1))
    assert one.beat().progress == 50
    one.apply(Delta(progress=30))
    assert one.beat().progress == 50
    one.apply(Delta(progress=500))
    assert one.beat().progress == 99


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_progress_never_falls_within_an_attempt(seed: int) -> None:
    rng = random.Random(seed)
    one, last = track(BEFORE if rng.random() < 0.5 else None, expect=rng.choice([0, 5, 50])), 0
    for _ in range(30):
        one.apply(
            Delta(
                tokens=rng.randint(0, 3),
                restart=rng.random() < 0.1,
                progress=rng.choice([None, None, rng.randint(0, 120)]),
                usage=rng.choice([None, Usage(completion_tokens=rng.randint(0, 60))]),
            )
        )
        progress = one.beat().progress
        assert last <= progress <= 99
        last = progress


def test_output_is_bounded() -> None:
    one = Track(1, Beat(attempt=1, text="x" * 600, output_tokens=1), 1000)
    one.apply(Delta(text="é" * 200, tokens=1))
    with pytest.raises(TaskFault) as caught:
        one.apply(Delta(text="y", tokens=1))
    assert caught.value.code is ErrorCode.OUTPUT_TOO_LARGE


@pytest.mark.parametrize("piece", ["x", "\n", "é", '"'])
def test_a_checkpoint_above_its_limit_carries_no_text(piece: str) -> None:
    one = track()
    one.apply(Delta(text=piece * (MAX_CHECKPOINT_BYTES // 8), state={"a": 1}, tokens=1))
    assert one.beat().text is not None
    one.apply(Delta(text=piece * MAX_CHECKPOINT_BYTES, tokens=1))
    beat = one.beat()
    assert (beat.text, beat.reasoning, beat.state, beat.output_tokens) == (None, "", None, 2)


def test_a_checkpoint_is_measured_as_it_is_encoded() -> None:
    one = track()
    one.apply(Delta(text="\n" * (MAX_CHECKPOINT_BYTES * 3 // 4), tokens=1))
    assert one.beat().text is None


@pytest.mark.parametrize("piece", ["word ", "\x01"])
def test_a_cancelled_attempt_keeps_all_that_a_result_may_hold(piece: str) -> None:
    one = track()
    one.apply(Delta(text=piece * (MIB // len(piece) - 1), tokens=1))
    beat = one.last_beat()
    assert encoded_size(beat) <= MAX_RESULT_BYTES
    assert beat.text is not None
    assert len(beat.text) > 100_000


def test_the_final_beat_repeats_no_text() -> None:
    one = track(BEFORE)
    beat = one.final_beat()
    assert (beat.text, beat.output_tokens, beat.progress) == ("", 2, 20)


def test_beats_grow_rarer_with_their_size() -> None:
    rng = random.Random(1)

    def beat(size: int) -> Beat:  # hex digits of noise compress to about a half
        return Beat(attempt=1, text="".join(rng.choices("0123456789abcdef", k=size)))

    assert beat_interval(beat(10), 10) == 1.0
    assert beat_interval(beat(24_000), 10) == 1.0
    assert 1.5 < beat_interval(beat(64_000), 10) < 3
    assert beat_interval(beat(250_000), 10) == 4.0
    assert beat_interval(beat(250_000), 5) == 2.0
    assert beat_interval(Beat(attempt=1, text="a" * 200_000), 10) == 1.0
