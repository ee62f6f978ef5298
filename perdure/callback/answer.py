"""What a try means: the table of statuses and faults. Pure.

answer = judge_status(status, headers, now)         the receiver answered
answer = judge_fault(error)                         it did not
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

import httpx

from perdure.callback.guard import CallbackRejected
from perdure.callback.schedule import parse_retry_after
from perdure.callback.transport import AnswerTooLarge, NameNotFound
from perdure.task.text import one_line

SAMPLE_CHARS: Final = 1000
ABORT_HEADER: Final = "webhook-delivery"  # a receiver's wish: `abort-message` ends the tries
Verdict = Literal["delivered", "failed", "dead"]
Outcome = Literal["success", "http_error", "timeout", "connect_error", "blocked", "error"]


@dataclass(frozen=True)
class Answer:
    """How one try went.

    `verdict`: delivered, failed (the schedule goes on) or dead (no further try). `outcome` is the metric's
    label. `error` is one line for the owner; it holds no secret and no looked-up address. `retry_after` in
    seconds. `address` is the peer's, `sample` a bounded, escaped piece of the answer.
    """

    verdict: Verdict
    outcome: Outcome
    status: int | None = None
    error: str | None = None
    retry_after: float | None = None
    address: str | None = None
    sample: str | None = None
    duration_ms: int = 0


def judge_status(status: int, headers: Mapping[str, str], now: datetime) -> Answer:
    """The status line decides; the body never does. `headers` with case-blind look-up."""
    if 200 <= status < 300:
        return Answer("delivered", "success", status)
    if headers.get(ABORT_HEADER, "").strip().lower() == "abort-message":
        return Answer("dead", "http_error", status, f"the receiver answered {status} and asked for no more")
    if status == 410:
        return Answer("dead", "http_error", status, "the receiver answered 410: gone for good")
    error = f"the receiver answered {status}"
    if 300 <= status < 400:
        error += "; redirects are not followed, so give the final URL as callback_url"
    wait = parse_retry_after(headers.get("retry-after"), now)
    return Answer("failed", "http_error", status, error, wait)


def judge_fault(error: BaseException) -> Answer:
    """A try that brought no status. Anything unknown is a failed try, never a crash of the sender."""
    if isinstance(error, CallbackRejected):
        return Answer("dead", "blocked", error=f"{error.code}: {error.message}")
    chain = list(_chain(error))
    if any(isinstance(one, TimeoutError | httpx.TimeoutException) for one in chain):
        connecting = any(isinstance(one, httpx.ConnectTimeout) for one in chain)
        what = "no connection in time" if connecting else "no answer in time"
        return Answer("failed", "timeout", error=what)
    tls = next((one for one in chain if isinstance(one, ssl.SSLError)), None)
    if tls is not None:
        return Answer("failed", "connect_error", error=f"TLS: {_tls_reason(tls)}")
    if any(isinstance(one, NameNotFound) for one in chain):
        return Answer("failed", "connect_error", error="the host's name has no address")
    if any(isinstance(one, ConnectionRefusedError) for one in chain):
        return Answer("failed", "connect_error", error="connection refused")
    if isinstance(error, httpx.ConnectError):
        return Answer("failed", "connect_error", error="no connection")
    if isinstance(error, AnswerTooLarge):
        return Answer("failed", "error", error="the answer's headers are too large")
    if isinstance(error, httpx.RemoteProtocolError):
        return Answer("failed", "error", error="the answer is no HTTP, or the connection ended before it")
    if isinstance(error, httpx.NetworkError):
        return Answer("failed", "error", error="the connection broke before the answer")
    return Answer("failed", "error", error=f"the try failed ({type(error).__name__})")


def sample_of(data: bytes, hidden: list[str]) -> str | None:
    """A piece of an answer that is safe to store and to show: controls escaped, SAMPLE_CHARS at most.

    `hidden` values (our own signatures, should a receiver echo them) are taken out. None when empty.
    """
    text = data.decode("utf-8", "replace")
    for value in hidden:
        text = text.replace(value, "[signature]")
    shown = [
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text[:SAMPLE_CHARS]
    ]
    return "".join(shown)[:SAMPLE_CHARS] or None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return one_line(error.verify_message, 200)
    return one_line((error.reason or "the handshake failed").replace("_", " ").lower(), 200)
