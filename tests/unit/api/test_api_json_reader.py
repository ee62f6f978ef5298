"""Strict JSON: what is refused, how, and that everything else means what Python's own reader says."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.json_reader import MAX_DEPTH, read_json
from api.problems import Problem

_PLAIN_TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)))
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_PLAIN_TEXT, inner, max_size=4),
    max_leaves=20,
)


def refusal(raw: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        read_json(raw)
    return caught.value


@given(_VALUES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_what_json_can_say_is_read_unchanged(value: Any, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_value_or_a_problem(raw: bytes) -> None:
    try:
        value = read_json(raw)
    except Problem as refused:
        problem = refused
    else:
        assert value == json.loads(raw)
        return
    assert problem.status in (400, 422)
    json.dumps(problem.as_json()).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b'{"a":}',
        b"{'a': 1}",
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        b'{"a": "\xff"}',
        b'"\xed\xa0\x80"',
        b'{"a": "\x00"}',
        b'{"a": "line\nbreak"}',
        b'{"a": NaN}',
        b"[Infinity]",
        b"[-Infinity]",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "c": 2, "b": 3}}',
        b'{"a": 1, "\\u0061": 2}',
        b"{} {}",
        b"[1,]",
        b"01",
    ],
)
def test_what_is_no_json_is_malformed(raw: bytes) -> None:
    problem = refusal(raw)
    assert (problem.status, problem.code) == (400, "malformed-json")


@pytest.mark.parametrize(
    ("raw", "pointer"),
    [
        (b'{"a": "x\\u0000y"}', "/a"),
        (b'{"a": ["x", {"b": "\\u0000"}]}', "/a/1/b"),
        (b'{"m": {"\\u0000": 1}}', "/m"),
        (b'{"a": "\\ud83d"}', "/a"),
        (b'{"a": "\\ude00\\ud83d"}', "/a"),
        (b'{"m": {"\\ud83d": 1}}', "/m"),
        (b'{"n": ' + b"9" * 30 + b"}", "/n"),
        (b'{"n": ' + b"9" * 5000 + b"}", "/n"),
        (b'{"n": 9223372036854775808}', "/n"),
        (b'{"n": -9223372036854775809}', "/n"),
        (b'{"n": 1e999}', "/n"),
        (b'{"a/b": {"c~d": -1e400}}', "/a~1b/c~0d"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(raw: bytes, pointer: str) -> None:
    problem = refusal(raw)
    assert (problem.status, problem.code) == (422, "value-refused")
    assert problem.errors[0].pointer == pointer
    json.dumps(problem.as_json()).encode()


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 1, MAX_DEPTH])
@pytest.mark.parametrize(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_up_to_the_limit_passes(depth: int, left: bytes, right: bytes) -> None:
    read_json(left * depth + b"1" + right * depth)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 150, 500, 900, 1100, 5000, 100_000])
@pytest.mark.parametrize(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_nesting_beyond_the_limit_is_refused_alike(depth: int, left: bytes, right: bytes) -> None:
    assert refusal(left * depth + b"1" + right * depth).status == 400
    assert refusal(left * depth).status == 400


def test_brackets_in_text_are_no_nesting() -> None:
    text = "[" * 500 + '{"\\' * 200
    assert read_json(json.dumps({"a": text, "b": [[1]] * 100}).encode())["a"] == text


def test_too_many_values_are_refused() -> None:
    assert "too many" in refusal(b"[" + b"{}," * 250_000 + b"1]").detail
    assert "too many" in refusal(b"[" + b"1," * 1_100_000 + b"1]").detail


@pytest.mark.parametrize(
    "raw",
    [b'"\\"' * 300_000, b'"' * 1_000_001, b'["' + b"\\\\" * 500_000, (b"[" * 60 + b"]" * 60 + b",") * 8_000],
)
def test_hostile_texts_are_judged_in_time(raw: bytes) -> None:
    started = time.process_time()
    assert refusal(raw).status == 400
    assert time.process_time() - started < 5


def test_numbers_keep_their_kind() -> None:
    value = read_json(b'{"a": 1.0, "b": 1, "c": 1e5, "d": -9223372036854775808, "e": 9223372036854775807}')
    assert isinstance(value["a"], float)
    assert isinstance(value["b"], int)
    assert value["c"] == 100_000.0
    assert (value["d"], value["e"]) == (-(2**63), 2**63 - 1)
    assert math.isfinite(read_json(b"1.7976931348623157e308"))
