"""Every fault of a model server -> one code, one verdict, one delay. The only place that decides it.

    fault_of_exception(error, output=...)      an httpx exception (total over its classes)
    fault_of_status(status, headers, body)     an HTTP status (total over 100-599)
    fault_of_error(error, output=...)          an error object inside a stream or a body

`output` says whether the server had already produced something: the same break is a refusal before and a
truncation after. What a body says of its error outranks the status where it is more exact (context length,
content filter, quota, unknown model, credentials), and `x-should-retry` outranks both. docs/models.md shows
the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import httpx

from perdure.llm.chunks import NotJsonError, UpstreamError, find_error, parse_json
from perdure.llm.quote import QUOTE_LIMIT, quoted
from perdure.llm.retry_after import http_date, parse_retry_after, parse_retry_after_ms
from perdure.task.errors import ErrorCode as Code
from perdure.task.errors import TaskFault
from perdure.task.text import one_line


@dataclass(frozen=True, slots=True)
class Verdict:
    """`says` starts the message. `retryable` None: as the code's. `refused`: nothing was begun."""

    code: Code
    says: str
    retryable: bool | None = None
    refused: bool = False


_UNREACHED: Final = Verdict(
    Code.UPSTREAM_UNAVAILABLE,
    "the model server cannot be reached; check that it runs and that the model's base_url is right",
    refused=True,
)
_BROKE: Final = Verdict(Code.UPSTREAM_UNAVAILABLE, "the model server closed the connection before any output")
_CUT: Final = Verdict(
    Code.STREAM_TRUNCATED, "the connection to the model server broke in the middle of the answer"
)
_CONNECT_TIMEOUT: Final = Verdict(
    Code.CONNECT_TIMEOUT, "the model server did not accept a connection within connect_timeout"
)
_FIRST_TOKEN: Final = Verdict(
    Code.FIRST_TOKEN_TIMEOUT, "the model server sent no output within first_token_timeout"
)
_TOKEN: Final = Verdict(Code.TOKEN_TIMEOUT, "the model server sent no further output within token_timeout")
_BAD_URL: Final = Verdict(
    Code.MODEL_UNKNOWN, "the model's base_url is no HTTP address; mend it in models.toml"
)
_OURS: Final = Verdict(Code.INTERNAL, "the request could not be made", retryable=False)
_ENCODING: Final = Verdict(Code.STREAM_TRUNCATED, "the model server's answer cannot be decoded")
_UNKNOWN_BREAK: Final = Verdict(Code.UPSTREAM_UNAVAILABLE, "talking to the model server failed")

# The most exact class counts: (before any output, after it).
_EXCEPTIONS: Final[dict[type[Exception], tuple[Verdict, Verdict]]] = {
    httpx.ConnectTimeout: (_CONNECT_TIMEOUT, _CONNECT_TIMEOUT),
    httpx.PoolTimeout: (_CONNECT_TIMEOUT, _CONNECT_TIMEOUT),
    httpx.ReadTimeout: (_FIRST_TOKEN, _TOKEN),
    httpx.WriteTimeout: (_FIRST_TOKEN, _TOKEN),
    httpx.TimeoutException: (_FIRST_TOKEN, _TOKEN),
    httpx.ConnectError: (_UNREACHED, _UNREACHED),
    httpx.ProxyError: (_UNREACHED, _UNREACHED),
    httpx.ReadError: (_BROKE, _CUT),
    httpx.WriteError: (_BROKE, _CUT),
    httpx.CloseError: (_BROKE, _CUT),
    httpx.NetworkError: (_BROKE, _CUT),
    httpx.RemoteProtocolError: (_BROKE, _CUT),
    httpx.ProtocolError: (_BROKE, _CUT),
    httpx.LocalProtocolError: (_OURS, _OURS),
    httpx.UnsupportedProtocol: (_BAD_URL, _BAD_URL),
    httpx.InvalidURL: (_BAD_URL, _BAD_URL),
    httpx.DecodingError: (_ENCODING, _ENCODING),
    httpx.TooManyRedirects: (_OURS, _OURS),
    httpx.CookieConflict: (_OURS, _OURS),
    httpx.StreamError: (_OURS, _OURS),
    httpx.TransportError: (_UNKNOWN_BREAK, _CUT),
    httpx.HTTPError: (_UNKNOWN_BREAK, _CUT),
    OSError: (_BROKE, _CUT),  # what slips through httpx: TLS trouble in mid-stream
}

