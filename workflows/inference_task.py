"""InferenceTask: one task from its queue to its outcome. Orchestration only; the rules are in perdure.task.

A change to the order of its commands goes through `workflow.patched` (CONTRIBUTING): histories are replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Literal

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    import json

    from perdure import names
    from perdure.contracts import (
        MAX_INLINE_PARAMS_BYTES,
        AttemptStarted,
        CommitReceipt,
        DeliverInput,
        GenerateInput,
        GenerateResult,
        Limits,
        Outcome,
        Snapshot,
        TaskInput,
        TaskResult,
    )
    from perdure.task import policy
    from perdure.task.errors import ErrorCode
    from perdure.task.lifecycle import Again, Finish, Lifecycle
    from perdure.task.states import Priority, Status
    from perdure.task.story import details
    from perdure.task.text import reason_text
    from workflows.attempt import Ending, ending_of, start_generate
    from workflows.row import UNTIL_DONE, keep_row

_QUICK_TRIES = RetryPolicy(maximum_interval=timedelta(seconds=8), maximum_attempts=policy.QUICK_TRIES)
_ONE_TRY = timedelta(seconds=45)  # a callback's 30 s and its records
_ALL_QUICK_TRIES = timedelta(minutes=2)

Waiting = Literal["slot", "back_off", "record", "callback"]


@workflow.defn(name=names.WF_INFERENCE_TASK)
class InferenceTask:
    """One task. Its workflow id is the task id; its state is the authority, the row a projection of it."""

    @workflow.init
    def __init__(self, task: TaskInput) -> None:
        self.task = task
        self.life = Lifecycle(task, workflow.now())
        self.cancelled = task.cancel_requested
        self.cancel_reason = task.cancel_reason
        self.priority = task.priority
        self.lane = task.lane or policy.priority_key(task.priority)
        self.lane_since = task.lane_since or task.not_before or task.created_at
        self.lane_moved = False
        self.waiting: Waiting | None = None
        self.announced: tuple[int, str, datetime] | None = None
        # The dispatcher writes transition 1; a restart writes its own.
        self._written = self.life.version if task.base_version == 0 else 0
        self.result: TaskResult | None = None
        self.worker_silent = False
        fits = len(json.dumps(task.params)) <= MAX_INLINE_PARAMS_BYTES
        self.params = task.params if fits else None

    # Messages ------------------------------------------------------------------------------------

    # A handler that raises fails the workflow task, again and again: these take any arguments, since a person
    # may send them from a shell.

    @workflow.signal(name=names.SIG_CANCEL)
    def cancel(self, *reason: Any) -> None:
        """Asks the task to stop. Takes a reason as text, as `{"reason": ...}`, or nothing."""
        self.cancel_reason = self.cancel_reason or (reason_text(reason[0]) if reason else None)
        self.cancelled = True

    @workflow.signal(name=names.SIG_ATTEMPT_STARTED)
    def attempt_started(self, *told: Any) -> None:
        """A GPU worker runs an attempt: number, worker, at. Only noted here; the main routine acts."""
        try:
            number, worker, at = told
            start = AttemptStarted(number=number, worker=worker, at=at)
        except ValueError:  # no announcement of ours
            return
        self.announced = (start.number, start.worker, start.at)

    @workflow.signal(name=names.SIG_SET_PRIORITY)
    def set_priority(self, *priority: Any) -> None:
        """Moves a waiting task to another class; unknown names change nothing."""
        name = priority[0] if priority else None
        if name in [str(known) for known in Priority] and name != self.priority:
            self.priority = Priority(name)
            self.lane, self.lane_since = policy.priority_key(self.priority), workflow.now()
            self.lane_moved = True

    @workflow.query(name=names.QUERY_SNAPSHOT)
    def snapshot(self) -> Snapshot:
        """The live state."""
        return Snapshot(
            projection=self.life.project(),
            cancel_requested=self.cancelled,
            cancel_reason=self.cancel_reason,
            attempt=self.life.attempts[-1].number if self.life.attempts else 0,
            waiting=self.waiting,
        )

    # Steps ---------------------------------------------------------------------------------------

    @workflow.run
    async def run(self, task: TaskInput) -> CommitReceipt:
        """Attempts until there is an end, commits it, delivers its callback."""
        steps = asyncio.create_task(self._steps())
        # A run that leaves the worker's cache has its steps cancelled, too: then they are done, and it goes.
        while not steps.done():
            try:
                await workflow.wait([steps])
            except asyncio.CancelledError:
                self.cancel("cancelled in Temporal")  # the one place where Temporal's own cancel comes in
        return steps.result()

    async def _steps(self) -> CommitReceipt:
        writer = asyncio.create_task(keep_row(self.life, self._written, self._upsert_status))
        end = await self._attempts()
        self.life.finish(end)
        receipt = await self._commit()
        await writer  # it ends with the task; at most its last local activity is under way
        if receipt.delivery_id:
            await self._deliver(receipt.delivery_id)
        self._tell(None)
        return receipt

    async def _attempts(self) -> Finish:
        ahead = False
        while True:
            if end := self._early_end():
                return end
            number = self.life.begin()
            after = await self._attempt(number, ahead)
            if isinstance(after, Finish):
                return after
            ahead = after.ahead
            if after.delay:
                await self._back_off(after.delay, number + 1)
            self.lane_since = workflow.now()

    def _early_end(self) -> Finish | None:
        """An end for which no attempt is needed: cancelled, or out of time."""
        now, failed = workflow.now(), Status.FAILED
        if self.cancelled:
            return Finish(Status.CANCELLED, None, None)
        if policy.past(self.task.total_deadline, now):
            return Finish(
                failed, ErrorCode.DEADLINE_EXCEEDED, "the task's deadline (deadline_seconds) passed"
            )
        if self.life.started_at is None and policy.past(self.task.queue_deadline, now, 0.02):
            return Finish(
                failed,
                ErrorCode.QUEUE_EXPIRED,
                "no GPU slot became free within queue_timeout_seconds; raise it, or add workers to pool "
                f"'{self.task.pool}'",
            )
        return None

    async def _attempt(self, number: int, ahead: bool) -> Again | Finish:
        """One attempt to its end. While it waits it may move to a better lane, under the same number."""
        while True:
            self.lane_moved = False
            place = policy.place(self.task, self.priority, self.lane, ahead=ahead)
            handle = start_generate(self.task, self._given(number), place, self._patience())
            self._tell("slot")
            if not await self._watch(handle):
                self.worker_silent = True
                return self._cut_short()
            ending = await ending_of(handle)
            if ending.kind not in ("waited", "never_started"):
                return self._settle(ending)
            if self._early_end():
                return self._cut_short()
            if ending.kind == "waited":
                self.lane, self.lane_since = policy.next_lane(self.lane), workflow.now()

    def _given(self, number: int) -> GenerateInput:
        return GenerateInput(
            task_id=self.task.task_id,
            attempt=number,
            model_id=self.task.model_id,
            params=self.params,
            checkpoint=self.life.checkpoint,
            limits=Limits(
                attempt_seconds=self.task.timeout_seconds,
                heartbeat_seconds=self.task.heartbeat_seconds,
                max_output_bytes=self.task.max_output_bytes,
            ),
            traceparent=self.task.traceparent,
            due_at=None if self.life.started_at else self.task.not_before or self.task.created_at,
        )

    def _patience(self) -> timedelta | None:
        """How long the attempt may wait for a slot before something is decided. The server measures it."""
        limits, now = [], workflow.now()
        if self.life.started_at is None and self.task.queue_deadline:
            limits.append((self.task.queue_deadline - now).total_seconds())
        if self.task.scheduling.mode == "strict" and self.lane > 1:
            wait = self.task.scheduling.max_wait * workflow.random().uniform(0.9, 1.1)
            limits.append(wait - (now - self.lane_since).total_seconds())
        return timedelta(seconds=max(0.05, min(limits))) if limits else None

    def _settle(self, ending: Ending) -> Again | Finish:
        """What an attempt that ran means for the task."""
        life, now = self.life, workflow.now()
        life.ran(ending.worker, ending.started_at)
        life.take(ending.beat)
        life.spend(ending.usage)
        if self.cancelled:  # it stands earlier in history than the attempt's end, whatever that says
            self.result = ending.result
            return self._cut_short()
        if ending.kind == "generated":
            self.result = ending.result
            return life.generated(now)
        if ending.kind == "lost":
            return life.lost(now)
        if ending.fault is not None:
            return life.faulted(ending.fault, now, workflow.random().uniform(0.5, 1.0))
        if ending.kind == "cancelled" and self._early_end():
            return self._cut_short()
        return life.drained(now)  # a drain, or taken off its lane just as it started

    def _cut_short(self) -> Finish:
        """The end that stopped the attempt: a cancel or a deadline."""
        end = self._early_end() or Finish(Status.CANCELLED)
        self.life.stopped(workflow.now(), end.code, end.message)
        return end

    # Waiting -------------------------------------------------------------------------------------

    async def _watch(self, handle: workflow.ActivityHandle[GenerateResult]) -> bool:
        """Follows the run to its end. False when its worker does not answer a cancel."""
        while True:
            passed = await self._until(lambda: handle.done() or self.cancelled or self._news())
            if handle.done():
                return True
            if passed or self.cancelled:
                handle.cancel()
                return await self._answers(handle)
            if self._announced_now():
                self._note_start()
            elif self.lane_moved:
                self.lane_moved = False
                handle.cancel()

    def _news(self) -> bool:
        return self._announced_now() or (self.lane_moved and self.life.status is Status.QUEUED)

    def _announced_now(self) -> bool:
        """A start that the row does not show yet. A signal of an old attempt is none."""
        return (
            self.announced is not None
            and self.announced[0] == self.life.attempt.number
            and self.life.status is Status.QUEUED
        )

    def _note_start(self) -> None:
        assert self.announced is not None
        self.life.started(self.announced[1], self.announced[2])
        self._tell(None)

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Waits for the condition; True when the total deadline came first. Without one there is no timer."""
        deadline = self.task.total_deadline
        if deadline is None:
            await workflow.wait_condition(condition)
            return False
        left = timedelta(seconds=max(0.001, (deadline - workflow.now()).total_seconds()))
        try:
            await workflow.wait_condition(condition, timeout=left, timeout_summary="deadline_seconds")
        except TimeoutError:
            return True
        return False

    async def _answers(self, handle: workflow.ActivityHandle[GenerateResult]) -> bool:
        patience = timedelta(seconds=policy.CANCEL_PATIENCE)
        try:
            await workflow.wait_condition(handle.done, timeout=patience, timeout_summary="worker's answer")
        except TimeoutError:
            return False
        return True

    async def _back_off(self, seconds: float, number: int) -> None:
        self._tell("back_off")
        wait, summary = timedelta(seconds=seconds), f"back-off before attempt {number}"
        try:
            await workflow.wait_condition(lambda: self.cancelled, timeout=wait, timeout_summary=summary)
        except TimeoutError:
            pass

    # Records -------------------------------------------------------------------------------------

    async def _commit(self) -> CommitReceipt:
        self._tell("record")
        self._upsert_status()
        receipt: CommitReceipt = await workflow.execute_activity(
            names.ACT_COMMIT_OUTCOME,
            Outcome(
                projection=self.life.project(),
                result=self.result or self.life.partial(),
                completed_at=workflow.now(),
                take_last_beat=self.worker_silent,
                model_id=self.task.model_id,
                task_type=self.task.task_type,
                due_at=self.task.not_before or self.task.created_at,
                traceparent=self.task.traceparent,
            ),
            result_type=CommitReceipt,
            start_to_close_timeout=timedelta(seconds=10),
            retry_policy=UNTIL_DONE,
            summary=f"outcome: {self.life.status}",
        )
        return receipt

    async def _deliver(self, delivery_id: str) -> None:
        """The quick tries. Whatever they leave waits in the table for the sweep."""
        self._tell("callback")
        try:
            await workflow.execute_activity(
                names.ACT_DELIVER_CALLBACK,
                DeliverInput(
                    task_id=self.task.task_id, delivery_id=delivery_id, traceparent=self.task.traceparent
                ),
                task_queue=names.CALLBACKS_QUEUE,
                start_to_close_timeout=_ONE_TRY,
                schedule_to_close_timeout=_ALL_QUICK_TRIES,
                retry_policy=_QUICK_TRIES,
                summary=f"callback: {self.life.status}",
            )
        except ActivityError:
            workflow.logger.info("callback left to the sweep", extra={"task_id": self.task.task_id})

    # Telling -------------------------------------------------------------------------------------

    def _tell(self, waiting: Waiting | None) -> None:
        self.waiting = waiting
        workflow.set_current_details(details(self.life, waiting, self.cancelled))

    def _upsert_status(self) -> None:
        """Rides along with a command that goes out anyway; only what the start carried is upserted."""
        if self.task.search_attributes:
            workflow.upsert_search_attributes([names.SA_STATUS.value_set(str(self.life.status))])
