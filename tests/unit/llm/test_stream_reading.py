"""Streams over a real socket: every legal form is read right, everything else is told apart from success."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zlib
from typing import Any

import pytest

from perdure.contracts import Usage
from perdure.task.errors import ErrorCode as Code
from tests.support.generation import HELLO, Told, attempt, executor_for
from tests.support.model_server import (
    DONE,
    RESET,
    ModelServer,
    chunk,
    event,
    finish,
    reply,
    stream,
    usage,
    words,
)

TEXT = "déjà 好 🙂 \u2028 vu"
PLAIN = b"".join(
    [chunk("déjà"), chunk(" 好"), chunk(" 🙂"), chunk(" \u2028 vu"), finish(), usage(7, 4), DONE]
)


async def run(server: ModelServer, *steps: Any, params: Any = None, **model: Any) -> Told:
    """One attempt against a stream of these steps."""
    server.script(stream(*steps))
    return await go(server, params, **model)


async def go(server: ModelServer, params: Any = None, **model: Any) -> Told:
    executor = executor_for(server.base_url, **model)
    try:
        return await attempt(executor, params)
    finally:
        await executor.aclose()


# Bytes and events ------------------------------------------------------------------------------------


async def test_the_plain_form(server: ModelServer) -> None:
    told = await run(server, PLAIN)
    assert told.done.text == TEXT
    assert (told.done.finish_reason, told.done.model, told.done.resumed) == ("stop", "test-model", False)
    assert told.track.usage(ended_well=True) == Usage(prompt_tokens=7, completion_tokens=4)
    assert told.track.output_tokens == 4


async def test_one_byte_per_write(server: ModelServer) -> None:
    raw = b"\xef\xbb\xbf" + PLAIN.replace(b"\n\n", b"\r\n\r\n")
    told = await run(server, *[raw[at : at + 1] for at in range(len(raw))])
    assert told.done.text == TEXT


@pytest.mark.parametrize("seed", range(8))
async def test_random_splits_and_forms(server: ModelServer, seed: int) -> None:
    rng = random.Random(seed)
    raw = PLAIN.replace(b"\n", rng.choice([b"\n", b"\r", b"\r\n"]))
    raw = raw.replace(
        b"data: ", rng.choice([b"data: ", b"data:", b": c\ndata:", b"id: 1\nevent: message\ndata: "])
    )
    edges = sorted({0, len(raw), *(rng.randrange(len(raw)) for _ in range(rng.randint(1, 40)))})
    told = await run(server, *[raw[a:b] for a, b in itertools.pairwise(edges)])
    assert told.done.text == TEXT


@pytest.mark.parametrize(
    "raw",
    [
        PLAIN.replace(b"data: ", b"data:"),
        PLAIN.replace(b"\n", b"\r"),
        PLAIN.replace(b'{"choices"', b'{\ndata: "choices"'),
        PLAIN.replace(
            b"data: {", b"\n\ndata:\n\n: ping\nretry: 5\nid: 3\nwhat: ever\nevent: message\ndata: {"
        ),
        PLAIN.removesuffix(b"\n\n"),
        PLAIN.removesuffix(DONE),
        PLAIN.removesuffix(DONE).removesuffix(b"\n\n"),
        PLAIN + b"data: garbage after the end\n\n",
    ],
)
async def test_legal_forms(server: ModelServer, raw: bytes) -> None:
    told = await run(server, raw)
    assert told.done.text == TEXT
    assert told.track.usage(ended_well=True).completion_tokens == 4


async def test_an_unterminated_last_event_counts_if_it_is_whole(server: ModelServer) -> None:
    told = await run(server, chunk("a"), finish().removesuffix(b"\n\n"))
    assert told.done.text == "a"
    told = await run(server, chunk("a"), finish().removesuffix(b"}\n\n"))
    assert told.failed.code is Code.STREAM_TRUNCATED


async def test_bytes_that_are_no_utf8(server: ModelServer) -> None:
    told = await run(server, chunk("aXb").replace(b"X", b"\xff\xc3"), finish(), DONE)
    assert told.done.text == "a\ufffd\ufffdb"


async def test_a_nul_and_split_surrogates(server: ModelServer) -> None:
    told = await run(
        server, chunk("a\u0000"), chunk("\ud83d"), chunk("\ude00b"), chunk("\ud83d"), finish(), DONE
    )
    assert told.done.text == "a\ufffd😀b\ufffd"
    assert told.track.beat().text == told.done.text


# Chunks ----------------------------------------------------------------------------------------------


async def test_chunks_without_choices_delta_or_content(server: ModelServer) -> None:
    def counted(content: str | None, made: int) -> bytes:
        count = {"prompt_tokens": 3, "completion_tokens": made}
        return event(json.dumps({"choices": [{"delta": {"content": content}}], "usage": count}))

    told = await run(
        server,
        event('{"choices": []}'),
        chunk(role="assistant"),
        event('{"choices": [{"index": 0}]}'),
        counted(None, 0),
        counted("a", 1),
        chunk("b"),
        finish(),
        usage(3, 9),
        DONE,
    )
    assert told.done.text == "ab"
    assert told.track.usage(ended_well=True) == Usage(prompt_tokens=3, completion_tokens=9)


async def test_usage_that_never_came_is_unknown(server: ModelServer) -> None:
    told = await run(server, chunk("a"), finish(), DONE)
    assert told.track.usage(ended_well=True) == Usage()


@pytest.mark.parametrize("reason", ["length", "content_filter", "tool_calls", "abort", "eos_token"])
async def test_reasons_are_kept(server: ModelServer, reason: str) -> None:
    told = await run(server, chunk("some"), finish(reason), DONE)
    assert (told.done.text, told.done.finish_reason, told.done.warnings) == ("some", reason, None)


async def test_length_without_text_is_marked(server: ModelServer) -> None:
    told = await run(server, chunk(role="assistant"), finish("length"), DONE)
    assert (told.done.text, told.done.finish_reason, told.done.warnings) == ("", "length", ["no_answer"])


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_kept_apart_and_counts(server: ModelServer, field: str) -> None:
    thoughts = [chunk(**{field: f"t{n} "}) for n in range(50)]
    told = await run(server, *thoughts, chunk("answer"), finish(), DONE)
    assert told.done.text == "answer"
    assert told.done.reasoning == "".join(f"t{n} " for n in range(50))
    assert told.track.output_tokens == 51
    told = await run(server, *thoughts, finish("length"), DONE)
    assert (told.done.text, told.done.warnings) == ("", ["no_answer"])


async def test_a_refusal_is_an_answer_of_its_own(server: ModelServer) -> None:
    told = await run(server, chunk(refusal="I will "), chunk(refusal="not."), finish(), DONE)
    assert (told.done.text, told.done.refusal, told.done.warnings) == ("", "I will not.", None)


async def test_tool_calls_are_whole_and_in_order(server: ModelServer) -> None:
    def part(index: int, **function: str) -> bytes:
        call: dict[str, Any] = {"index": index, "function": function}
        if "name" in function:
            call |= {"id": f"call_{index}x", "type": "function"}
        return chunk(tool_calls=[call])

    told = await run(
        server,
        part(1, name="g", arguments=""),
        part(0, name="f", arguments='{"city": "'),
        part(1, arguments='{"n"'),
        part(0, arguments='Zürich"}'),
        part(1, arguments=": 1}"),
        finish("tool_calls"),
        DONE,
    )
    assert told.done.tool_calls == [
        {"id": "call_0x", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}},
        {"id": "call_1x", "type": "function", "function": {"name": "g", "arguments": '{"n": 1}'}},
    ]
    assert told.done.warnings is None


async def test_non_finite_logprobs_become_null(server: ModelServer) -> None:
    raw = '{"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -Infinity}, {"logprob": NaN}]}}]}'  # fmt: skip  # noqa: E501
    told = await run(server, event(raw), finish(), DONE)
    assert told.done.logprobs == {"content": [{"token": "a", "logprob": None}, {"logprob": None}]}
    json.loads(told.done.model_dump_json(), parse_constant=lambda name: pytest.fail(name))


async def test_a_prompt_that_the_server_cut_is_flagged(server: ModelServer) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 40_000}], "max_tokens": 5}
    told = await run(server, chunk("a"), finish(), usage(2050, 1), DONE, params=long)
    assert told.done.warnings == ["prompt_probably_cut"]
    assert told.track.usage(ended_well=True).prompt_tokens == 2050
    told = await run(server, chunk("a"), finish(), usage(40_010, 1), DONE, params=long)
    assert told.done.warnings is None


# No proof, no success --------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], [chunk("one"), chunk(" two")]])
@pytest.mark.parametrize(
    "end",
    [
        [],
        [DONE],
        [usage(1, 2), DONE],
        [b'data: {"choices": [{"delta": {"content": "cut'],
        [event('{"choices": [{"delta": {"content": "x"}, "finish_reason": ""}]}')],
        [event('{"choices": [{"delta": {"content": "x"}, "finish_reason": 1}]}')],
        [event('{"broken": ')],
    ],
)
async def test_an_end_without_a_reason_is_truncation(
    server: ModelServer, before: list[bytes], end: list[bytes]
) -> None:
    told = await run(server, *before, *end)
    assert (told.failed.code, told.failed.retryable) == (Code.STREAM_TRUNCATED, True)
    assert (told.beat.text or "").startswith("one two" if before else "")


async def test_a_broken_connection(server: ModelServer) -> None:
    told = await run(server, *words("one two"), 0.05, RESET)
    assert told.failed.code is Code.STREAM_TRUNCATED
    assert told.beat.text == "one two"
    told = await run(server, 0.05, RESET)
    assert (told.failed.code, told.failed.refused) == (Code.UPSTREAM_UNAVAILABLE, False)
    server.script([RESET])
    assert (await go(server)).failed.code is Code.UPSTREAM_UNAVAILABLE
    short = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 5000\r\n\r\n"
    server.script([short, *words("one two")])
    assert (await go(server)).failed.code is Code.STREAM_TRUNCATED


async def test_after_the_reason_a_broken_connection_changes_nothing(server: ModelServer) -> None:
    told = await run(server, *words("one two"), finish(), 0.05, RESET)
    assert told.done.text == "one two"


DOWN = Code.UPSTREAM_UNAVAILABLE
ERRORS: list[tuple[bytes, Code, bool]] = [
    (event('{"error": {"message": "boom"}}'), DOWN, True),
    (event('{"error": {"message": "boom", "code": 400}}'), Code.INVALID_REQUEST, False),
    (event('{"error": {"message": "boom", "code": 429}}'), Code.RATE_LIMITED, True),
    (event('{"error": {"message": "boom", "code": 503}}'), DOWN, True),
    (b'event: error\ndata: {"message": "boom", "code": 503}\n\n', DOWN, True),
    (b"event: error\ndata: boom\n\n", DOWN, True),
    (b'{"error": {"message": "boom", "code": 500}}\n\n', DOWN, True),
    (b'{"error": {"message": "boom", "code": 500}}\n', DOWN, True),
    (b'{"error": {"message": "boom", "code": 500}}', DOWN, True),
    (b'{\n  "error": {\n    "message": "boom"\n  }\n}\n', DOWN, True),
    (b'error: {"message": "boom", "code": 503}\n\n', DOWN, True),
    (event('{"choices": [{"delta": {"content": ""}}], "error": {"message": "boom"}}'), DOWN, True),
    (event('{"choices": [{"finish_reason": "stop"}], "error": {"message": "boom"}}'), DOWN, True),
    (event('{"error": "boom"}'), DOWN, True),
    (event('{"object": "error", "message": "boom", "code": 401}'), Code.UPSTREAM_AUTH, False),
]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("error", "code", "retryable"), ERRORS)
async def test_an_error_inside_a_stream_is_never_success(
    server: ModelServer, before: int, error: bytes, code: Code, retryable: bool
) -> None:
    told = await run(server, *[chunk(f"w{n} ") for n in range(before)], error, finish(), DONE)
    assert (told.failed.code, told.failed.retryable) == (code, retryable)
    assert "boom" in told.failed.message
    assert told.beat.text == "".join(f"w{n} " for n in range(before))
    assert len(server.calls) == 1


async def test_an_error_after_the_reason_is_no_success(server: ModelServer) -> None:
    told = await run(server, chunk("a"), finish(), event('{"error": {"message": "boom"}}'), DONE)
    assert told.failed.code is Code.UPSTREAM_UNAVAILABLE


async def test_a_reason_that_says_error_is_no_success(server: ModelServer) -> None:
    told = await run(server, chunk("a"), finish("error"), DONE)
    assert told.failed.code is Code.UPSTREAM_UNAVAILABLE


# What is no event stream -----------------------------------------------------------------------------


WHOLE = {
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "all"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


async def test_a_whole_completion_is_accepted_with_a_reason(server: ModelServer) -> None:
    server.script(reply(200, json.dumps(WHOLE)))
    told = await go(server)
    assert (told.done.text, told.done.finish_reason) == ("all", "stop")
    assert told.track.usage(ended_well=True) == Usage(prompt_tokens=3, completion_tokens=1)
    without = {"choices": [{"message": {"content": "all"}}]}
    for body in (json.dumps(without), "{}", "[]", "not json", ""):
        server.script(reply(200, body))
        assert (await go(server)).failed.code is Code.STREAM_TRUNCATED
    server.script(reply(200, '{"error": {"message": "boom", "code": 400}}'))
    assert (await go(server)).failed.code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("status", "body", "kind", "code", "retryable"),
    [
        (502, "<html>bad gateway</html>", "text/html", Code.UPSTREAM_UNAVAILABLE, True),
        (200, "<html>log in</html>", "text/html; charset=utf-8", Code.UPSTREAM_UNAVAILABLE, True),
        (200, "<html>log in</html>", None, Code.UPSTREAM_UNAVAILABLE, True),
        (200, "<html>log in</html>", "text/event-stream", Code.UPSTREAM_UNAVAILABLE, True),
        (200, "", "text/event-stream", Code.STREAM_TRUNCATED, True),
        (200, "", None, Code.STREAM_TRUNCATED, True),
        (200, "just text", "text/plain", Code.STREAM_TRUNCATED, True),
        (204, "", None, Code.STREAM_TRUNCATED, True),
        (307, "", None, Code.UPSTREAM_UNAVAILABLE, True),
    ],
)
async def test_what_is_no_stream_is_named(
    server: ModelServer, status: int, body: str, kind: str | None, code: Code, retryable: bool
) -> None:
    server.script(reply(status, body, kind, Location=server.base_url + "/elsewhere"))
    told = await go(server, api_key=None)
    assert (told.failed.code, told.failed.retryable) == (code, retryable)
    if "<html>" in body:
        assert "page" in told.failed.message
    assert len(server.calls) == 1


async def test_a_stream_without_a_content_type_is_read(server: ModelServer) -> None:
    server.script(stream(PLAIN, content_type=None))
    assert (await go(server)).done.text == TEXT
    server.script(stream(PLAIN, content_type="text/plain"))
    assert (await go(server)).done.text == TEXT


async def test_a_redirect_is_not_followed_with_credentials(server: ModelServer) -> None:
    async with ModelServer() as other:
        server.script(reply(307, "", None, Location=other.base_url + "/chat/completions"))
        told = await go(server, api_key="sk-canary-000001")
        assert "base_url" in told.failed.message
        assert other.calls == []


# Compression -----------------------------------------------------------------------------------------


async def test_a_compressed_stream_is_read(server: ModelServer) -> None:
    packer = zlib.compressobj(wbits=31)
    steps = (chunk("déjà"), chunk(" vu"), finish(), DONE)
    pieces = [packer.compress(step) + packer.flush(zlib.Z_SYNC_FLUSH) for step in steps]
    whole = b"".join([*pieces, packer.flush()])
    server.script(stream(*pieces, Content_Encoding="gzip"))
    assert (await go(server)).done.text == "déjà vu"
    assert server.calls[0].headers["accept-encoding"] == "identity"
    server.script(stream(*[whole[at : at + 1] for at in range(len(whole))], Content_Encoding="gzip"))
    assert (await go(server)).done.text == "déjà vu"
    server.script(stream(gzip.compress(PLAIN[:90]) + gzip.compress(PLAIN[90:]), Content_Encoding="gzip"))
    assert (await go(server)).done.text == TEXT
    server.script(stream(zlib.compress(PLAIN), Content_Encoding="deflate"))
    assert (await go(server)).done.text == TEXT


async def test_broken_compression_is_a_failed_attempt(server: ModelServer) -> None:
    packed = gzip.compress(b"".join(words("one two three four")) + finish() + DONE)
    server.script(stream(packed[: len(packed) // 2] + b"\x00garbage" * 9, Content_Encoding="gzip"))
    assert (await go(server)).failed.code is Code.STREAM_TRUNCATED
    server.script(stream(PLAIN, Content_Encoding="br"))
    assert (await go(server)).failed.code is Code.STREAM_TRUNCATED


# The request -----------------------------------------------------------------------------------------


async def test_what_is_sent(server: ModelServer) -> None:
    params = {**HELLO, "temperature": 0.5, "stream": False, "stream_options": {"x": 1}, "model": "evil"}
    await run(
        server,
        PLAIN,
        params=params,
        served_model="real",
        api_key="sk-secret-123",
        extra_body={"cache_salt": "s", "stream_options": {"continuous_usage_stats": True}},
    )
    call = server.calls[0]
    assert (call.method, call.path) == ("POST", "/v1/chat/completions")
    assert call.headers["authorization"] == "Bearer sk-secret-123"
    assert call.headers["accept"] == "text/event-stream"
    assert call.body == {
        **HELLO,
        "temperature": 0.5,
        "model": "real",
        "stream": True,
        "stream_options": {"x": 1, "include_usage": True, "continuous_usage_stats": True},
        "cache_salt": "s",
    }


async def test_the_limit_of_tokens(server: ModelServer) -> None:
    await run(server, PLAIN, params={"messages": []}, default_max_tokens=77)
    assert server.calls[-1].body["max_tokens"] == 77
    await run(server, PLAIN, params={"max_tokens": 500}, max_tokens=100)
    assert server.calls[-1].body["max_tokens"] == 100
    await run(server, PLAIN, params={"max_completion_tokens": 50})
    assert "max_tokens" not in server.calls[-1].body
    assert server.calls[-1].body["max_completion_tokens"] == 50
