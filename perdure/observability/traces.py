"""Traces: one trace from the request to the last callback try, on when an OTLP endpoint is set.

    start_tracing("api")                          a composition root; does nothing without an endpoint
    with span("attempt 1", parent=traceparent) as one: one.set("perdure.pool", "local")
    headers = {"traceparent": current_traceparent()}
    stop_tracing()                                flushes, five seconds at most

A trace crosses processes as a W3C `traceparent` in the task's row and in Temporal inputs, so workflow code
holds no tracing and replays alike. The task's own span has an id made from the task id: attempts name it
as their parent before anybody has written it, and `record_task` writes it when the outcome is committed.
With tracing off a caller's `traceparent` still travels to the model server, the receiver and the logs.
Spans hold no prompt, no output and no secret.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from perdure.contracts import AttemptRecord
from perdure.observability import logs
from perdure.observability.redact import protect, redact
from perdure.task.errors import TaskFault
from perdure.task.text import one_line

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Kind = Literal["internal", "server", "client"]
Value = str | bool | int | float | Sequence[str]

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\Z")

_current: ContextVar[str | None] = ContextVar("traceparent", default=None)


@dataclass
class _Tracing:
    """The exporter of this process. One per process, as logging is."""

    provider: TracerProvider
    tracer: Tracer
    ids: Any


_tracing: _Tracing | None = None


def valid_traceparent(text: str | None) -> str | None:
    """The text if it is a W3C traceparent of version 00 with non-zero ids, else None."""
    found = _TRACEPARENT.match(text or "")
    return text if found and int(found[1], 16) and int(found[2], 16) else None


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace's id, for a log line that is written outside its spans."""
    return traceparent[3:35] if valid_traceparent(traceparent) and traceparent else None


def current_traceparent() -> str | None:
    """What to hand on (header, row, Temporal input): the innermost open span, or the caller's own."""
    return _current.get()


def task_traceparent(traceparent: str | None, task_id: str) -> str | None:
    """The task's own span in the submit's trace; the parent of its attempts, commit and callbacks. Pure."""
    found = _TRACEPARENT.match(traceparent or "")
    return f"00-{found[1]}-{_task_span_id(task_id)}-{found[3]}" if found else None


def _task_span_id(task_id: str) -> str:
    return hashlib.sha256(task_id.encode()).hexdigest()[:15] + "1"  # never all zero


def start_tracing(process: str) -> bool:
    """Starts the exporter if OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) is set; whether it runs.

    `process` names the service (`perdure-api`) where OTEL_SERVICE_NAME does not.
    """
    global _tracing
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    if not named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or _tracing is not None:
        return _tracing is not None
    # Imported here: the SDK costs 15 MB that a worker without tracing need not hold.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from perdure.observability._span_ids import SpanIds

    for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","):
        protect(pair.partition("=")[2].strip())
    service = os.environ.get("OTEL_SERVICE_NAME") or "perdure-" + process.split(":", 1)[0]
    ids = SpanIds()
    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": service, "service.instance.id": f"{process}:{os.getpid()}"}
        ),
        id_generator=ids,
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracing = _Tracing(provider, provider.get_tracer("perdure"), ids)
    return True


def stop_tracing(seconds: float = 5.0) -> None:
    """Sends what waits and stops. Blocks for `seconds` at most; call it last, off the event loop."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        # The exporter retries a dead collector for longer than its own time-outs say; exit must not wait.
        closing = threading.Thread(target=tracing.provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(seconds)


class SpanHandle:
    """An open span, or nothing at all when tracing is off; the calls are the same."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def set(self, name: str, value: Value | None) -> None:
        """Sets an attribute; None sets nothing. Text is redacted."""
        if self._span is not None and value is not None:
            self._span.set_attribute(name, redact(value) if isinstance(value, str) else value)

    def rename(self, name: str) -> None:
        """Names the span once more is known (the route of a request)."""
        if self._span is not None:
            self._span.update_name(name)

    def fail(self, kind: str, message: str = "") -> None:
        """Marks the span as failed: `kind` is a stable word (an error code, a class name)."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR, one_line(redact(message)) or kind))


@contextmanager
def span(
    name: str,
    *,
    parent: str | None = None,
    kind: Kind = "internal",
    attributes: Mapping[str, Value | None] | None = None,
) -> Iterator[SpanHandle]:
    """A span around a block, child of `parent` (a traceparent) or of the innermost open one.

    Inside, `current_traceparent()` names it and log lines carry its trace_id. An exception marks it failed
    and goes on. Off, it only carries `parent` along.
    """
    above = valid_traceparent(parent) or _current.get()
    tracing = _tracing
    opened = _open(tracing, name, above, kind, attributes or {}) if tracing else None
    handle = SpanHandle(opened)
    with _carrying(_traceparent_of(opened) if opened is not None else above):
        try:
            yield handle
        except TaskFault as fault:
            handle.fail(fault.code, fault.message)
            raise
        except Exception as error:
            handle.fail(type(error).__name__, str(error))
            raise
        finally:
            if opened is not None:
                opened.end()


@contextmanager
def _carrying(traceparent: str | None) -> Iterator[None]:
    """Makes `traceparent` the current one, for callees and for log lines."""
    if traceparent is None:
        yield
        return
    token = _current.set(traceparent)
    try:
        with logs.bind(trace_id=traceparent[3:35]):
            yield
    finally:
        _current.reset(token)


def record_task(
    traceparent: str | None,
    task_id: str,
    *,
    start: datetime,
    end: datetime,
    status: str,
    error_code: str | None = None,
    attempts: Sequence[AttemptRecord] = (),
    attributes: Mapping[str, Value | None] | None = None,
) -> None:
    """Writes the task's own span after the fact, and one for each attempt whose worker died with its span.

    Called once, by whoever committed the outcome. Without tracing or a traceparent it does nothing.
    """
    tracing, submit = _tracing, valid_traceparent(traceparent)
    if tracing is None or submit is None:
        return
    with tracing.ids.forced(int(_task_span_id(task_id), 16)):
        one = _open(tracing, "task", submit, "internal", attributes or {}, start=start)
    handle = SpanHandle(one)
    handle.set("perdure.task.id", task_id)
    handle.set("perdure.task.status", status)
    if error_code is not None:
        handle.fail(error_code)
    one.end(_nanoseconds(end))
    for attempt in attempts:
        if attempt.outcome == "lost" and attempt.started_at is not None:
            lost = _open(
                tracing,
                f"attempt {attempt.number}",
                task_traceparent(submit, task_id),
                "internal",
                {"perdure.attempt.outcome": "lost", "perdure.worker": attempt.worker},
                start=attempt.started_at,
            )
            SpanHandle(lost).fail(attempt.error_code or "worker_lost")
            lost.end(_nanoseconds(attempt.ended_at or end))


def _open(
    tracing: _Tracing,
    name: str,
    parent: str | None,
    kind: Kind,
    attributes: Mapping[str, Value | None],
    start: datetime | None = None,
) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

    context = Context()
    found = _TRACEPARENT.match(parent or "")
    if found:
        above = SpanContext(int(found[1], 16), int(found[2], 16), True, TraceFlags(int(found[3], 16)))
        context = set_span_in_context(NonRecordingSpan(above), context)
    opened = tracing.tracer.start_span(
        name,
        context,
        SpanKind[kind.upper()],
        start_time=_nanoseconds(start) if start else None,
    )
    handle = SpanHandle(opened)
    for key, value in attributes.items():
        handle.set(key, value)
    return opened


def _traceparent_of(opened: Span) -> str:
    context = opened.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1_000
