"""A real store, a deliverer without mocks, and a way to let the table's time pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from perdure.callback.deliver import Deliverer
from perdure.callback.secrets import CallbackSecrets, SecretBox
from perdure.callback.sender import Sender
from perdure.models import parse_catalogue
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store
from tests.integration.callback.harness import POLICY, SECRET, SECRET_KEY, Make, Travel


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(parse_catalogue(""))


@pytest.fixture
async def make_deliverer(store: Store, metrics: Metrics) -> AsyncIterator[Make]:
    """`make_deliverer(total_seconds=…, fixed=…)`: a deliverer, closed after the test."""
    async with AsyncExitStack() as stack:

        def make(
            *, total_seconds: float = 20.0, fixed: bool = True, key: str = SECRET_KEY, **more: Any
        ) -> Deliverer:
            secrets = CallbackSecrets(store.secrets, SecretBox.from_text(key), [SECRET] if fixed else [])
            sender = Sender(POLICY, total_seconds=total_seconds, connect_seconds=min(5.0, total_seconds))
            made = Deliverer(more.pop("store", store), secrets, sender, metrics, **more)
            stack.push_async_callback(made.aclose)
            return made

        yield make


@pytest.fixture
def deliverer(make_deliverer: Make) -> Deliverer:
    return make_deliverer()


@pytest.fixture
def secrets(store: Store) -> CallbackSecrets:
    """Secrets per user, as an operator with PERDURE_SECRET_KEY alone has them."""
    return CallbackSecrets(store.secrets, SecretBox.from_text(SECRET_KEY))


@pytest.fixture
def travel(database_url: str) -> Travel:
    """`await travel(61)`: what the table holds is 61 seconds older; due times and leases come nearer."""

    async def by(seconds: float) -> None:
        connection = await asyncpg.connect(database_url)
        try:
            await connection.execute(
                "UPDATE callback_deliveries SET next_due = next_due - make_interval(secs => $1), "
                "leased_until = leased_until - make_interval(secs => $1)",
                seconds,
            )
            await connection.execute(
                "UPDATE callback_origins SET failing_since = failing_since - make_interval(secs => $1)",
                seconds,
            )
            await connection.execute(
                "UPDATE callback_secrets SET retires_at = retires_at - make_interval(secs => $1)", seconds
            )
        finally:
            await connection.close()

    return by
