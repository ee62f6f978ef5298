"""`floor`: real rows, engine, control worker and dispatcher; GPU work is scripted."""

from __future__ import annotations

import pytest
from temporalio.client import Client

from perdure.store import Store
from tests.integration.scheduling.floor import Floor


@pytest.fixture
def floor(store: Store, temporal_client: Client) -> Floor:
    return Floor(store, temporal_client)
