"""Finished tasks with callbacks, and what tests ask of them."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import standardwebhooks

from perdure import names
from perdure.callback import verify
from perdure.callback.deliver import Deliverer
from perdure.callback.guard import GuardPolicy
from perdure.callback.secrets import whsec
from perdure.contracts import Outcome, Projection, TaskResult
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store
from perdure.store.rows import DeliveryRow, NewTask, Principal
from perdure.task.states import Status
from tests.support.receiver import Request

SECRET = "a-secret-of-the-operator-for-all-users"
SECRET_KEY = base64.b64encode(b"s" * 32).decode()
POLICY = GuardPolicy(nets=(ipaddress.ip_network("127.0.0.0/8"),), http=True, ports=frozenset())
ALICE = Principal(user_id="alice", scopes=frozenset({"tasks:read", "callbacks:write"}))
BOB = Principal(user_id="bob", scopes=frozenset({"tasks:read", "callbacks:write"}))

Make = Callable[..., Deliverer]
Travel = Callable[[float], Coroutine[Any, Any, None]]


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


def genuine(request: Request) -> None:
    """The independent verifier and ours accept the request as it came."""
    standardwebhooks.Webhook(whsec(SECRET.encode())).verify(request.body, request.header_map)
    verify(request.body, request.header_map, SECRET)


def count(metrics: Metrics, family: str, outcome: str) -> float:
    value = metrics.registry.get_sample_value(f"perdure_callback_{family}_total", {"outcome": outcome})
    assert value is not None
    return value


def seconds_until(moment: datetime | None) -> float:
    assert moment is not None
    return (moment - datetime.now(UTC)).total_seconds()
