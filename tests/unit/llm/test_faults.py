"""The table of faults is total, and each fault has the right name and verdict."""

from __future__ import annotations

import inspect
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from perdure.llm.chunks import UpstreamError
from perdure.llm.faults import fault_of_error, fault_of_exception, fault_of_status
from perdure.observability.redact import protect
from perdure.task.errors import RETRYABLE, TaskFault
from perdure.task.errors import ErrorCode as Code

HTTPX_ERRORS = sorted(
    (kind for _, kind in inspect.getmembers(httpx, inspect.isclass) if issubclass(kind, Exception)),
    key=lambda kind: kind.__name__,
)


def make(kind: type[Exception]) -> Exception:
    if kind is httpx.HTTPStatusError:
        request = httpx.Request("GET", "http://x")
        return httpx.HTTPStatusError("m", request=request, response=httpx.Response(500, request=request))
    needs_nothing = {httpx.StreamConsumed, httpx.StreamClosed, httpx.ResponseNotRead, httpx.RequestNotRead}
    return kind() if kind in needs_nothing else kind("canary-text")


def status(number: int, body: bytes = b"", **headers: str) -> TaskFault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return fault_of_status(number, httpx.Headers(named), body)


def test_there_are_httpx_errors_to_cover() -> None:
    assert len(HTTPX_ERRORS) >= 27


@pytest.mark.parametrize("kind", HTTPX_ERRORS)
@pytest.mark.parametrize("output", [False, True])
def test_every_httpx_exception_has_a_verdict_of_its_own(kind: type[Exception], output: bool) -> None:
    fault = fault_of_exception(make(kind), output=output)
    assert kind.__name__ in fault.message  # found in the table, not the fall-back for strangers
    assert "unexpected" not in fault.message
    assert "canary-text" not in fault.message
    assert fault.retry_after is None
    assert not (output and fault.refused and kind is not httpx.ConnectError and kind is not httpx.ProxyError)


@pytest.mark.parametrize(
    ("kind", "before", "after", "refused"),
    [
        (httpx.ConnectTimeout, Code.CONNECT_TIMEOUT, Code.CONNECT_TIMEOUT, False),
        (httpx.ConnectError, Code.UPSTREAM_UNAVAILABLE, Code.UPSTREAM_UNAVAILABLE, True),
        (httpx.ReadTimeout, Code.FIRST_TOKEN_TIMEOUT, Code.TOKEN_TIMEOUT, False),
        (httpx.ReadError, Code.UPSTREAM_UNAVAILABLE, Code.STREAM_TRUNCATED, False),
        (httpx.RemoteProtocolError, Code.UPSTREAM_UNAVAILABLE, Code.STREAM_TRUNCATED, False),
        (httpx.DecodingError, Code.STREAM_TRUNCATED, Code.STREAM_TRUNCATED, False),
        (httpx.UnsupportedProtocol, Code.MODEL_UNKNOWN, Code.MODEL_UNKNOWN, False),
        (httpx.LocalProtocolError, Code.INTERNAL, Code.INTERNAL, False),
    ],
)
def test_exceptions_by_name(kind: type[Exception], before: Code, after: Code, refused: bool) -> None:
    first, later = (fault_of_exception(make(kind), output=output) for output in (False, True))
    assert (first.code, later.code, first.refused) == (before, after, refused)


def test_a_stranger_is_internal_and_says_nothing_of_its_text() -> None:
    fault = fault_of_exception(ZeroDivisionError("the prompt"), output=False)
    assert fault.code is Code.INTERNAL
    assert "the prompt" not in fault.message


@pytest.mark.parametrize("number", range(100, 600))
def test_every_status_has_a_verdict(number: int) -> None:
    fault = status(number)
    assert f"status {number}" in fault.message
    assert fault.refused == (number in (502, 503, 504, 529))
    if number >= 500:
        assert fault.retryable


@pytest.mark.parametrize("number", [400, 401, 403, 404, 405, 410, 413, 415, 422, 431])
def test_permanent_statuses(number: int) -> None:
    assert not status(number).retryable


@pytest.mark.parametrize("number", [408, 409, 424, 425, 429, 500, 502, 503, 504, 529])
def test_transient_statuses(number: int) -> None:
    assert status(number).retryable


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (400, Code.INVALID_REQUEST),
        (401, Code.UPSTREAM_AUTH),
        (403, Code.UPSTREAM_AUTH),
        (404, Code.MODEL_UNKNOWN),
        (413, Code.CONTEXT_LENGTH_EXCEEDED),
        (422, Code.INVALID_REQUEST),
        (429, Code.RATE_LIMITED),
        (500, Code.UPSTREAM_UNAVAILABLE),
        (503, Code.UPSTREAM_UNAVAILABLE),
        (204, Code.STREAM_TRUNCATED),
        (307, Code.UPSTREAM_UNAVAILABLE),
    ],
)
def test_codes_of_statuses(number: int, code: Code) -> None:
    assert status(number).code is code


def test_a_redirect_that_is_permanent_is_not_tried_again() -> None:
    assert status(307).retryable
    assert not status(308).retryable
    assert "base_url" in status(301).message


