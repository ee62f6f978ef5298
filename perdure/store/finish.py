"""Final states that no workflow decides: the cancel or expiry of a PENDING row, a repair.

Each takes its callback along in the same transaction, due at once: nobody makes quick tries for it.
"""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from perdure import names
from perdure.callback.body import build_body
from perdure.store.base import ACTIVE, TOUCH, Unit, sql
from perdure.store.columns import PLAIN, WIDTH, task_row
from perdure.store.rows import TaskRow
from perdure.task.states import Status

_ORIGIN: Final = "lower(substring(u.callback_url from '^[^:/?#]+://[^/?#]*'))"


def delivery_insert(first_due: str) -> str:
    """The insert of deliveries for updated rows `u` (with `delivery_id`, `body`), first due at `first_due`.

    A suspended receiver gets its event when it is resumed.
    """
    return f"""
    INSERT INTO callback_deliveries (delivery_id, task_id, user_id, event, url, origin, body, state, next_due)
    SELECT u.delivery_id, u.task_id, u.user_id, u.status, u.callback_url, {_ORIGIN}, u.body,
           CASE WHEN o.origin IS NULL THEN 'PENDING' ELSE 'SUSPENDED' END,
           CASE WHEN o.origin IS NULL THEN {first_due} END
    FROM u LEFT JOIN callback_origins o
        ON o.user_id = u.user_id AND o.origin = {_ORIGIN} AND o.suspended_at IS NOT NULL
    WHERE u.delivery_id IS NOT NULL
    """


_FINISH: Final = sql(
    f"""
WITH f AS (
    SELECT * FROM unnest(CAST(:ids AS text[]), CAST(:statuses AS text[]), CAST(:codes AS text[]),
        CAST(:messages AS text[]), CAST(:reasons AS text[]), CAST(:deliveries AS text[]),
        CAST(:bodies AS bytea[]))
        AS f (task_id, status, code, message, reason, delivery_id, body)
), u AS (
    UPDATE tasks t SET
        status = f.status, error_code = f.code, error_message = f.message, completed_at = now(),
        version = t.version + 1, next_attempt_at = NULL, ready = false, leased_until = NULL,
        cancel_requested = t.cancel_requested OR f.status = 'CANCELLED',
        cancel_reason = COALESCE(f.reason, t.cancel_reason), {TOUCH}
    FROM f WHERE t.task_id = f.task_id AND t.status IN {ACTIVE}
    RETURNING t.*, f.delivery_id, f.body
), d AS ({delivery_insert("now()")})
SELECT {PLAIN}, t.delivery_id FROM u t
"""
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a row ends. `task` is the row as it is locked by this transaction."""

    task: TaskRow
    status: Status
    code: str | None = None
    message: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The row after its end, and its callback, if it has one."""

    task: TaskRow
    delivery_id: str | None


async def finish(unit: Unit, endings: Sequence[Ending], at: datetime) -> list[Ended]:
    """Ends rows that the transaction holds. `at` is its now(). Rows that are final stay as they are."""
    if not endings:
        return []
    deliveries = [names.new_delivery_id() if wants_callback(e.task, e.status) else None for e in endings]
    params: dict[str, Any] = {
        "ids": [e.task.task_id for e in endings],
        "statuses": [e.status.value for e in endings],
        "codes": [e.code for e in endings],
        "messages": [e.message for e in endings],
        "reasons": [e.reason for e in endings],
        "deliveries": deliveries,
        "bodies": [
            _body(e, at) if delivery is not None else None
            for e, delivery in zip(endings, deliveries, strict=True)
        ],
    }
    rows = await unit.run(_FINISH, **params)
    return [Ended(task_row(row), row[WIDTH]) for row in rows]


def wants_callback(task: TaskRow, status: Status) -> bool:
    """Whether a task's end is called back."""
    return task.callback_url is not None and status in task.callback_events


def _body(ending: Ending, at: datetime) -> bytes:
    return build_body(
        task_id=ending.task.task_id,
        status=ending.status,
        result=None,
        error_code=ending.code,
        error_message=ending.message,
        at=at,
    )