_NO_STREAM: Final = Verdict(Code.STREAM_TRUNCATED, "the model server answered without a stream")
_REDIRECT: Final = Verdict(
    Code.UPSTREAM_UNAVAILABLE,
    "the model server redirects elsewhere, which is not followed; set base_url to the final address",
)
_BAD_REQUEST: Final = Verdict(Code.INVALID_REQUEST, "the model server refused the request; check params")
_AUTH: Final = Verdict(
    Code.UPSTREAM_AUTH,
    "the model server refused our credentials; an operator must check the model's api_key_env",
)
_NO_MODEL: Final = Verdict(
    Code.MODEL_UNKNOWN,
    "the model server does not know this model or path; an operator must check served_model and base_url",
)
_TOO_LONG: Final = Verdict(
    Code.CONTEXT_LENGTH_EXCEEDED,
    "the prompt and max_tokens do not fit into the model's context; shorten the prompt or lower max_tokens",
)
_FILTERED: Final = Verdict(Code.CONTENT_FILTERED, "the model server's content filter refused the request")
_QUOTA: Final = Verdict(
    Code.RATE_LIMITED, "the account's quota at the model server is used up", retryable=False
)
_RATE: Final = Verdict(Code.RATE_LIMITED, "the model server limits the rate of requests")
_FAILED: Final = Verdict(Code.UPSTREAM_UNAVAILABLE, "the model server failed")
_DOWN: Final = Verdict(
    Code.UPSTREAM_UNAVAILABLE, "the model server is not ready (starting, overloaded or down)", refused=True
)
_HTML: Final = Verdict(
    Code.UPSTREAM_UNAVAILABLE, "a web page answered in place of the model server (a gateway's, by its look)"
)

_FAMILIES: Final = {1: _NO_STREAM, 2: _NO_STREAM, 3: _REDIRECT, 4: _BAD_REQUEST, 5: _FAILED}
_STATUSES: Final[dict[int, Verdict]] = {
    401: _AUTH,
    402: _QUOTA,
    403: _AUTH,
    404: _NO_MODEL,
    405: _NO_MODEL,
    407: _AUTH,
    408: _FAILED,
    409: _FAILED,
    410: _NO_MODEL,
    413: _TOO_LONG,
    424: _FAILED,  # TGI's word for a generation that failed
    425: _FAILED,
    429: _RATE,
    499: _FAILED,
    502: _DOWN,
    503: _DOWN,
    504: _DOWN,
    529: _DOWN,
}

