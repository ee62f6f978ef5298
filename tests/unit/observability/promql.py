"""Reads PromQL: which metrics an expression names, and which our processes export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from perdure.models import load_catalogue
from perdure.observability.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]

# Of the Temporal SDK; tests/integration/observability scrapes a real worker and finds them there.
SDK_METRICS = frozenset(
    {
        "temporal_activity_schedule_to_start_latency_seconds_bucket",
        "temporal_worker_task_slots_used",
    }
)
SCRAPER_METRICS = frozenset({"up"})  # Prometheus makes it for each target


def parse(expression: str) -> Any:
    """The expression's tree, with Grafana's variables filled in. Raises ValueError for bad PromQL."""
    filled = re.sub(r"\$__\w+", "5m", expression).replace("$job", "perdure")
    return promql_parser.parse(filled)


def metrics_in(expression: str) -> set[str]:
    """Every metric that an expression names."""
    return {one.name for one in _walk(parse(expression)) if isinstance(one, promql_parser.VectorSelector)}


def labels_in(expression: str) -> dict[str, set[tuple[str, str]]]:
    """The equality matchers on each metric of an expression: (label, value)."""
    found: dict[str, set[tuple[str, str]]] = {}
    for one in _walk(parse(expression)):
        if isinstance(one, promql_parser.VectorSelector):
            pairs = {(m.name, m.value) for m in one.matchers.matchers if m.op == promql_parser.MatchOp.Equal}
            found.setdefault(one.name, set()).update(pairs)
    return found


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "vs", "vector_selector", "param"):
        below = getattr(node, name, None)
        if isinstance(below, promql_parser.Expr):
            yield from _walk(below)
    for below in getattr(node, "args", None) or []:
        yield from _walk(below)


def exported() -> dict[str, list[dict[str, str]]]:
    """Each sample name of a fresh page, with its label sets."""
    metrics = Metrics(load_catalogue(ROOT / "models.toml"))
    metrics.know_routes([("GET", "/v1/tasks")])
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found
