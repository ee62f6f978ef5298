"""Fixtures that every folder of tests may use. Others live in a folder's own conftest."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.machine", "tests.support.postgres", "tests.support.temporal"]

# Machines are loaded: how long one example takes says nothing.
settings.register_profile("perdure", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perdure")