# Words of error objects that are more exact than a status ...
_EXACT: Final[tuple[tuple[frozenset[str], Verdict], ...]] = (
    (
        frozenset({"context_length_exceeded", "exceed_context_size_error", "string_above_max_length"}),
        _TOO_LONG,
    ),
    (frozenset({"content_filter", "content_policy_violation", "responsibleaipolicyviolation"}), _FILTERED),
    (frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"}), _QUOTA),
    (frozenset({"model_not_found"}), _NO_MODEL),
    (frozenset({"invalid_api_key", "authentication_error", "permission_error"}), _AUTH),
    (frozenset({"html"}), _HTML),
)
# ... and words that stand in for a missing one.
_LOOSE: Final[tuple[tuple[frozenset[str], Verdict], ...]] = (
    (frozenset({"rate_limit_exceeded", "rate_limit_error", "requests", "tokens"}), _RATE),
    (frozenset({"notfounderror", "not_found_error"}), _NO_MODEL),
    (frozenset({"overloaded_error", "overloaded", "unavailable_error", "service_unavailable"}), _DOWN),
    (
        frozenset(
            {"invalid_request_error", "badrequesterror", "bad_request", "validation", "invalid_argument"}
        ),
        _BAD_REQUEST,
    ),
)
_CONTEXT: Final = re.compile(
    r"maximum context length|context (?:length|window|size)|prompt is too long|too many (?:input )?tokens"
    r"|(?:input|prompt)\b.{0,40}\b(?:too long|longer than|exceeds)|reduce the length",
    re.IGNORECASE,
)
_CONTEXT_STATUSES: Final = frozenset({None, 400, 413, 422, 500})


def fault_of_exception(error: Exception, *, output: bool) -> TaskFault:
    """The fault of an exception of httpx or of the socket; any other exception is `internal`."""
    for kind in type(error).__mro__:
        if kind in _EXCEPTIONS:
            verdict = _EXCEPTIONS[kind][output]
            return _fault(verdict, f"{type(error).__name__}")
    return TaskFault(Code.INTERNAL, f"an unexpected {type(error).__name__}; the worker's log has more")


def fault_of_status(
    status: int, headers: httpx.Headers, body: bytes, *, hide: Sequence[str] = ()
) -> TaskFault:
    """The fault of an answer's status line, with what its headers and (the start of) its body say."""
    error = _error_in(body)
    verdict = _STATUSES.get(status) or _FAMILIES[status // 100]
    if status in (300, 301, 304, 305, 306, 308):
        verdict = replace(verdict, retryable=False)  # it will say the same tomorrow
    if error is not None and (exact := _exact(error, status)):
        verdict = exact
    should = headers.get("x-should-retry", "").strip().lower()
    if should in ("true", "false"):
        verdict = replace(verdict, retryable=should == "true")
    says = quoted(error.message, hide) if error else "an HTML page" if _is_html(body) else ""
    return _fault(verdict, f"status {status}" + (f", {says}" if says else ""), retry_after=_wait(headers))


def fault_of_error(error: UpstreamError, *, output: bool, hide: Sequence[str] = ()) -> TaskFault:
    """The fault of an error object that came in place of output."""
    verdict = _exact(error, error.status) or _by_status(error) or _by_words(error.words, _LOOSE) or _FAILED
    if output:
        verdict = replace(verdict, refused=False)
    return _fault(verdict, quoted(error.message, hide))


def html_fault() -> TaskFault:
    """A web page with status 200."""
    return _fault(_HTML, "")


def encoding_fault(reason: str) -> TaskFault:
    """A body in an encoding that is unknown or broken."""
    return _fault(_ENCODING, one_line(reason, QUOTE_LIMIT))


def timeout_fault(*, output: bool, seconds: float) -> TaskFault:
    """Our own watch over real output: none came in time."""
    return _fault(_TOKEN if output else _FIRST_TOKEN, f"{seconds:g} s")


def truncated_fault(output: bool) -> TaskFault:
    """The stream ended without a finish_reason."""
    when = "in the middle of the answer" if output else "before any output"
    return TaskFault(
        Code.STREAM_TRUNCATED, f"the model server's stream ended {when}, without a finish_reason"
    )


def _fault(verdict: Verdict, detail: str, retry_after: float | None = None) -> TaskFault:
    message = f"{verdict.says} ({detail})" if detail else verdict.says
    return TaskFault(
        verdict.code,
        message,
        retry_after=retry_after,
        refused=verdict.refused,
        retryable=verdict.retryable,
    )


def _by_status(error: UpstreamError) -> Verdict | None:
    if error.status is None:
        return None
    return _STATUSES.get(error.status) or _FAMILIES[error.status // 100]


def _by_words(words: Sequence[str], table: tuple[tuple[frozenset[str], Verdict], ...]) -> Verdict | None:
    said = {word.lower() for word in words}
    return next((verdict for known, verdict in table if known & said), None)


def _exact(error: UpstreamError, status: int | None) -> Verdict | None:
    if verdict := _by_words(error.words, _EXACT):
        return verdict
    if status in _CONTEXT_STATUSES and _CONTEXT.search(error.message):
        return _TOO_LONG
    return None


def _error_in(body: bytes) -> UpstreamError | None:
    try:
        return find_error(parse_json(body.strip()))
    except NotJsonError:
        return None


def _is_html(body: bytes) -> bool:
    return body.lstrip()[:1] == b"<"


def _wait(headers: httpx.Headers) -> float | None:
    now = http_date(headers.get("date", "")) or datetime.now(UTC)
    waits = (
        parse_retry_after(headers.get_list("retry-after"), now),
        parse_retry_after_ms(headers.get_list("retry-after-ms")),
    )
    return max((wait for wait in waits if wait is not None), default=None)
