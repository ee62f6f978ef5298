"""A scripted model server for the tests that need a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.model_server import ModelServer


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    """A running server without a script."""
    async with ModelServer() as running:
        yield running
