"""Activities that write a task's row, on the control worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure import names
from perdure.contracts import AttemptRecord, Beat, CommitReceipt, Outcome, Projection, TaskResult, Usage
from perdure.observability.metrics import Metrics
from perdure.observability.traces import record_task, span, task_traceparent
from perdure.store.engine import Store
from perdure.store.errors import StoreRefused, StoreUnavailable
from perdure.task.errors import ErrorCode
from perdure.task.states import Status
from perdure.task.text import clean_json
from perdure.temporal import EngineRefused, EngineUnavailable, TemporalGate

log = logging.getLogger(__name__)


class RecordActivities:
    """Projections and outcomes. `on_room` is called when a row left the dispatcher's window."""

    def __init__(
        self, store: Store, gate: TemporalGate, metrics: Metrics, on_room: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._gate, self._metrics, self._on_room = store, gate, metrics, on_room

    @activity.defn(name=names.ACT_RECORD_NOW)
    async def record_now(self, projection: Projection) -> bool:
        """Writes an intermediate projection in one short try. False when the row was further already."""
        return await self._project(projection)

    @activity.defn(name=names.ACT_RECORD)
    async def record(self, projection: Projection) -> bool:
        """The same, retried until it lands or a later one replaces it."""
        return await self._project(projection)

    async def _project(self, projection: Projection) -> bool:
        try:
            taken = await self._store.tasks.project(projection)
        except StoreUnavailable as error:
            raise ApplicationError("Postgres is not available", type="StoreUnavailable") from error
        except StoreRefused:
            taken = await self._store.tasks.project(_cleaned_projection(projection))
        self._on_room()
        return taken

    @activity.defn(name=names.ACT_COMMIT_OUTCOME)
    async def commit_outcome(self, outcome: Outcome) -> CommitReceipt:
        """Commits the end of a task with its callback, once: `superseded` when the row was final before."""
        above = task_traceparent(outcome.traceparent, outcome.projection.task_id)
        with span("commit", parent=above) as one:
            receipt = await self._commit(outcome)
            one.set("perdure.commit", receipt.kind)
            return receipt

    async def commit_again(self, outcome: Outcome) -> CommitReceipt:
        """The same for an outcome that the row has lost; its callback is due at once, no workflow sends it.

        Raises StoreUnavailable.
        """
        return await self._written(outcome, quick=False)

    async def _commit(self, outcome: Outcome) -> CommitReceipt:
        if outcome.take_last_beat:
            outcome = await self._with_last_beat(outcome)
        try:
            return await self._written(outcome, quick=True)
        except StoreUnavailable as error:
            raise ApplicationError("Postgres is not available", type="StoreUnavailable") from error

    async def _written(self, outcome: Outcome, *, quick: bool) -> CommitReceipt:
        """Commits it, or what is left of it when Postgres refuses some: an end is never refused for ever."""
        for poorer in (_cleaned_outcome, _bare_outcome):
            try:
                receipt = await self._store.tasks.commit(outcome, quick=quick)
                break
            except StoreRefused:
                log.error("Postgres refuses an outcome", extra={"task_id": outcome.projection.task_id})
                outcome = poorer(outcome)
        else:
            receipt = await self._store.tasks.commit(outcome, quick=quick)
        self._on_room()
        if receipt.kind == "committed":
            self._count(outcome)
        return receipt

    async def _with_last_beat(self, outcome: Outcome) -> Outcome:
        """The text of the last heartbeat of a worker that did not answer the cancel."""
        projection = outcome.projection
        try:
            beat = await self._gate.describe_beat(projection.task_id)
        except (EngineUnavailable, EngineRefused) as error:
            raise ApplicationError("Temporal does not answer", type="EngineUnavailable") from error
        if beat is None:
            return outcome
        attempts = list(projection.attempts)
        if attempts:
            attempts[-1] = attempts[-1].model_copy(
                update={
                    "output_tokens": beat.output_tokens,
                    "resumed_from_tokens": beat.resumed_from_tokens,
                }
            )
        return outcome.model_copy(
            update={
                "projection": projection.model_copy(
                    update={"attempts": attempts, "progress": max(projection.progress, beat.progress)}
                ),
                "result": _partial(beat, outcome.result),
            }
        )

    def _count(self, outcome: Outcome) -> None:
        count_end(self._metrics, outcome)
        projection = outcome.projection
        record_task(
            outcome.traceparent,
            projection.task_id,
            start=outcome.due_at or projection.queued_at or outcome.completed_at,
            end=outcome.completed_at,
            status=projection.status,
            error_code=projection.error_code,
            attempts=projection.attempts,
            attributes={"perdure.model": outcome.model_id, "perdure.task.type": outcome.task_type},
        )
        log.info(
            "task finished",
            extra={
                "task_id": projection.task_id,
                "status": str(projection.status),
                "attempts": len(projection.attempts),
                "error_code": projection.error_code,
            },
        )


def count_end(metrics: Metrics, outcome: Outcome) -> None:
    """Counts a committed outcome: state, lost attempts, tokens and times. Unknown labels count as `other`."""
    projection, model, task_type = outcome.projection, outcome.model_id, outcome.task_type
    metrics.tasks_finished.labels(status=projection.status, task_type=task_type).inc()
    for attempt in projection.attempts:
        if attempt.outcome == "lost":  # the others were counted by their workers as they ended
            metrics.attempts.labels(outcome=attempt.outcome).inc()
            metrics.attempt_faults.labels(model=model, code=ErrorCode.WORKER_LOST).inc()
    usage = projection.usage
    metrics.tokens.labels(model=model, kind="prompt").inc(usage.prompt_tokens or 0)
    metrics.tokens.labels(model=model, kind="completion").inc(usage.completion_tokens or 0)
    metrics.tokens.labels(model=model, kind="discarded").inc(usage.discarded_tokens)
    if outcome.due_at:
        metrics.task_total.observe(_seconds(outcome.due_at, outcome.completed_at))
    if projection.started_at:
        metrics.task_execution.observe(_seconds(projection.started_at, outcome.completed_at))


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())


def _partial(beat: Beat, known: TaskResult | None) -> TaskResult | None:
    if not (beat.text or beat.reasoning):
        return known
    return TaskResult(
        text=beat.text or "", reasoning=beat.reasoning or None, model=known.model if known else None
    )


def _cleaned_projection(projection: Projection) -> Projection:
    return Projection.model_validate(clean_json(projection.model_dump(mode="json")))


def _cleaned_outcome(outcome: Outcome) -> Outcome:
    """What Postgres refuses, cleaned, as FAILED `internal`."""
    result = outcome.result
    if result is not None:
        result = TaskResult.model_validate(clean_json(result.model_dump(mode="json")))
    return _unstorable(outcome, _cleaned_projection(outcome.projection), result)


def _bare_outcome(outcome: Outcome) -> Outcome:
    """Nothing but the end, its times and the attempts' numbers."""
    projection = outcome.projection
    attempts = [
        AttemptRecord(number=a.number, started_at=a.started_at, ended_at=a.ended_at, outcome=a.outcome)
        for a in projection.attempts
    ]
    bare = projection.model_copy(update={"attempts": attempts, "usage": Usage()})
    return _unstorable(outcome, bare, None)


def _unstorable(outcome: Outcome, projection: Projection, result: TaskResult | None) -> Outcome:
    failed = projection.model_copy(
        update={
            "status": Status.FAILED,
            "error_code": ErrorCode.INTERNAL.value,
            "error_message": "the result held data that cannot be stored; what could be stored was kept",
        }
    )
    return outcome.model_copy(update={"projection": failed, "result": result})
