"""What one event says: every field optional, errors in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.contracts import Usage
from perdure.llm.chunks import Chunk, Done, NotJsonError, ToolPart, UpstreamError, read_event
from perdure.llm.sse import Event


def read(value: Any, name: str = "") -> Any:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return read_event(Event(data, name=name))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": None}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": 7, "reasoning": {"a": 1}}, "finish_reason": 3}]},
        {"choices": ["x", None]},
        {"choices": [{"index": 1, "delta": {"content": "another answer"}}]},
        {"choices": [], "usage": None},
        {"choices": [], "usage": {"prompt_tokens": "many", "completion_tokens": True}},
        {"new_field": 1, "choices": [{"delta": {}, "new": 2}]},
    ],
)
def test_missing_and_odd_fields_count_as_absent(value: Any) -> None:
    assert read(value) == Chunk()


def test_each_kind_of_output_has_its_place() -> None:
    delta = {"content": "a", "reasoning_content": "b", "refusal": "c"}
    chunk = read({"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]})
    assert chunk == Chunk(text="a", reasoning="b", refusal="c", finish_reason="stop", model="m")
    assert read({"choices": [{"delta": {"reasoning": "b"}}]}) == Chunk(reasoning="b")
    both = {"reasoning": "b", "reasoning_content": "b"}
    assert read({"choices": [{"delta": both}]}) == Chunk(reasoning="b")


def test_content_as_a_list_of_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "yes"},
        {"type": "image"},
        "junk",
    ]
    assert read({"choices": [{"delta": {"content": parts}}]}) == Chunk(text="yes", reasoning="hm")


def test_a_whole_completion_reads_like_a_chunk() -> None:
    choice = {"message": {"role": "assistant", "content": "all"}, "finish_reason": "length"}
    assert read({"choices": [choice]}) == Chunk(text="all", finish_reason="length")


def test_tool_fragments() -> None:
    calls = [
        {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}},
        {"index": 1, "function": {"arguments": {"b": 2}}},
        None,
    ]
    assert read({"choices": [{"delta": {"tool_calls": calls}}]}).tools == (
        ToolPart(0, "x", "f", '{"a'),
        ToolPart(1, None, None, '{"b": 2}'),
    )
    old = {"function_call": {"name": "f", "arguments": "{}"}}
    assert read({"choices": [{"delta": old}]}).tools == (ToolPart(0, None, "f", "{}"),)


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (5, 5),
        (5.0, 5),
        (0, 0),
        (-1, None),
        (1.5, None),
        (True, None),
        ("5", None),
        (10**30, None),
        (None, None),
    ],
)
def test_usage_is_a_count_or_unknown(tokens: Any, count: int | None) -> None:
    value = {"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": 1}}
    assert read(value).usage == Usage(prompt_tokens=count, completion_tokens=1)


def test_non_finite_numbers_do_not_break_a_chunk() -> None:
    raw = (
        b'{"choices": [{"delta": {"content": "a"}, "logprobs": {"content": '
        b'[{"token": "a", "logprob": -Infinity, "top": [NaN, Infinity, 1e400, 1]}]}}]}'
    )
    chunk = read(raw)
    assert chunk.text == "a"
    assert chunk.logprobs[0]["token"] == "a"


def test_bytes_that_are_no_utf8_become_replacement_marks() -> None:
    assert read(b'{"choices": [{"delta": {"content": "a\xff\xfeb"}}]}').text == "a\ufffd\ufffdb"


def test_half_a_surrogate_pair_reads_as_it_came() -> None:
    assert read(b'{"choices": [{"delta": {"content": "\\ud83d"}}]}').text == "\ud83d"


@pytest.mark.parametrize("raw", [b"[DONE]", b" [DONE] "])
def test_done(raw: bytes) -> None:
    assert isinstance(read(raw), Done)


@pytest.mark.parametrize("raw", [b"", b"ping", b"[KEEPALIVE]", b"42", b"null", b'"text"', b"[1, 2]"])
def test_what_is_no_chunk_says_nothing(raw: bytes) -> None:
    assert read(raw) is None


@pytest.mark.parametrize("raw", [b'{"choices": [', b"{broken}", b"{" * 100_000, b'{"a":' * 50_000])
def test_a_broken_chunk_is_no_silence(raw: bytes) -> None:
    with pytest.raises(NotJsonError):
        read(raw)


def test_a_chunk_cut_by_the_end_says_nothing() -> None:
    assert read_event(Event(b'{"choices": [{"del', cut=True)) is None
    assert isinstance(read_event(Event(b"[DONE]", cut=True)), Done)
    whole = Event(b'{"choices": [{"delta": {"content": "a"}}]}', cut=True)
    assert read_event(whole) == Chunk(text="a")


@pytest.mark.parametrize(
    ("value", "message", "status", "words"),
    [
        ({"error": {"message": "m", "code": 503}}, "m", 503, ()),
        ({"error": {"message": "m", "code": "503"}}, "m", 503, ()),
        ({"error": {"message": "m", "type": "t", "code": "c"}}, "m", None, ("c", "t")),
        ({"error": "m"}, "m", None, ()),
        ({"error": "m", "error_type": "overloaded"}, "m", None, ("overloaded",)),
        ({"error": {"code": 429}}, "an error without a message", 429, ()),
        ({"error": {"message": {"a": 1}}}, '{"a": 1}', None, ()),
        ({"error": ["x"]}, "an error without a message", None, ()),
        ({"error": True}, "an error without a message", None, ()),
        ({"choices": [{"delta": {"content": "a"}}], "error": {"message": "m"}}, "m", None, ()),
        ({"object": "error", "message": "m", "type": "BadRequest", "code": 400}, "m", 400, ("BadRequest",)),
        ({"detail": "m"}, "m", None, ()),
        ({"message": "m", "code": 500}, "m", 500, ()),
    ],
)  # fmt: skip
def test_errors_in_every_dialect(
    value: Any, message: str, status: int | None, words: tuple[str, ...]
) -> None:
    assert read(value) == UpstreamError(message, status, words)


@pytest.mark.parametrize(
    "value", [{"type": "ping", "message": "still here"}, {"message": {"role": "assistant"}, "type": "x"}]
)
def test_a_message_alone_is_no_error(value: Any) -> None:
    assert read(value) == Chunk()


@pytest.mark.parametrize("error", [None, False, "", {}, 0])
def test_an_empty_error_field_is_none(error: Any) -> None:
    assert read({"choices": [{"delta": {"content": "a"}}], "error": error}) == Chunk(text="a")


def test_error_events() -> None:
    assert read({"message": "m", "code": 503}, name="error") == UpstreamError("m", 503)
    assert read({"error": {"message": "m"}}, name="error") == UpstreamError("m")
    assert read(b"it broke", name="error") == UpstreamError("it broke")
    assert read(b"", name="error") == UpstreamError("an error event without a message")


def test_bare_documents() -> None:
    assert read_event(Event(b'{"error": "m"}', bare=True)) == UpstreamError("m")
    assert read_event(Event(b'{"choices": []}', bare=True)) is None
    assert read_event(Event(b"{not json", bare=True)) is None
    page = read_event(Event(b"<!doctype html>", bare=True))
    assert isinstance(page, UpstreamError)
    assert page.words == ("html",)
