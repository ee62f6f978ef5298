"""A real store, a deliverer without mocks, and a way to let the table's time pass."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from perdure import names
from perdure.callback.deliver import Deliverer
from perdure.callback.guard import GuardPolicy
from perdure.callback.secrets import CallbackSecrets, SecretBox
from perdure.callback.sender import Sender
from perdure.contracts import Outcome, Projection, TaskResult
from perdure.models import parse_catalogue
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store
from perdure.store.rows import DeliveryRow, NewTask, Principal
from perdure.task.states import Status

SECRET = "a-secret-of-the-operator-for-all-users"
SECRET_KEY = base64.b64encode(b"s" * 32).decode()
POLICY = GuardPolicy(nets=(ipaddress.ip_network("127.0.0.0/8"),), http=True, ports=frozenset())
ALICE = Principal(user_id="alice", scopes=frozenset({"tasks:read", "callbacks:write"}))
BOB = Principal(user_id="bob", scopes=frozenset({"tasks:read", "callbacks:write"}))

Make = Callable[..., Deliverer]
Travel = Callable[[float], Coroutine[Any, Any, None]]


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


async def committed(
    store: Store,
    url: str,
    *,
    user: str = "alice",
    status: Status = Status.COMPLETED,
    text: str = "héllo \u2028 😀",
) -> tuple[str, str]:
    """A finished task with a pending callback: (task id, delivery id)."""
    task_id = names.new_task_id()
    new = NewTask(task_id=task_id, user_id=user, model_id="m", pool="p", params_json="{}", callback_url=url)
    await store.tasks.create(new)
    receipt = await store.tasks.commit(
        Outcome(
            projection=Projection(
                task_id=task_id,
                version=3,
                status=status,
                error_code=None if status is Status.COMPLETED else "internal",
                error_message=None if status is Status.COMPLETED else "it broke",
            ),
            result=TaskResult(text=text),
            completed_at=datetime.now(UTC),
        )
    )
    assert receipt.kind == "committed"
    assert receipt.delivery_id is not None
    return task_id, receipt.delivery_id


async def delivery(store: Store, task_id: str, principal: Principal = ALICE) -> DeliveryRow:
    """The task's one delivery."""
    rows = await store.deliveries.list_for_task(principal, task_id)
    assert rows is not None
    (row,) = rows
    return row
