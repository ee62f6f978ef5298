"""Starting workflows for claimed rows: how many at once, what an answer means, and transition 1.

starts = Starts(store, gate, catalogue, metrics)
starts.begin(row, class_users)      at once; its outcome is told to the row
await starts.flush_forever()        beside it: writes QUEUED in batches
await starts.aclose()
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Final

from perdure.models import Catalogue
from perdure.observability.ends import ended_in_place
from perdure.observability.metrics import Metrics
from perdure.start import task_input
from perdure.store.engine import Store
from perdure.store.errors import StoreError
from perdure.store.rows import TaskRow
from perdure.task.errors import ErrorCode
from perdure.task.states import Priority, Status
from perdure.temporal import EngineRefused, EngineUnavailable, TemporalGate

log = logging.getLogger(__name__)

HIGH_LANE: Final = 1
_SLOW_START: Final = 0.05  # seconds: above that parallel starts are halved
_MAX_PARALLEL: Final = 32
_MAX_PAUSE: Final = 5.0  # seconds between tries while Temporal does not answer
_ATTRIBUTE_CHECK: Final = 60.0  # seconds between looks for missing search attributes
_LAST_STARTS: Final = 2.0  # seconds that starts under way are given at the end


class Pace:
    """How many starts may run at once: 2 at first, more after quick starts, half after a slow one."""

    def __init__(self) -> None:
        self.limit = 2.0
        self._halved_at = 0.0

    def took(self, seconds: float, now: float) -> None:
        if seconds <= _SLOW_START:
            self.limit = min(_MAX_PARALLEL, self.limit + 1 / max(1.0, self.limit))
        elif now - self._halved_at > _SLOW_START:  # the starts of one slow moment count once
            self._halved_at = now
            self.limit = max(1.0, self.limit / 2)


class Starts:
    """The starts under way of one dispatcher. HIGH has one place of its own beside the pace."""

    def __init__(self, store: Store, gate: TemporalGate, catalogue: Catalogue, metrics: Metrics) -> None:
        self._store, self._gate, self._catalogue, self._metrics = store, gate, catalogue, metrics
        self._pace = Pace()
        self._running: set[asyncio.Task[None]] = set()
        self._high = 0
        self._started: list[tuple[TaskRow, datetime]] = []
        self._flush_wanted = asyncio.Event()
        self._pause_until = 0.0
        self._pause = 0.0
        self._attributes = False
        self._attributes_at = -_ATTRIBUTE_CHECK

    @property
    def paused(self) -> bool:
        """Whether starts wait because Temporal did not answer."""
        return time.monotonic() < self._pause_until

    @property
    def free(self) -> int:
        """Places for starts of any class."""
        return max(0, int(self._pace.limit) - (len(self._running) - self._high))

    @property
    def high_free(self) -> int:
        """HIGH's own place, when it is free."""
        return 1 - self._high

    @property
    def running(self) -> frozenset[asyncio.Task[None]]:
        """Starts under way."""
        return frozenset(self._running)

    async def aclose(self) -> None:
        """Finishes what is under way, or leaves it to its lease."""
        if self._running:
            await asyncio.wait(self._running, timeout=_LAST_STARTS)
        for start in self._running:
            start.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # One start -----------------------------------------------------------------------------------

    def begin(self, row: TaskRow, class_users: float) -> None:
        """Starts a row's workflow. `class_users`: the weights of all users who wait in its class, summed."""
        high = row.lane == HIGH_LANE and self._high == 0
        self._high += high
        start = asyncio.create_task(self._start(row, class_users), name=f"start-{row.task_id}")
        self._running.add(start)

        def over(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            self._high -= high
            if not task.cancelled() and task.exception():
                log.error("a start failed unexpectedly", exc_info=task.exception())

        start.add_done_callback(over)

    async def _start(self, row: TaskRow, class_users: float) -> None:
        """An unknown outcome leaves the row to its lease."""
        try:
            attributes = await self._attributes_known()
            task = task_input(row, self._catalogue, search_attributes=attributes, class_users=class_users)
        except KeyError:
            await self._model_gone(row)
            return
        except EngineUnavailable:
            self._pause_starts()
            return
        began = time.monotonic()
        try:
            await self._gate.start_task(task)
        except EngineUnavailable:
            self._pause_starts()
            return
        except Exception as error:  # refused, or an input that cannot even be encoded: the row's own fault
            await self._refused(row, error)
            return
        self._pause = 0.0
        now = time.monotonic()
        self._pace.took(now - began, now)
        self._started.append((row, datetime.now(UTC)))
        self._flush_wanted.set()

    async def _attributes_known(self) -> bool:
        """Whether search attributes may be carried; looked up again once a minute while they are missing."""
        now = time.monotonic()
        if not self._attributes and now - self._attributes_at > _ATTRIBUTE_CHECK:
            self._attributes_at = now
            try:
                self._attributes = await self._gate.search_attributes_registered()
            except EngineUnavailable:
                self._attributes_at = -_ATTRIBUTE_CHECK
                raise
            if not self._attributes:
                log.warning("Temporal lacks our search attributes; run: perdure migrate")
        return self._attributes

    def _pause_starts(self) -> None:
        self._pause = min(_MAX_PAUSE, self._pause * 2 or 0.25)
        self._pause_until = time.monotonic() + self._pause
        log.warning("Temporal does not answer; starts wait", extra={"seconds": self._pause})

    async def _refused(self, row: TaskRow, error: Exception) -> None:
        failures = await self._store.dispatch.refuse(
            row.task_id, "the workflow engine refused to start this task; see the log of the dispatcher"
        )
        log.error(
            "a start is refused",
            extra={"task_id": row.task_id, "failures": failures, "reason": type(error).__name__},
        )
        if failures >= 3:
            self._failed(row)

    async def _model_gone(self, row: TaskRow) -> None:
        receipt = await self._store.maintenance.fail(
            row.task_id,
            row.version,
            ErrorCode.MODEL_UNKNOWN,
            f"model '{row.model_id}' is no longer configured; submit the task again with another model_id",
        )
        if receipt.kind == "committed":
            self._failed(row)

    def _failed(self, row: TaskRow) -> None:
        ended_in_place(self._metrics, row, Status.FAILED)

    # Transition 1 --------------------------------------------------------------------------------

    async def flush_forever(self) -> None:
        """Writes QUEUED for what was started, until cancelled."""
        while True:
            await self._flush_wanted.wait()
            self._flush_wanted.clear()
            batch, self._started = self._started, []
            try:
                flagged = await self._store.dispatch.queued(
                    [(row.task_id, at) for row, at in batch], {row.task_id: row.priority for row, _ in batch}
                )
            except StoreError:
                # The lease runs out, the same ids are started again ("already started") and written then.
                log.warning("transition to QUEUED waits for Postgres", extra={"rows": len(batch)})
                continue
            except Exception:  # whatever it is, the next batch is written
                log.exception("transition to QUEUED stumbled; the leases bring it again")
                continue
            for found in flagged:
                if found.cancel_requested:
                    await self._signal_cancel(found.task_id, found.cancel_reason)
                elif found.priority is not None:
                    await self._signal_priority(found.task_id, found.priority)

    async def _signal_cancel(self, task_id: str, reason: str | None) -> None:
        try:
            await self._gate.signal_cancel(task_id, reason)
        except (EngineUnavailable, EngineRefused):
            log.warning("cancel is left to the reconciler", extra={"task_id": task_id})

    async def _signal_priority(self, task_id: str, priority: Priority) -> None:
        """Its class was changed between the claim and the start."""
        try:
            await self._gate.signal_priority(task_id, priority.value)
        except (EngineUnavailable, EngineRefused):
            log.warning("a change of class did not reach its task", extra={"task_id": task_id})
