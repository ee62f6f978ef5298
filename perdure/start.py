"""A row as the start input of its workflow: one function for the dispatcher and the reconciler."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from perdure.contracts import Scheduling, TaskInput
from perdure.models import Catalogue, Pool
from perdure.store.rows import TaskRow
from perdure.task.policy import lane_key, priority_key

MAX_LOST: Final = 5


def task_input(
    row: TaskRow, catalogue: Catalogue, *, search_attributes: bool, class_users: float = 1.0
) -> TaskInput:
    """The start input of a row's workflow; the row holds params and attempts.

    Figures that run (version, attempts, retries, usage) come from the row, so that a restart goes on.
    Raises KeyError when its model is no longer in models.toml.
    """
    model = catalogue.models[row.model_id]
    pool = catalogue.pools[model.pool]
    attempts = row.attempts
    return TaskInput(
        task_id=row.task_id,
        user_id=row.user_id,
        model_id=row.model_id,
        task_type=row.task_type,
        priority=row.priority,
        pool=model.pool,
        params=row.params or {},
        base_version=row.version,
        max_retries=row.max_retries,
        max_lost=MAX_LOST,
        retry_count=row.retry_count,
        lost_count=sum(attempt.outcome == "lost" for attempt in attempts),
        attempts=attempts,
        usage=row.usage,
        created_at=row.created_at,
        not_before=row.not_before,
        queued_at=row.queued_at,
        started_at=row.started_at,
        queue_deadline=row.queue_deadline,
        total_deadline=row.total_deadline,
        timeout_seconds=row.timeout_seconds,
        heartbeat_seconds=model.heartbeat_timeout,
        unavailable_patience=model.unavailable_patience,
        max_output_bytes=model.max_output_bytes,
        scheduling=Scheduling(
            mode=pool.scheduling,
            max_wait=pool.max_wait,
            weights={str(name): weight for name, weight in pool.weights.items()},
        ),
        lane=lane_key(row.lane),
        lane_since=_lane_since(row, pool),
        user_weight=catalogue.weight_of(row.user_id),
        class_users=class_users,
        cancel_requested=row.cancel_requested,
        cancel_reason=row.cancel_reason,
        search_attributes=search_attributes,
        callbacks=row.callback_url is not None,
        traceparent=row.traceparent,
    )


def _lane_since(row: TaskRow, pool: Pool) -> datetime:
    """Since when the row waits on its lane: each class that it moved up took one `max_wait`."""
    due = max(row.created_at, row.not_before) if row.not_before else row.created_at
    classes_up = (priority_key(row.priority) - lane_key(row.lane)) // 2
    return due + timedelta(seconds=max(0, classes_up) * pool.max_wait)
