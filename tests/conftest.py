"""Fixtures that every folder of tests may use. Others live in a folder's own conftest."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.machine", "tests.support.postgres", "tests.support.temporal"]

# Machines are loaded: how long one example takes says nothing.
settings.register_profile("perdure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perdure")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Captured text may hold lone surrogates that a test fed in; a report must cross to xdist as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """No test leaves the root logger talkative for the next."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
