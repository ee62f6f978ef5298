"""Makes the Grafana dashboard from code: `python deploy/grafana/dashboard.py` writes dashboards/perdure.json.

A test makes it again and compares, parses each expression and checks that each metric is one that we export.
Gauges from rows are the same on every API process, so they are read with max; counters are summed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    GridPos,
    VariableOption,
    VariableRefresh,
)

TARGET = Path(__file__).parent / "dashboards" / "perdure.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${DS_PROMETHEUS}")
JOB = 'job="$job"'
RATE = "$__rate_interval"
ENDED = f'perdure_tasks_finished_total{{{JOB},status=~"COMPLETED|FAILED"}}'  # cancelled tasks are in no base


@dataclass(frozen=True)
class Chart:
    """One panel: what it asks and how wide it is (24 columns a line)."""

    title: str
    about: str
    queries: Sequence[tuple[str, str]]  # (expression, legend)
    unit: str = "short"
    width: int = 8
    kind: Literal["lines", "number"] = "lines"


def spread(metric: str, window: str = RATE) -> list[tuple[str, str]]:
    """Mean, p50, p95 and p99 of a histogram without labels of its own."""
    mean = f"sum(rate({metric}_sum{{{JOB}}}[{window}])) / (sum(rate({metric}_count{{{JOB}}}[{window}])) > 0)"
    return [(mean, "mean")] + [
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{JOB}}}[{window}])))", f"p{q[2:]:0<2}")
        for q in ("0.5", "0.95", "0.99")
    ]


OVERVIEW = [
    Chart(
        "Waiting",
        "Tasks that wait for a slot. Alert above 1,000 for 5 minutes.",
        [(f"sum(max by (pool, priority) (perdure_queue_depth{{{JOB}}}))", "waiting")],
        width=4,
        kind="number",
    ),
    Chart(
        "Oldest wait",
        "How long the oldest waiting task has waited. Alert above 30 s.",
        [(f"max(perdure_queue_oldest_wait_seconds{{{JOB}}})", "oldest")],
        unit="s",
        width=4,
        kind="number",
    ),
    Chart(
        "Running",
        "Tasks in PROCESSING.",
        [(f'max(perdure_tasks{{{JOB},status="PROCESSING"}})', "running")],
        width=4,
        kind="number",
    ),
    Chart(
        "Slots busy",
        "Share of the live workers' slots in use.",
        [
            (
                f'sum(max by (pool) (perdure_pool_slots{{{JOB},state="busy"}}))'
                f" / (sum(max by (pool, state) (perdure_pool_slots{{{JOB}}})) > 0)",
                "busy",
            )
        ],
        unit="percentunit",
        width=4,
        kind="number",
    ),
    Chart(
        "Failure rate, 10 m",
        "FAILED of COMPLETED and FAILED. Alert above 10 %. Cancelled tasks do not count.",
        [
            (
                f'sum(increase(perdure_tasks_finished_total{{{JOB},status="FAILED"}}[10m]))'
                f" / (sum(increase({ENDED}[10m])) > 0)",
                "failed",
            )
        ],
        unit="percentunit",
        width=4,
        kind="number",
    ),
    Chart(
        "Callback success, 10 m",
        "Tries that succeeded. Alert below 90 %.",
        [
            (
                f'sum(increase(perdure_callback_tries_total{{{JOB},outcome="success"}}[10m]))'
                f" / (sum(increase(perdure_callback_tries_total{{{JOB}}}[10m])) > 0)",
                "success",
            )
        ],
        unit="percentunit",
        width=4,
        kind="number",
    ),
]

LOAD = [
    Chart(
        "Submitted per second, by priority",
        "Tasks accepted.",
        [(f"sum by (priority) (rate(perdure_tasks_submitted_total{{{JOB}}}[{RATE}]))", "{{priority}}")],
        unit="ops",
    ),
    Chart(
        "Finished per second, by state",
        "Tasks that reached a final state.",
        [(f"sum by (status) (rate(perdure_tasks_finished_total{{{JOB}}}[{RATE}]))", "{{status}}")],
        unit="ops",
    ),
    Chart(
        "Waiting, by pool and priority",
        "From rows: PENDING and due, or QUEUED.",
        [(f"max by (pool, priority) (perdure_queue_depth{{{JOB}}})", "{{pool}} {{priority}}")],
    ),
    Chart(
        "Open tasks, by state",
        "From rows.",
        [
            (
                f'max by (status) (perdure_tasks{{{JOB},status=~"PENDING|QUEUED|PROCESSING"}})',
                "{{status}}",
            )
        ],
    ),
    Chart(
        "Slots, by pool",
        "Busy and free slots of live workers.",
        [(f"max by (pool, state) (perdure_pool_slots{{{JOB}}})", "{{pool}} {{state}}")],
    ),
    Chart(
        "Oldest wait, by pool and priority",
        "Sees a queue that nobody takes from.",
        [
            (
                f"max by (pool, priority) (perdure_queue_oldest_wait_seconds{{{JOB}}})",
                "{{pool}} {{priority}}",
            )
        ],
        unit="s",
    ),
]

DELAY = [
    Chart(
        "Wait (consumption delay)",
        "Created (or not_before) to the first attempt's start. Alert when p95 is above 30 s.",
        spread("perdure_task_queue_wait_seconds"),
        unit="s",
    ),
    Chart(
        "Execution",
        "First attempt's start to the final state.",
        spread("perdure_task_execution_seconds"),
        unit="s",
    ),
    Chart(
        "Total",
        "Created (or not_before) to the final state.",
        spread("perdure_task_total_seconds"),
        unit="s",
    ),
    Chart(
        "Time to first token",
        "Request to the model server until its first output.",
        spread("perdure_time_to_first_token_seconds"),
        unit="s",
    ),
    Chart(
        "Tokens per second, by model",
        "Completion tokens made.",
        [(f'sum by (model) (rate(perdure_tokens_total{{{JOB},kind="completion"}}[{RATE}]))', "{{model}}")],
    ),
    Chart(
        "Discarded tokens",
        "Made by attempts whose text was thrown away, per second.",
        [(f'sum by (model) (rate(perdure_tokens_total{{{JOB},kind="discarded"}}[{RATE}]))', "{{model}}")],
    ),
]

RESULTS = [
    Chart(
        "Success by task type, 1 h",
        "COMPLETED of COMPLETED and FAILED.",
        [
            (
                f'sum by (task_type) (increase(perdure_tasks_finished_total{{{JOB},status="COMPLETED"}}[1h]))'
                f" / (sum by (task_type) (increase({ENDED}[1h])) > 0)",
                "{{task_type}}",
            )
        ],
        unit="percentunit",
        width=12,
    ),
    Chart(
        "Attempts per second, by outcome",
        "A task may take several.",
        [(f"sum by (outcome) (rate(perdure_attempts_total{{{JOB}}}[{RATE}]))", "{{outcome}}")],
        unit="ops",
        width=12,
    ),
]

CALLBACKS = [
    Chart(
        "Tries per delivery, 1 h",
        "How many tries a settled callback took.",
        spread("perdure_callback_tries_per_delivery", "1h"),
    ),
    Chart(
        "Tries per second, by outcome",
        "Whoever makes them: the task's workflow, the sweep, a redelivery.",
        [(f"sum by (outcome) (rate(perdure_callback_tries_total{{{JOB}}}[{RATE}]))", "{{outcome}}")],
        unit="ops",
    ),
    Chart("Duration of a try", "Connect to answer.", spread("perdure_callback_duration_seconds"), unit="s"),
    Chart(
        "Settled, by outcome, 1 h",
        "Callbacks that were delivered, given up or suspended.",
        [(f"sum by (outcome) (increase(perdure_callback_deliveries_total{{{JOB}}}[1h]))", "{{outcome}}")],
        width=12,
    ),
    Chart(
        "Waiting callbacks",
        "From rows: a try is planned.",
        [(f"max(perdure_callbacks_waiting{{{JOB}}})", "waiting")],
        width=12,
    ),
]

SERVICE = [
    Chart(
        "HTTP requests per second, by status",
        "All routes but the probes.",
        [
            (
                "sum by (status) (rate(perdure_http_requests_total"
                f'{{{JOB},route!~"/healthz|/readyz|/metrics"}}[{RATE}]))',
                "{{status}}",
            )
        ],
        unit="reqps",
    ),
    Chart(
        "HTTP p95, by route",
        "To the end of the reply, so streams and waits show their whole length.",
        [
            (
                "histogram_quantile(0.95, sum by (route, le)"
                f" (rate(perdure_http_request_duration_seconds_bucket{{{JOB}}}[{RATE}])))",
                "{{route}}",
            )
        ],
        unit="s",
    ),
    Chart("Event streams", "Open now.", [(f"sum(perdure_sse_streams{{{JOB}}})", "streams")]),
    Chart(
        "Reconciler repairs, 1 h",
        "Rows that it settled; a steady figure means that something breaks runs.",
        [(f"sum by (kind) (increase(perdure_reconciler_repairs_total{{{JOB}}}[1h]))", "{{kind}}")],
    ),
    Chart(
        "Reconciler, last pass",
        "Seconds since; alert above 180 s.",
        [(f"time() - max(perdure_reconciler_last_run_timestamp_seconds{{{JOB}}})", "age")],
        unit="s",
    ),
    Chart(
        "Resident memory, by process",
        "Of each scraped process.",
        [(f"process_resident_memory_bytes{{{JOB}}}", "{{role}} {{instance}}")],
        unit="bytes",
    ),
    Chart(
        "Engine: activity wait p95, by queue",
        "Schedule to start, as the Temporal SDK of the workers sees it.",
        [
            (
                "histogram_quantile(0.95, sum by (task_queue, le)"
                f" (rate(temporal_activity_schedule_to_start_latency_seconds_bucket{{{JOB}}}[{RATE}])))",
                "{{task_queue}}",
            )
        ],
        unit="s",
        width=12,
    ),
    Chart(
        "Engine: worker slots in use",
        "By queue and kind of work.",
        [
            (
                f"sum by (task_queue, worker_type) (temporal_worker_task_slots_used{{{JOB}}})",
                "{{task_queue}} {{worker_type}}",
            )
        ],
        width=12,
    ),
]

ROWS = {
    "At a glance": OVERVIEW,
    "Load": LOAD,
    "Delay and execution": DELAY,
    "Results": RESULTS,
    "Callbacks": CALLBACKS,
    "Service": SERVICE,
}


def build() -> str:
    """The dashboard as JSON."""
    board = (
        boards.Dashboard("Perdure")
        .uid("perdure")
        .description("Load, delay, failure and delivery of Perdure. Made by deploy/grafana/dashboard.py.")
        .tags(["perdure"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("utc")
        .with_variable(boards.DatasourceVariable("DS_PROMETHEUS").label("Prometheus").type("prometheus"))
        .with_variable(
            boards.QueryVariable("job")
            .label("Job")
            .datasource(SOURCE)
            .query("label_values(perdure_build_info, job)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .current(VariableOption(selected=True, text="perdure", value="perdure"))
        )
    )
    number, top = 1, 0
    for title, charts in ROWS.items():
        board = board.with_row(boards.Row(title).id(number).grid_pos(GridPos(h=1, w=24, x=0, y=top)))
        number, top, left = number + 1, top + 1, 0
        height = 4 if charts[0].kind == "number" else 8
        for chart in charts:
            if left + chart.width > 24:
                top, left = top + height, 0
            place = GridPos(h=height, w=chart.width, x=left, y=top)
            board = board.with_panel(_panel(chart).id(number).grid_pos(place))
            number, left = number + 1, left + chart.width
        top += height
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _panel(chart: Chart) -> timeseries.Panel | stat.Panel:
    panel: timeseries.Panel | stat.Panel
    if chart.kind == "lines":
        legend = VizLegendOptions().show_legend(True)
        legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        panel = timeseries.Panel().legend(legend).fill_opacity(8)
    else:
        last = ReduceDataOptions().calcs(["lastNotNull"])
        panel = stat.Panel().reduce_options(last).graph_mode(BigValueGraphMode.AREA)
    panel = panel.title(chart.title).description(chart.about).unit(chart.unit).datasource(SOURCE).min(0)
    for index, (expression, name) in enumerate(chart.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(name).datasource(SOURCE)
        panel = panel.with_target(query.ref_id("ABCDEFGH"[index]))
    return panel


def main() -> int:
    """Writes the file; with --check compares instead."""
    parser = argparse.ArgumentParser(description="make the Grafana dashboard")
    parser.add_argument("--check", action="store_true", help="exit 1 when the file differs")
    made = build()
    if parser.parse_args().check:
        return 0 if TARGET.read_text(encoding="utf-8") == made else 1
    TARGET.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
