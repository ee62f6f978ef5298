"""A Temporal server of this folder's own: the processes here serve the queues that every process serves, so
tasks and schedules of other tests must not be on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perdure.embedded.temporal import EmbeddedTemporal


@pytest.fixture(scope="package")
def own_temporal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port` of the server."""
    server = EmbeddedTemporal(tmp_path_factory.mktemp("own-temporal"))
    server.start()
    yield server.address
    server.stop(5)
