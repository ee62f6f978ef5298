"""Text from outside."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from perdure.task.text import clean, clean_json, one_line, reason_text

ANY = st.text(alphabet=st.characters(codec=None, categories=None), max_size=60)  # surrogates too


@given(ANY)
def test_clean_text_can_be_stored_and_sent(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode()
    assert "\x00" not in cleaned
    assert clean(cleaned) == cleaned


def test_a_split_pair_is_one_character_and_a_lone_half_is_replaced() -> None:
    assert clean("\ud83d\ude00") == "\U0001f600"
    assert clean("a\ud83db") == "a\ufffdb"
    assert clean("a\x00b") == "a\ufffdb"


@given(ANY)
def test_one_line_is_one_line(text: str) -> None:
    line = one_line(text, 20)
    assert len(line) <= 20
    assert len(line.splitlines()) <= 1
    assert line.isprintable() or not any(ord(c) < 32 or c in "\x7f\x85\u2028\u2029" for c in line)


def test_json_is_cleaned_to_the_leaves() -> None:
    dirty = {"a\x00": [float("nan"), float("inf"), 1.5, "\ud800", None, True]}
    cleaned = clean_json(dirty)
    assert cleaned == {"a\ufffd": [None, None, 1.5, "\ufffd", None, True]}
    json.dumps(cleaned, allow_nan=False).encode()


def test_reasons_of_any_shape() -> None:
    assert reason_text("x\ny") == "x y"
    assert reason_text({"reason": "x"}) == "x"
    assert reason_text({"reason": 5}) is None
    assert reason_text([1]) is None
    assert reason_text("") is None
