"""The life of one task, as its workflow decides it: pure, no clock and no randomness of its own.

The workflow asks (`begin`, `started`, `faulted`, ...), does what the answer says and projects the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from perdure.contracts import AttemptRecord, Beat, FaultDetails, Projection, TaskInput, TaskResult, Usage
from perdure.task import policy
from perdure.task.errors import ErrorCode
from perdure.task.states import Status, may_move


@dataclass(frozen=True)
class Again:
    """Another attempt follows after `delay` seconds; `ahead` when it keeps its place (drained or lost)."""

    delay: float = 0.0
    ahead: bool = False


@dataclass(frozen=True)
class Finish:
    """The task ends."""

    status: Status
    code: str | None = None
    message: str | None = None


@dataclass
class Lifecycle:
    """State of a running task. `version` is the transition number; `now` is always the workflow's clock."""

    task: TaskInput
    now: datetime
    status: Status = Status.QUEUED
    version: int = 0
    progress: int = 0
    retry_count: int = 0
    lost_count: int = 0
    refusals: int = 0  # in a row
    refused_since: datetime | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    checkpoint: Beat | None = None
    error_code: str | None = None
    error_message: str | None = None
    queued_at: datetime | None = None
    started_at: datetime | None = None
    next_attempt_at: datetime | None = None

    def __post_init__(self) -> None:
        task = self.task
        self.version = task.base_version + 1
        self.retry_count, self.lost_count = task.retry_count, task.lost_count
        self.attempts = [_closed(record, self.now) for record in task.attempts]
        self.usage, self.checkpoint = task.usage, task.checkpoint
        self.queued_at, self.started_at = task.queued_at or self.now, task.started_at
        if self.checkpoint:
            self.progress = self.checkpoint.progress

    # Moves ---------------------------------------------------------------------------------------

    def _move(self, new: Status) -> None:
        if self.status is not new:
            if not may_move(self.status, new):
                raise ValueError(f"a task never moves from {self.status} to {new}")
            self.status = new
        self.version += 1

    def begin(self) -> int:
        """Opens the next attempt's record and returns its number."""
        number = self.attempts[-1].number + 1 if self.attempts else 1
        self.attempts.append(AttemptRecord(number=number))
        self.next_attempt_at = None
        return number

    @property
    def attempt(self) -> AttemptRecord:
        return self.attempts[-1]

    def _edit(self, **changes: object) -> None:
        self.attempts[-1] = self.attempts[-1].model_copy(update=changes)

    def started(self, worker: str, at: datetime) -> bool:
        """The open attempt runs. False when that is known already."""
        if self.status is Status.PROCESSING:
            return False
        self._edit(worker=worker, started_at=at)
        self.started_at = self.started_at or at
        self._move(Status.PROCESSING)
        return True

    def ran(self, worker: str | None, at: datetime | None) -> None:
        """An ended attempt tells who ran it; it may not have announced itself (under 250 ms, or lost)."""
        if at is not None and self.status is Status.QUEUED:
            self.started(worker or "", at)

    # Endings of an attempt -----------------------------------------------------------------------

    def take(self, beat: Beat | None) -> None:
        """Keeps an attempt's last beat as the checkpoint of the next. One without its text starts over."""
        if beat is None:
            return
        self._edit(output_tokens=beat.output_tokens, resumed_from_tokens=beat.resumed_from_tokens)
        self.progress = beat.progress
        self.checkpoint = beat if beat.text is not None else None
        if beat.text is None:
            self.spend(Usage(discarded_tokens=beat.output_tokens))

    def spend(self, usage: Usage) -> None:
        """Adds one attempt's tokens to the sum."""
        self.usage = Usage(
            prompt_tokens=_plus(self.usage.prompt_tokens, usage.prompt_tokens),
            completion_tokens=_plus(self.usage.completion_tokens, usage.completion_tokens),
            discarded_tokens=self.usage.discarded_tokens + usage.discarded_tokens,
        )

    def generated(self, now: datetime) -> Finish:
        self._edit(ended_at=now, outcome="completed")
        return Finish(Status.COMPLETED)

    def stopped(self, now: datetime, code: str | None = None, message: str | None = None) -> None:
        """The attempt was cut short by a cancel or a deadline."""
        if self.attempts and self.attempt.ended_at is None:
            self._edit(
                ended_at=now,
                outcome="failed" if code else "cancelled",
                error_code=str(code) if code else None,
                error_message=message,
            )

    def drained(self, now: datetime) -> Again | Finish:
        self._edit(ended_at=now, outcome="drained")
        return self._again(Again(ahead=True), now)

    def lost(self, now: datetime) -> Again | Finish:
        """The worker fell silent. Counts against a budget of its own."""
        message = "the worker stopped sending heartbeats; the task goes on from its last checkpoint"
        self._fault_record(now, ErrorCode.WORKER_LOST, message, lost=True)
        self.refusals, self.refused_since = 0, None
        if self.lost_count >= self.task.max_lost:
            return Finish(
                Status.FAILED,
                ErrorCode.WORKER_LOST,
                f"{self.lost_count + 1} workers were lost while they ran this task; look at their logs "
                "(out of memory, GPU fault), then submit it again with POST /v1/tasks/{id}/rerun",
            )
        self.lost_count += 1
        return self._again(Again(ahead=True), now)

    def faulted(self, fault: FaultDetails, now: datetime, jitter: float) -> Again | Finish:
        """A fault ends the attempt: retry after back-off, or the end of the task."""
        self._fault_record(now, fault.code, fault.message)
        if not fault.retryable:
            return Finish(Status.FAILED, fault.code, fault.message)
        patient = self._patient(fault, now)
        if not patient and self.retry_count >= self.task.max_retries:
            return Finish(Status.FAILED, fault.code, fault.message)
        if not fault.refused:
            self.refusals, self.refused_since = 0, None
        n = self.refusals if patient else self.retry_count
        after = self._again(Again(delay=policy.back_off(n, jitter, fault.retry_after)), now)
        if isinstance(after, Again):  # a wait that would pass the deadline is no retry
            self.refusals += patient
            self.retry_count += not patient
        return after

    def _patient(self, fault: FaultDetails, now: datetime) -> bool:
        """Whether a refusal before any output is still covered by the model's patience."""
        if not fault.refused:
            return False
        self.refused_since = self.refused_since or now
        return now - self.refused_since < timedelta(seconds=self.task.unavailable_patience)

    def _fault_record(self, now: datetime, code: str, message: str, lost: bool = False) -> None:
        self.error_code, self.error_message = str(code), message
        self._edit(
            ended_at=now, outcome="lost" if lost else "failed", error_code=str(code), error_message=message
        )

    def _again(self, again: Again, now: datetime) -> Again | Finish:
        """Checks what bounds all attempts, then moves the task back to QUEUED."""
        if len(self.attempts) >= policy.MAX_RUNS:
            return Finish(
                Status.FAILED,
                self.error_code or ErrorCode.INTERNAL,
                f"the task used all of its {policy.MAX_RUNS} attempts"
                + (f"; the last fault: {self.error_message}" if self.error_message else ""),
            )
        if policy.past(self.task.total_deadline, now, again.delay):
            return Finish(
                Status.FAILED,
                ErrorCode.DEADLINE_EXCEEDED,
                "the next attempt would start after the task's deadline"
                + (f"; the last fault: {self.error_message}" if self.error_message else ""),
            )
        self.next_attempt_at = now + timedelta(seconds=again.delay) if again.delay else None
        self._move(Status.QUEUED)
        return again

    # The end -------------------------------------------------------------------------------------

    def finish(self, end: Finish) -> None:
        """Moves to the final state; a quick attempt passes through PROCESSING without a row of its own."""
        if end.status is Status.COMPLETED and self.status is Status.QUEUED:
            self._move(Status.PROCESSING)
        self._move(end.status)
        self.error_code = str(end.code) if end.code else None
        self.error_message = end.message
        self.next_attempt_at = None
        if end.status is Status.COMPLETED:
            self.progress = 100

    def partial(self) -> TaskResult | None:
        """The text so far as a result, for a task that ends before its model did. None without any."""
        beat = self.checkpoint
        if beat is None or not (beat.text or beat.reasoning):
            return None
        return TaskResult(
            text=beat.text or "",
            reasoning=beat.reasoning or None,
            model=self.task.model_id,
            resumed=len(self.attempts) > 1 and beat.resumed_from_tokens > 0,
        )

    def project(self) -> Projection:
        """The whole of it as the row shows it."""
        return Projection(
            task_id=self.task.task_id,
            version=self.version,
            status=self.status,
            progress=self.progress,
            retry_count=self.retry_count,
            attempts=list(self.attempts),
            usage=self.usage,
            error_code=self.error_code,
            error_message=self.error_message,
            queued_at=self.queued_at,
            started_at=self.started_at,
            next_attempt_at=self.next_attempt_at,
        )


def _plus(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else a + b


def _closed(record: AttemptRecord, now: datetime) -> AttemptRecord:
    """An attempt that was open when its workflow was lost."""
    if record.ended_at is not None:
        return record
    return record.model_copy(
        update={"ended_at": now, "outcome": "lost", "error_code": ErrorCode.WORKER_LOST.value}
    )
