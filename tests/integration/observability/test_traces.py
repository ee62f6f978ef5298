"""Spans as a collector receives them over OTLP/HTTP on a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from perdure.contracts import AttemptRecord
from perdure.observability import traces
from perdure.observability.logs import JsonFormatter
from tests.support.otlp import Collector, Span

CANARY = "Tr4c3C4n4ry"
CALLER = "00-" + "1f" * 16 + "-" + "2e" * 8 + "-01"
TASK = "task_" + "0" * 32


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector, with tracing of this process on."""
    with Collector() as one:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", one.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        assert traces.start_tracing("api")
        yield one
        traces.stop_tracing()


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {one.name: one for one in spans}


def test_nested_spans_form_one_tree(collector: Collector) -> None:
    with traces.span("POST /v1/tasks", parent=CALLER, kind="server") as request:
        request.set("http.response.status_code", 202)
        outer = traces.current_traceparent()
        with traces.span("commit"):
            pass
        assert traces.current_traceparent() == outer
    assert traces.current_traceparent() is None
    traces.stop_tracing()
    spans = by_name(collector.spans)
    assert {one.trace_id for one in spans.values()} == {"1f" * 16}
    assert spans["POST /v1/tasks"].parent_id == "2e" * 8
    assert spans["commit"].parent_id == spans["POST /v1/tasks"].span_id
    assert spans["POST /v1/tasks"].kind == 2
    assert spans["POST /v1/tasks"].service == "perdure-api"
    assert spans["POST /v1/tasks"].attributes["http.response.status_code"] == 202


def test_the_tasks_span_joins_what_named_it_before_it_was_written(collector: Collector) -> None:
    with traces.span("POST /v1/tasks"):
        submit = traces.current_traceparent()
    with traces.span("attempt 2", parent=traces.task_traceparent(submit, TASK)):
        pass
    start = datetime(2026, 12, 1, 12, tzinfo=UTC)
    lost = AttemptRecord(
        number=1, worker="w", started_at=start, ended_at=start + timedelta(seconds=9), outcome="lost",
        error_code="worker_lost",
    )  # fmt: skip
    traces.record_task(
        submit, TASK, start=start, end=start + timedelta(minutes=20), status="FAILED",
        error_code="invalid_request", attempts=[lost], attributes={"perdure.model": "m"},
    )  # fmt: skip
    traces.stop_tracing()
    spans = by_name(collector.spans)
    task = spans["task"]
    assert task.parent_id == spans["POST /v1/tasks"].span_id
    assert spans["attempt 2"].parent_id == task.span_id == spans["attempt 1"].parent_id
    assert task.end - task.start == 1200 * 10**9
    assert task.failed
    assert task.attributes["perdure.task.id"] == TASK
    assert spans["attempt 1"].failed
    assert spans["attempt 1"].end - spans["attempt 1"].start == 9 * 10**9
    assert len({one.trace_id for one in spans.values()}) == 1


def test_a_failure_marks_the_span_without_its_secrets(collector: Collector) -> None:
    def fails() -> None:
        with traces.span("callback") as one:
            one.set("url.full", f"https://h/x?key={CANARY}")
            raise ValueError(f"POST https://u:{CANARY}@h/x?token={CANARY} failed\nforged")

    with pytest.raises(ValueError, match="token"):
        fails()
    traces.stop_tracing()
    (span,) = collector.spans
    assert span.failed
    assert span.attributes["error.type"] == "ValueError"
    assert "\n" not in span.message
    assert CANARY.encode() not in collector.raw


def test_log_lines_inside_a_span_carry_its_trace(collector: Collector) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "hello"})
    with traces.span("attempt 1", parent=CALLER):
        inside = json.loads(JsonFormatter("gpu").format(record))
    outside = json.loads(JsonFormatter("gpu").format(record))
    assert inside["trace_id"] == "1f" * 16
    assert "trace_id" not in outside


async def test_tasks_of_one_loop_keep_their_spans_apart(collector: Collector) -> None:
    async def one(name: str) -> None:
        with traces.span(f"outer {name}"):
            await asyncio.sleep(0)
            with traces.span(f"inner {name}"):
                await asyncio.sleep(0)

    await asyncio.gather(one("a"), one("b"))
    await asyncio.to_thread(traces.stop_tracing)
    spans = by_name(collector.spans)
    for name in ("a", "b"):
        assert spans[f"inner {name}"].parent_id == spans[f"outer {name}"].span_id
    assert spans["outer a"].trace_id != spans["outer b"].trace_id


def test_spans_arrive_while_the_process_runs(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    with traces.span("early"):
        pass
    collector.wait_for(lambda spans: [one.name for one in spans] == ["early"])


def test_off_it_carries_the_callers_trace_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert not traces.start_tracing("api")
    with traces.span("POST /v1/tasks", parent=CALLER) as one:
        one.set("a", 1)
        one.rename("b")
        one.fail("c")
        assert traces.current_traceparent() == CALLER
    with traces.span("alone"):
        assert traces.current_traceparent() is None
    traces.record_task(CALLER, TASK, start=datetime.now(UTC), end=datetime.now(UTC), status="COMPLETED")
    traces.stop_tracing()


DEAD_COLLECTOR = """
import time
from perdure.observability import traces
assert traces.start_tracing("api")
begin = time.monotonic()
for number in range(1000):
    with traces.span(f"span {number}"):
        pass
print(time.monotonic() - begin)
begin = time.monotonic()
traces.stop_tracing(1)
print(time.monotonic() - begin)
"""


def test_a_dead_collector_holds_up_neither_work_nor_exit() -> None:
    with Collector() as gone:
        dead = gone.url
    # A process of its own: the exporter goes on trying in a thread until the process ends.
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", DEAD_COLLECTOR],
        env=os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": dead},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    work, stop = map(float, done.stdout.split())
    assert work < 5
    assert stop < 5
    assert time.monotonic() - begin < 30  # and the process ended


@pytest.mark.parametrize(
    "text",
    ["", None, "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
     "ff-" + "1" * 32 + "-" + "1" * 16 + "-01", CALLER + "\n", CALLER.upper(), CALLER + "-x", "a" * 10_000],
)  # fmt: skip
def test_a_malformed_traceparent_is_nobodys(text: str | None) -> None:
    assert traces.valid_traceparent(text) is None
    with traces.span("x", parent=text):
        assert traces.current_traceparent() is None
