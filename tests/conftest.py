"""Fixtures that every folder of tests may use. Others live in a folder's own conftest."""

from __future__ import annotations

pytest_plugins = ["tests.support.machine", "tests.support.postgres", "tests.support.temporal"]
