"""The families of DESIGN §11: named so, at zero from the start, with labels from the configuration only."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from perdure.models import Catalogue, parse_catalogue
from perdure.observability.metrics import TIME_BUCKETS, TRIES_BUCKETS, Metrics
from perdure.task.policy import QUICK_TRIES, SLOW_TRY_DELAYS
from perdure.task.states import CLASSES, FINAL, Status

PUBLIC = {
    "perdure_tasks_submitted_total": {"priority", "task_type"},
    "perdure_tasks_finished_total": {"status", "task_type"},
    "perdure_tasks": {"status"},
    "perdure_queue_depth": {"pool", "priority"},
    "perdure_queue_oldest_wait_seconds": {"pool", "priority"},
    "perdure_pool_slots": {"pool", "state"},
    "perdure_task_queue_wait_seconds": set(),
    "perdure_task_execution_seconds": set(),
    "perdure_task_total_seconds": set(),
    "perdure_attempts_total": {"outcome"},
    "perdure_tokens_total": {"model", "kind"},
    "perdure_time_to_first_token_seconds": set(),
    "perdure_callback_tries_total": {"outcome"},
    "perdure_callback_deliveries_total": {"outcome"},
    "perdure_callback_tries_per_delivery": set(),
    "perdure_callbacks_waiting": set(),
    "perdure_reconciler_repairs_total": {"kind"},
    "perdure_workflows_stuck_total": set(),
    "perdure_sse_streams": set(),
    "perdure_build_info": {"version", "python"},
}


@pytest.fixture
def catalogue() -> Catalogue:
    return parse_catalogue(
        """
        task_types = ["chat", "document"]
        [pools.local]
        [pools.big]
        [models."m:7b"]
        pool = "local"
        executor = "simulated"
        """
    )


def samples(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every sample of the page by name, as a scraper reads it."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.mark.parametrize(("name", "labels"), PUBLIC.items())
def test_each_public_family_stands_with_its_labels(catalogue: Catalogue, name: str, labels: set[str]) -> None:
    found = samples(Metrics(catalogue))
    series = found.get(name) or found.get(f"{name}_count")
    assert series, f"{name} is not on a fresh page"
    assert all(set(one) == labels for one, _ in series)
    if name != "perdure_build_info":
        assert all(value == 0 for _, value in series)


def test_known_label_sets_stand_at_zero_before_the_first_event(catalogue: Catalogue) -> None:
    found = samples(Metrics(catalogue))
    types = ["chat", "document", "other"]
    submitted = {(one["priority"], one["task_type"]) for one, _ in found["perdure_tasks_submitted_total"]}
    assert submitted == set(itertools.product(map(str, CLASSES), types))
    finished = {(one["status"], one["task_type"]) for one, _ in found["perdure_tasks_finished_total"]}
    assert finished == set(itertools.product(map(str, FINAL), types))
    assert {one["status"] for one, _ in found["perdure_tasks"]} == set(map(str, Status))
    depth = {(one["pool"], one["priority"]) for one, _ in found["perdure_queue_depth"]}
    assert depth == set(itertools.product(["local", "big"], map(str, CLASSES)))
    assert {one["model"] for one, _ in found["perdure_tokens_total"]} == {"m:7b", "other"}


@given(value=st.text(max_size=40))
def test_a_strangers_name_makes_no_series(value: str) -> None:
    catalogue = parse_catalogue('task_types = ["chat"]\n[pools.local]\n')
    metrics = Metrics(catalogue)
    before = {name: len(series) for name, series in samples(metrics).items()}
    metrics.tasks_submitted.labels(priority="HIGH", task_type=value).inc()
    metrics.tasks_finished.labels("FAILED", value).inc()
    metrics.tokens.labels(model=value, kind="prompt").inc(3)
    after = {name: len(series) for name, series in samples(metrics).items()}
    assert after == before
    label = "chat" if value == "chat" else "other"
    assert ({"status": "FAILED", "task_type": label}, 1.0) in samples(metrics)["perdure_tasks_finished_total"]


def test_time_buckets_reach_two_hours_with_an_edge_on_the_delay_threshold(catalogue: Catalogue) -> None:
    found = samples(Metrics(catalogue))
    for name in (
        "perdure_task_queue_wait_seconds",
        "perdure_task_execution_seconds",
        "perdure_task_total_seconds",
        "perdure_time_to_first_token_seconds",
        "perdure_callback_duration_seconds",
    ):
        edges = [float(one["le"]) for one, _ in found[f"{name}_bucket"]]
        assert edges == [*TIME_BUCKETS, float("inf")]
    assert 30 in TIME_BUCKETS
    assert max(TIME_BUCKETS) == 7200


def test_a_twenty_minute_task_falls_in_a_finite_bucket(catalogue: Catalogue) -> None:
    metrics = Metrics(catalogue)
    metrics.task_execution.observe(1200)
    buckets = {one["le"]: value for one, value in samples(metrics)["perdure_task_execution_seconds_bucket"]}
    assert buckets["900.0"] == 0
    assert buckets["1800.0"] == 1


def test_the_last_possible_try_has_a_bucket() -> None:
    assert max(TRIES_BUCKETS) == QUICK_TRIES + len(SLOW_TRY_DELAYS)


def test_http_is_counted_by_route_template_at_zero_from_the_start(catalogue: Catalogue) -> None:
    metrics = Metrics(catalogue)
    metrics.know_routes([("GET", "/v1/tasks/{task_id}"), ("POST", "/v1/tasks")])
    assert (
        {"method": "POST", "route": "/v1/tasks", "status": "5xx"},
        0.0,
    ) in samples(metrics)["perdure_http_requests_total"]
    before = len(samples(metrics)["perdure_http_requests_total"])
    metrics.observe_http("GET", "/v1/tasks/{task_id}", 404, 0.02)
    for path in ("/v1/tasks/task_1", "/v1/tasks/task_2", "/wp-admin"):
        metrics.observe_http("BREW", path, 404, 0.02)
    metrics.observe_http("GET", None, 404, 0.02)
    found = samples(metrics)["perdure_http_requests_total"]
    assert ({"method": "GET", "route": "/v1/tasks/{task_id}", "status": "4xx"}, 1.0) in found
    assert sum(value for _, value in found) == 5
    assert len(found) <= before + 2  # `other` and `unmatched`, never one per path


def test_two_metrics_objects_live_in_one_process(catalogue: Catalogue) -> None:
    one, two = Metrics(catalogue), Metrics(catalogue)
    one.attempts.labels(outcome="completed").inc()
    assert all(value == 0 for _, value in samples(two)["perdure_attempts_total"])
