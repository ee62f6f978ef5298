"""Tasks that end in their row, with no workflow to commit them: a cancel or an expiry before the first start,
and what the reconciler gives up."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure.observability.metrics import Metrics
from perdure.observability.traces import record_task
from perdure.store.rows import TaskRow
from perdure.task.states import Status


def ended_in_place(metrics: Metrics, row: TaskRow, status: Status | None = None) -> None:
    """Counts the end of a task and writes its span. `status` where the row at hand is older than its end."""
    status, end = status or row.status, row.completed_at or datetime.now(UTC)
    due = row.not_before or row.created_at
    metrics.tasks_finished.labels(status=status, task_type=row.task_type).inc()
    metrics.task_total.observe(max(0.0, (end - due).total_seconds()))
    record_task(
        row.traceparent,
        row.task_id,
        start=min(due, end),
        end=end,
        status=status,
        error_code=row.error_code,
        attributes={
            "perdure.model": row.model_id,
            "perdure.task.type": metrics.catalogue.type_label(row.task_type),
        },
    )