LONG = Code.CONTEXT_LENGTH_EXCEEDED
DOWN = Code.UPSTREAM_UNAVAILABLE


@pytest.mark.parametrize(
    ("number", "error", "code", "retryable"),
    [
        (400, {"code": "context_length_exceeded"}, LONG, False),
        (400, {"code": 400, "type": "exceed_context_size_error"}, LONG, False),
        (400, {"message": "This model's maximum context length is 8192 tokens"}, LONG, False),
        (400, {"message": "The prompt is too long"}, LONG, False),
        (500, {"message": "request exceeds the available context size"}, LONG, False),
        (422, {"message": "inputs must be a string", "type": "validation"}, Code.INVALID_REQUEST, False),
        (400, {"code": "content_filter"}, Code.CONTENT_FILTERED, False),
        (429, {"code": "insufficient_quota"}, Code.RATE_LIMITED, False),
        (429, {"code": "rate_limit_exceeded"}, Code.RATE_LIMITED, True),
        (400, {"code": "model_not_found"}, Code.MODEL_UNKNOWN, False),
        (500, {"message": "CUDA out of memory"}, DOWN, True),
        (503, {"code": 503, "message": "Loading model", "type": "unavailable_error"}, DOWN, True),
    ],
)
def test_bodies_are_more_exact_than_statuses(
    number: int, error: dict[str, Any], code: Code, retryable: bool
) -> None:
    for body in ({"error": error}, {"object": "error", "message": "m", **error}):
        fault = status(number, json.dumps(body).encode())
        assert (fault.code, fault.retryable) == (code, retryable)


def test_a_web_page_is_named() -> None:
    assert "HTML" in status(502, b"<html><h1>Bad gateway</h1></html>").message


@pytest.mark.parametrize(
    ("error", "code", "retryable", "refused"),
    [
        (UpstreamError("m", 400), Code.INVALID_REQUEST, False, False),
        (UpstreamError("m", 401), Code.UPSTREAM_AUTH, False, False),
        (UpstreamError("m", 429), Code.RATE_LIMITED, True, False),
        (UpstreamError("m", 500), Code.UPSTREAM_UNAVAILABLE, True, False),
        (UpstreamError("m", 503), Code.UPSTREAM_UNAVAILABLE, True, True),
        (UpstreamError("m"), Code.UPSTREAM_UNAVAILABLE, True, False),
        (UpstreamError("m", None, ("rate_limit_error",)), Code.RATE_LIMITED, True, False),
        (UpstreamError("m", None, ("overloaded_error",)), Code.UPSTREAM_UNAVAILABLE, True, True),
        (UpstreamError("m", None, ("invalid_request_error",)), Code.INVALID_REQUEST, False, False),
        (UpstreamError("context length exceeded"), Code.CONTEXT_LENGTH_EXCEEDED, False, False),
        (UpstreamError("m", None, ("html",)), Code.UPSTREAM_UNAVAILABLE, True, False),
    ],
)
def test_errors_inside_a_stream(error: UpstreamError, code: Code, retryable: bool, refused: bool) -> None:
    before, after = (fault_of_error(error, output=output) for output in (False, True))
    assert (before.code, before.retryable, before.refused) == (code, retryable, refused)
    assert (after.code, after.retryable, after.refused) == (code, retryable, False)


def test_delays() -> None:
    now = datetime.now(UTC)
    date = format_datetime(now + timedelta(seconds=30), usegmt=True)
    assert status(429, retry_after="3").retry_after == 3.0
    assert status(503, retry_after=date, date=format_datetime(now, usegmt=True)).retry_after == 30.0
    assert status(429, retry_after="nan").retry_after is None
    assert status(429, retry_after_ms="1500", retry_after="1").retry_after == 1.5
    both = httpx.Headers([("retry-after", "3"), ("retry-after", "5")])
    assert fault_of_status(429, both, b"").retry_after == 5.0


def test_the_server_may_say_whether_to_try_again() -> None:
    assert status(400, x_should_retry="true").retryable
    assert not status(503, x_should_retry="false").retryable
    assert status(503, x_should_retry="maybe").retryable


def test_codes_keep_their_verdict_where_nothing_overrides_it() -> None:
    for number in (400, 401, 404, 429, 500, 503):
        fault = status(number)
        assert fault.retryable == RETRYABLE[fault.code]


def test_messages_are_bounded_clean_and_free_of_secrets() -> None:
    protect("sk-canary-0123456789")
    body = b'{"error": {"message": "bad key sk-canary-0123456789\\u0000\\nsecond line ' + b"x" * 5000 + b'"}}'
    message = status(401, body).message
    assert "canary" not in message
    assert "\n" not in message
    assert "\x00" not in message
    assert len(message) < 600


def test_the_prompt_is_never_repeated() -> None:
    prompt = "The quick brown fox has a secret that nobody may know."
    body = ('{"error": {"message": "cannot parse: ' + prompt + ' (at 3)"}}').encode()
    message = fault_of_status(400, httpx.Headers(), body, hide=[prompt]).message
    assert "quick" not in message
    assert "secret" not in message
    assert "cannot parse" in message
