"""Tests marked `llm` want a machine that can run the small model; elsewhere they are skipped and say why."""

from __future__ import annotations

import pytest

from perdure.doctor import Finding, check_openmp, check_processor


def model_faults() -> list[Finding]:
    """What keeps the small model from running here."""
    return [finding for finding in (check_processor(), check_openmp()) if finding.level == "fault"]


def pytest_report_header() -> list[str]:
    return [f"the small model cannot run here, its tests are skipped: {fault}" for fault in model_faults()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    faults = model_faults()
    if not faults:
        return
    skip = pytest.mark.skip(reason="; ".join(f"{fault.what}: {fault.remedy}" for fault in faults))
    for item in items:
        if item.get_closest_marker("llm"):
            item.add_marker(skip)
