"""The Grafana dashboard: made from code, with expressions that parse and metrics that we export.

It was never rendered here: no Grafana server can be had on this machine (docs/deploy.md says so).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.unit.observability.promql import SDK_METRICS, exported, metrics_in, parse

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "deploy/grafana/dashboards/perdure.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
TARGETS = [(panel["title"], one["expr"]) for panel in PANELS for one in panel.get("targets", [])]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """deploy/grafana/dashboard.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "deploy/grafana/dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_code_makes(maker: ModuleType) -> None:
    assert maker.build() == FILE.read_text(), "run python deploy/grafana/dashboard.py"


def test_the_file_has_grafanas_shape() -> None:
    # Unknown keys are dropped in silence when it is read, so equality after a round trip is the proof.
    again = JSONEncoder(sort_keys=True, indent=2).encode(Dashboard.from_json(BOARD)) + "\n"
    assert json.loads(again) == BOARD


@pytest.mark.parametrize(("title", "expression"), TARGETS)
def test_an_expression_parses_and_its_metrics_are_exported(title: str, expression: str) -> None:
    assert parse(expression) is not None
    assert metrics_in(expression) - SDK_METRICS <= set(exported())


def test_it_shows_what_an_operator_asks_first() -> None:
    by_title = {panel["title"]: panel for panel in PANELS}
    for title in ("Wait (consumption delay)", "Execution"):
        assert [one["legendFormat"] for one in by_title[title]["targets"]] == ["mean", "p50", "p95", "p99"]
    assert "task_type" in by_title["Success by task type, 1 h"]["targets"][0]["expr"]
    assert "tries_per_delivery" in by_title["Tries per delivery, 1 h"]["targets"][0]["expr"]


def test_panels_have_their_own_ids_and_places() -> None:
    assert BOARD["uid"] == "perdure"
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_gauges_from_rows_are_never_summed_over_processes() -> None:
    for title, expression in TARGETS:
        for gauge in (
            "perdure_queue_depth",
            "perdure_tasks{",
            "perdure_pool_slots",
            "perdure_callbacks_waiting",
        ):
            if gauge in expression:
                inner = expression[: expression.index(gauge)]
                assert "max" in inner.rsplit("sum", 1)[-1], title
