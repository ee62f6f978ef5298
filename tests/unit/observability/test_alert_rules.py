"""The alert rules: each parses, reads metrics that we export, and is explained and tested.

promtool runs them in `make check-alerts`; this needs no tool.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql_parser import BinaryExpr

from perdure.observability.metrics import TIME_BUCKETS
from tests.unit.observability.promql import SCRAPER_METRICS, exported, labels_in, metrics_in, parse

ROOT = Path(__file__).resolve().parents[3]
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
TESTS = yaml.safe_load((ROOT / "deploy/prometheus/rules_test.yml").read_text())["tests"]


def name_of(rule: dict[str, Any]) -> str:
    severity = rule.get("labels", {}).get("severity", "")
    return f"{rule.get('alert') or rule['record']}-{severity}"


def test_every_alert_that_operators_were_promised_is_there() -> None:
    assert {rule["alert"] for rule in ALERTS} == {
        "PerdureQueueBacklogHigh",
        "PerdureFailureRateHigh",
        "PerdureFailureRateHighByType",
        "PerdureConsumptionDelayHigh",
        "PerdureCallbackSuccessLow",
        "PerdureNoWorkerForPool",
        "PerdureNoWorkerForModel",
        "PerdureModelMisconfigured",
        "PerdureModelServerRefuses",
        "PerdureReconcilerNotRunning",
        "PerdureWorkflowStuck",
        "PerdureMetricsMissing",
    }


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_a_rule_parses_and_reads_metrics_that_are_exported(rule: dict[str, Any]) -> None:
    pages = exported()
    assert metrics_in(rule["expr"])
    for metric in metrics_in(rule["expr"]) - RECORDED - SCRAPER_METRICS:
        assert metric in pages, f"{metric} is on no page"


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_a_matcher_names_a_series_that_stands_from_the_start(rule: dict[str, Any]) -> None:
    pages = exported()
    for metric, pairs in labels_in(rule["expr"]).items():
        for label, value in pairs - {("job", "perdure")}:
            assert value in {one.get(label) for one in pages[metric]}, f"{metric}{{{label}={value}}}"


def test_a_broken_expression_is_refused_by_the_parser() -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse("sum by (job (perdure_queue_depth) > 1000")


@pytest.mark.parametrize("rule", ALERTS, ids=name_of)
def test_an_alert_is_explained_and_its_runbook_section_exists(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning"}
    notes = rule["annotations"]
    assert notes["summary"]
    assert notes["description"]
    path, anchor = notes["runbook_url"].split("#")
    headings = re.findall(r"^## (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("alert", sorted({rule["alert"] for rule in ALERTS}))
def test_each_alert_is_tested_silent_and_firing(alert: str) -> None:
    cases = [case for test in TESTS for case in test.get("alert_rule_test", []) if case["alertname"] == alert]
    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)
    fired = {one["exp_labels"]["severity"] for case in cases for one in case["exp_alerts"]}
    assert fired == {rule["labels"]["severity"] for rule in ALERTS if rule["alert"] == alert}


def test_a_threshold_on_a_histogram_lies_on_a_bucket_edge() -> None:
    checked = 0
    for rule in ALERTS:
        for quantile, threshold in re.findall(r"(histogram_quantile\(.*?\)\)\)) > (\d+)", rule["expr"]):
            assert isinstance(parse(f"{quantile} > {threshold}"), BinaryExpr)
            assert float(threshold) in TIME_BUCKETS
            checked += 1
    assert checked == 1


def test_the_configuration_loads_the_rules_and_keeps_one_job() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["rules.yml"]
    jobs = [one["job_name"] for one in config["scrape_configs"]]
    assert jobs.count("perdure") == 1
    (ours,) = (one for one in config["scrape_configs"] if one["job_name"] == "perdure")
    roles = {name for target in ours["dns_sd_configs"] for name in target["names"]}
    assert roles == {"api", "control", "callbacks", "gpu"}
