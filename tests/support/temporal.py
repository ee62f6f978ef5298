"""A real Temporal server for tests: one per xdist worker, with the product's own settings.

Fixtures: `temporal_server` (the process), `temporal_address`, `temporal_client` (as every process connects).
Use task queues and workflow ids of your own: the server is shared by the tests of one worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from perdure.embedded.temporal import EmbeddedTemporal


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTemporal]:
    """The server, started with our dynamic configuration, search attributes and pragmas."""
    root: Path = tmp_path_factory.mktemp("temporal")
    server = EmbeddedTemporal(root)
    server.start()
    yield server
    server.stop(5)


@pytest.fixture(scope="session")
def temporal_address(temporal_server: EmbeddedTemporal) -> str:
    """`host:port` of the server."""
    return temporal_server.address


@pytest.fixture
async def temporal_client(temporal_address: str) -> Client:
    """A client of the test's own event loop, with the pydantic converter."""
    return await Client.connect(temporal_address, data_converter=pydantic_data_converter)
