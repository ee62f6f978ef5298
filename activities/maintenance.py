"""Upkeep on the control worker: the reconciler and retention."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecution, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError

from perdure import names
from perdure.contracts import CommitReceipt, Outcome
from perdure.models import Catalogue
from perdure.observability.ends import ended_in_place
from perdure.observability.metrics import Metrics
from perdure.start import task_input
from perdure.store.engine import Store
from perdure.store.errors import StoreUnavailable
from perdure.store.rows import TaskRow
from perdure.task.errors import ErrorCode
from perdure.task.states import Status
from perdure.temporal import EngineRefused, EngineUnavailable, TemporalGate, bounded

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 60.0
CANCEL_SECONDS: Final = 5.0
_BATCH: Final = 100
_STUCK_TRIES: Final = 2  # of one workflow task; a killed worker costs one, and the alert waits that out
_PAGE: Final = 500  # closed runs looked up in the store at once
_OVERLAP: Final = timedelta(seconds=30)  # visibility lags behind: each pass looks a little further back
_FIRST_LOOK: Final = timedelta(hours=1)
_MARK: Final = "visibility"
_CLOSED_BADLY: Final = (
    f"WorkflowType = '{names.WF_INFERENCE_TASK}' AND ExecutionStatus IN "
    "('Terminated', 'Failed', 'TimedOut', 'Canceled')"
)
_TERMINATED = (WorkflowExecutionStatus.TERMINATED, WorkflowExecutionStatus.CANCELED)


class MaintenanceActivities:
    """Every repair is compare-and-set on the row, logged and counted; two passes at once do no harm.

    `commit` writes an outcome that the row has lost (RecordActivities.commit_again).
    """

    def __init__(
        self,
        store: Store,
        client: Client,
        catalogue: Catalogue,
        metrics: Metrics,
        *,
        commit: Callable[[Outcome], Awaitable[CommitReceipt]],
        retention_days: int,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._store, self._client, self._catalogue, self._metrics = store, client, catalogue, metrics
        self._gate, self._commit = TemporalGate(client), commit
        self._retention_days, self._silent = retention_days, silent_seconds

    @activity.defn(name=names.ACT_RECONCILE)
    async def reconcile(self) -> int:
        """One pass; returns how many rows it repaired.

        Raises StoreUnavailable. Nothing else ends a pass: what cannot be looked at is logged and left for the
        next one, so that one odd row or a visibility store that is down holds up no other repair.
        """
        try:
            repaired = await self._closed_badly()
        except (RPCError, EngineUnavailable, EngineRefused) as error:
            log.warning("closed runs cannot be listed", extra={"reason": type(error).__name__})
            repaired = 0
        for row in await self._store.maintenance.cancels_due(CANCEL_SECONDS, _BATCH):
            repaired += await self._each(self._signal_again, row)
        for row in await self._store.maintenance.silent(self._silent, _BATCH):
            repaired += await self._each(self._settle, row)
        self._metrics.reconciler_last_run.set_to_current_time()
        return repaired

    async def _each(self, repair: Callable[[TaskRow], Awaitable[int]], row: TaskRow) -> int:
        """One repair, which may fail by itself: a payload of another key, an answer that nobody foresaw."""
        activity.heartbeat()
        try:
            return await repair(row)
        except StoreUnavailable:
            raise
        except Exception as error:
            log.error(
                "row cannot be repaired", extra={"task_id": row.task_id, "reason": type(error).__name__}
            )
            return 0

    async def _closed_badly(self) -> int:
        """Runs that ended without committing, since the mark: a terminate shows within one pass."""
        now = datetime.now(UTC)
        mark = await self._store.maintenance.mark(_MARK) or now - _FIRST_LOOK
        since = (mark - _OVERLAP).strftime("%Y-%m-%dT%H:%M:%SZ")
        repaired, page = 0, []
        async for run in self._client.list_workflows(f"{_CLOSED_BADLY} AND CloseTime >= '{since}'"):
            page.append(run.id)
            if len(page) >= _PAGE:
                repaired += await self._settle_open(page)
                page = []
        repaired += await self._settle_open(page)
        await self._store.maintenance.set_mark(_MARK, now)
        return repaired

    async def _settle_open(self, task_ids: list[str]) -> int:
        activity.heartbeat()
        rows = await self._store.maintenance.open_of(task_ids) if task_ids else []
        return sum([await self._each(self._settle, row) for row in rows])

    async def _signal_again(self, row: TaskRow) -> int:
        try:
            told = await self._gate.signal_cancel(row.task_id, row.cancel_reason)
        except (EngineUnavailable, EngineRefused):
            return 0
        return self._repaired("cancel_signalled", row) if told else await self._settle(row)

    async def _settle(self, row: TaskRow) -> int:
        """Looks at a row's latest run and makes the row agree with it. 1 when something was repaired."""
        handle = self._client.get_workflow_handle(row.task_id)
        try:
            latest = await bounded(handle.describe())
        except RPCError:
            return await self._missing(row)
        except (EngineUnavailable, EngineRefused):
            return 0
        if latest.status is WorkflowExecutionStatus.RUNNING:
            self._look_at_running(row, latest.raw_description.pending_workflow_task.attempt)
            return 0
        if latest.status is WorkflowExecutionStatus.COMPLETED:
            return await self._commit_again(row, latest)
        if latest.status in _TERMINATED:
            code, message = ErrorCode.TERMINATED, "the task's workflow was terminated by an operator"
        else:
            code, message = (
                ErrorCode.INTERNAL,
                "the task's workflow failed; see its history in the Temporal UI",
            )
        return await self._fail(row, code, message)

    def _look_at_running(self, row: TaskRow, tries: int) -> None:
        """A run goes on by itself, unless our code or our key cannot read its history: that is told."""
        if tries < _STUCK_TRIES:
            return
        self._metrics.workflows_stuck.inc()
        log.error(
            "a workflow cannot go on; see its pending task in the Temporal UI", extra={"task_id": row.task_id}
        )

    async def _commit_again(self, row: TaskRow, run: WorkflowExecution) -> int:
        """The run committed, but the row lost it: the outcome stands in the run's history."""
        handle = self._client.get_workflow_handle(row.task_id, run_id=run.run_id)
        outcome = await self._outcome_of(handle)
        if outcome is None:
            return await self._fail(row, ErrorCode.INTERNAL, "the task's workflow ended without an outcome")
        receipt = await self._commit(outcome)
        return self._repaired("committed", row) if receipt.kind == "committed" else 0

    async def _outcome_of(self, handle: WorkflowHandle[Any, Any]) -> Outcome | None:
        """The input of the last `commit_outcome`."""
        found: Outcome | None = None
        async for event in handle.fetch_history_events():
            if event.event_type != EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
                continue
            scheduled = event.activity_task_scheduled_event_attributes
            if scheduled.activity_type.name == names.ACT_COMMIT_OUTCOME:
                (found,) = await self._client.data_converter.decode(scheduled.input.payloads, [Outcome])
        return found

    async def _missing(self, row: TaskRow) -> int:
        """The engine does not know the task: at the second sight it is started once more, then failed."""
        noted = await self._store.maintenance.note_missing(row.task_id, row.version)
        if noted is None or noted.age < self._silent:
            return 0
        restart = await self._store.maintenance.restart(row.task_id, row.version)
        if restart is None:
            return await self._fail(
                row, ErrorCode.INTERNAL, "the workflow engine lost this task twice; submit it again"
            )
        try:
            attributes = await self._gate.search_attributes_registered()
            task = task_input(restart, self._catalogue, search_attributes=attributes)
            await self._gate.start_task(task)
        except KeyError:
            message = f"model '{row.model_id}' is no longer configured; submit the task with another model_id"
            return await self._fail(restart, ErrorCode.MODEL_UNKNOWN, message)
        except EngineUnavailable:  # the start may have been taken: then the workflow writes its row
            await self._store.maintenance.not_restarted(row.task_id, row.version)
            return 0
        return self._repaired("restarted", row)

    async def _fail(self, row: TaskRow, code: ErrorCode, message: str) -> int:
        receipt = await self._store.maintenance.fail(row.task_id, row.version, code.value, message)
        if receipt.kind != "committed":
            return 0
        ended_in_place(self._metrics, row, Status.FAILED)
        return self._repaired("terminated" if code is ErrorCode.TERMINATED else "failed", row)

    def _repaired(self, kind: str, row: TaskRow) -> int:
        self._metrics.reconciler_repairs.labels(kind=kind).inc()
        log.warning("row repaired", extra={"task_id": row.task_id, "repair": kind})
        return 1

    @activity.defn(name=names.ACT_PURGE)
    async def purge_expired(self) -> int:
        """Deletes final tasks past retention in batches; returns how many rows went."""
        removed = 0
        while not activity.is_cancelled():
            purged = await self._store.maintenance.purge(self._retention_days)
            removed += purged.total
            activity.heartbeat()
            if not purged.total:
                break
        return removed
