"""What workflows write: projections on the way, and the one final commit."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from typing import Any, Final

from perdure import names
from perdure.callback.body import build_body
from perdure.contracts import CommitReceipt, Outcome, Projection, TaskResult
from perdure.store.base import ACTIVE, TOUCH, Repository, sql
from perdure.store.delivery_sql import QUICK_GRACE_SECONDS
from perdure.store.finish import delivery_insert
from perdure.store.jsontext import to_json
from perdure.task.policy import priority_key
from perdure.task.states import Status

# What both writes take over. A write by its workflow proves that it lives: a note of its absence goes.
_COMMON: Final = f"""
    status = :status, version = GREATEST(:version, t.version + 1),
    priority = COALESCE(CAST(:priority AS text), t.priority),
    lane = CASE WHEN CAST(:priority AS text) = t.priority THEN t.lane ELSE COALESCE(:lane, t.lane) END,
    retry_count = :retry_count, attempts = :attempts, attempt_count = :attempt_count,
    prompt_tokens = :prompt_tokens, completion_tokens = :completion_tokens,
    discarded_tokens = :discarded_tokens,
    error_code = :error_code, error_message = :error_message,
    queued_at = COALESCE(:queued_at, t.queued_at),
    started_at = COALESCE(t.started_at, CASE WHEN CAST(:started_at AS timestamptz) IS NOT NULL
        THEN GREATEST(CAST(:started_at AS timestamptz), t.created_at) END),
    ready = false, leased_until = NULL, missing_since = NULL, {TOUCH}
"""
_PROJECT: Final = sql(
    f"""
UPDATE tasks t SET {_COMMON}, progress = LEAST(:progress, 99), next_attempt_at = :next_attempt_at
WHERE t.task_id = :id AND t.status IN {ACTIVE} AND t.version < :version
RETURNING 1
"""
)
# The last lines look at the row as it was before: the same outcome, written by a try whose answer was lost,
# is told from another's by its time and state.
_COMMIT: Final = sql(
    f"""
WITH u AS (
    UPDATE tasks t SET {_COMMON},
        progress = CASE WHEN :status = 'COMPLETED' THEN 100 ELSE LEAST(:progress, 99) END,
        cancel_requested = t.cancel_requested OR :status = 'CANCELLED',
        next_attempt_at = NULL, completed_at = GREATEST(CAST(:completed_at AS timestamptz), t.created_at)
    WHERE t.task_id = :id AND t.status IN {ACTIVE}
    RETURNING t.task_id, t.user_id, t.status, t.callback_url, CAST(:body AS bytea) AS body,
        CASE WHEN t.callback_url IS NOT NULL AND t.status = ANY (t.callback_events)
             THEN CAST(:delivery_id AS text) END AS delivery_id
), result AS (
    INSERT INTO task_results (task_id, result)
    SELECT u.task_id, CAST(:result AS text) FROM u WHERE CAST(:result AS text) IS NOT NULL
), d AS ({delivery_insert("now() + make_interval(secs => :grace)")})
SELECT EXISTS (SELECT 1 FROM u), (SELECT delivery_id FROM u),
    EXISTS (SELECT 1 FROM tasks t WHERE t.task_id = :id),
    EXISTS (SELECT 1 FROM tasks t WHERE t.task_id = :id AND t.status = :status
            AND t.completed_at = GREATEST(CAST(:completed_at AS timestamptz), t.created_at)),
    (SELECT delivery_id FROM callback_deliveries WHERE task_id = :id AND state = 'PENDING' LIMIT 1)
"""
)
_OPTIONAL: Final = ("tool_calls", "reasoning", "refusal", "logprobs", "warnings")


class Writes(Repository):
    """Part of TaskRepository."""

    async def project(self, projection: Projection) -> bool:
        """An intermediate write: taken iff the row is not final and its version is lower. True when taken.

        Raises ValueError for a final state: that is `commit`'s.
        """
        if projection.status.final:
            raise ValueError(f"{projection.status} is final: commit it")
        values = _values(projection) | {"next_attempt_at": projection.next_attempt_at}
        return bool(await self._one(_PROJECT, **values))

    async def commit(self, outcome: Outcome, *, quick: bool = True) -> CommitReceipt:
        """The final write: state, result, usage and pending callback at once, iff the row is not final.

        The same outcome committed again (equal state and `completed_at`) is `committed` again, with its
        delivery while that is untried. `quick`: a workflow makes the first tries, so the sweep waits two
        minutes; False makes the delivery due at once. Raises StoreRefused for text that Postgres or UTF-8
        cannot hold: clean it and commit again.
        """
        projection, result = outcome.projection, result_fields(outcome.result)
        if not projection.status.final:
            raise ValueError(f"{projection.status} is not final: project it")
        completed = projection.status is Status.COMPLETED
        values = _values(projection) | {
            "error_code": None if completed else projection.error_code,
            "error_message": None if completed else projection.error_message,
            "completed_at": outcome.completed_at,
            "result": None if result is None else to_json(result),
            "grace": QUICK_GRACE_SECONDS if quick else 0.0,
            "delivery_id": names.new_delivery_id(),
            "body": build_body(
                task_id=projection.task_id,
                status=projection.status,
                result=result,
                error_code=projection.error_code,
                error_message=projection.error_message,
                at=outcome.completed_at,
            ),
        }
        written, delivery, known, same, earlier = (await self._one(_COMMIT, **values))[0]
        if written:
            return CommitReceipt(kind="committed", delivery_id=delivery)
        if same:
            return CommitReceipt(kind="committed", delivery_id=earlier)
        return CommitReceipt(kind="superseded" if known else "missing")


def result_fields(result: TaskResult | None) -> dict[str, Any] | None:
    """A result as rows, replies and callbacks show it: optional parts only where they hold something."""
    if result is None:
        return None
    return {
        name: value
        for name, value in result.model_dump().items()
        if value is not None or name not in _OPTIONAL
    }


def _values(projection: Projection) -> dict[str, Any]:
    attempts = [attempt.model_dump(mode="json") for attempt in projection.attempts]
    priority = projection.priority
    return {
        "id": projection.task_id,
        "status": projection.status.value,
        "version": projection.version,
        "priority": priority and priority.value,
        "lane": priority and priority_key(priority),
        "progress": projection.progress,
        "retry_count": projection.retry_count,
        "attempts": to_json(attempts),
        "attempt_count": len(attempts),
        "prompt_tokens": projection.usage.prompt_tokens,
        "completion_tokens": projection.usage.completion_tokens,
        "discarded_tokens": projection.usage.discarded_tokens,
        "error_code": projection.error_code,
        "error_message": projection.error_message,
        "queued_at": projection.queued_at,
        "started_at": projection.started_at,
    }
