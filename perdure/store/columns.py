"""The columns of a TaskRow, in its order, and rows made of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from perdure.store.rows import Include, TaskRow
from perdure.task.states import Priority, Status

_HOT: Final = tuple(
    """
    task_id task_type user_id model_id pool status priority lane progress version change_seq error_code
    error_message retry_count max_retries prompt_tokens completion_tokens discarded_tokens metadata
    callback_url callback_events not_before queue_timeout_seconds timeout_seconds deadline_seconds
    queue_deadline total_deadline rerun_of traceparent created_at queued_at started_at completed_at
    updated_at cancel_requested cancel_reason next_attempt_at claimed_at start_failures restarts
    """.split()  # noqa: SIM905 - a list of forty strings in quotes reads worse
)
_STATUS: Final = _HOT.index("status")
_PRIORITY: Final = _HOT.index("priority")
_EVENTS: Final = _HOT.index("callback_events")
WIDTH: Final = len(_HOT) + 3  # columns of a task row; what a statement adds comes after

HOT: Final = ", ".join(f"t.{name}" for name in _HOT)
PLAIN: Final = f"{HOT}, NULL AS params, NULL AS result, NULL AS attempts"
FULL: Final = f"{HOT}, p.params, r.result, t.attempts"
FULL_JOINS: Final = (
    "LEFT JOIN task_payloads p ON p.task_id = t.task_id LEFT JOIN task_results r ON r.task_id = t.task_id"
)
EVERYTHING: Final[Collection[Include]] = ("params", "result", "attempts")


def selection(include: Collection[Include]) -> tuple[str, str]:
    """Columns and joins that give a TaskRow with what is included; the task is `t`."""
    parts, joins = [HOT], []
    for name, column, table in (
        ("params", "p.params", "task_payloads p"),
        ("result", "r.result", "task_results r"),
    ):
        if name in include:
            parts.append(column)
            joins.append(f"LEFT JOIN {table} ON {column[0]}.task_id = t.task_id")
        else:
            parts.append(f"NULL AS {name}")
    parts.append("t.attempts" if "attempts" in include else "NULL AS attempts")
    return ", ".join(parts), " ".join(joins)


def task_row(row: Sequence[Any]) -> TaskRow:
    """A TaskRow of the first WIDTH columns."""
    values = list(row[:WIDTH])
    values[_STATUS] = Status(values[_STATUS])
    values[_PRIORITY] = Priority(values[_PRIORITY])
    values[_EVENTS] = tuple(map(Status, values[_EVENTS]))
    return TaskRow(*values)
