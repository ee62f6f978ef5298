"""`ground`: the service of all tests of this folder, whole again after each; `service`: its API; `model`: its
model server, scripted by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.durability.ground import Ground, Service, counting
from tests.support.model_server import ModelServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One xdist worker runs them all: the service takes seconds to start."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("durability"))
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def whole_ground() -> Iterator[Ground]:
    ground = Ground()
    try:
        ground.up()
        yield ground
    finally:
        ground.down()


@pytest.fixture
async def ground(whole_ground: Ground) -> AsyncIterator[Ground]:
    yield whole_ground
    await whole_ground.heal()


@pytest.fixture
async def service(ground: Ground) -> AsyncIterator[Service]:
    async with Service(ground) as service:
        yield service


@pytest.fixture
async def model(ground: Ground) -> AsyncIterator[ModelServer]:
    """Counts, until the test scripts it."""
    async with ModelServer(ground.model_port) as server:
        server.script(counting())
        yield server
