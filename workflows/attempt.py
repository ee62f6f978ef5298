"""One run of `generate`: how it is started, and how Temporal tells that it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, TimeoutError, TimeoutType

with workflow.unsafe.imports_passed_through():
    from pydantic import ValidationError

    from perdure import names
    from perdure.contracts import (
        Beat,
        FaultDetails,
        GenerateInput,
        GenerateResult,
        TaskInput,
        TaskResult,
        Usage,
    )
    from perdure.task.errors import RETRYABLE, ErrorCode
    from perdure.task.policy import Place
    from perdure.task.story import attempt_summary
    from perdure.task.text import one_line

_ONCE = RetryPolicy(maximum_attempts=1)
_LATE = 15.0  # seconds beyond the worker's own limit after which Temporal gives an attempt up

Kind = Literal["generated", "cancelled", "drained", "fault", "lost", "never_started", "waited"]


@dataclass(frozen=True)
class Ending:
    """How the run ended.

    `never_started`: cancelled while it waited. `waited`: its patience on the lane is over.
    `beat` is the last checkpoint, None where nothing was made.
    """

    kind: Kind
    beat: Beat | None = None
    usage: Usage = field(default_factory=Usage)
    result: TaskResult | None = None
    fault: FaultDetails | None = None
    worker: str | None = None
    started_at: datetime | None = None


def start_generate(
    task: TaskInput, given: GenerateInput, place: Place, patience: timedelta | None
) -> workflow.ActivityHandle[GenerateResult]:
    """Puts the attempt on its pool's queue. `patience`: how long it may wait there before `waited`."""
    return workflow.start_activity(
        names.ACT_GENERATE,
        given,
        result_type=GenerateResult,
        task_queue=names.pool_queue(task.pool),
        schedule_to_start_timeout=patience,
        start_to_close_timeout=timedelta(seconds=task.timeout_seconds + _LATE),
        heartbeat_timeout=timedelta(seconds=task.heartbeat_seconds),
        retry_policy=_ONCE,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=attempt_summary(given.attempt, task.model_id, given.checkpoint),
        priority=Priority(
            priority_key=place.key, fairness_key=place.fairness_key, fairness_weight=place.weight
        ),
    )


async def ending_of(handle: workflow.ActivityHandle[GenerateResult]) -> Ending:
    """Waits for the run's end and names it."""
    try:
        ended = await handle
    except ActivityError as error:
        return _ending_of_error(error.cause)
    return Ending(
        ended.kind,
        beat=ended.beat,
        usage=ended.usage,
        result=ended.result,
        worker=ended.worker or None,
        started_at=ended.started_at,
    )


def _ending_of_error(cause: BaseException | None) -> Ending:
    if isinstance(cause, CancelledError):
        return Ending("never_started")
    if isinstance(cause, TimeoutError):
        if cause.type == TimeoutType.SCHEDULE_TO_START:
            return Ending("waited")
        beat = _beat(cause.last_heartbeat_details)
        if cause.type == TimeoutType.HEARTBEAT:
            return Ending("lost", beat=beat, usage=_usage_of(beat))
        message = "the attempt ran past its time limit (timeout_seconds) and its worker did not end it"
        fault = FaultDetails(code=ErrorCode.ATTEMPT_TIMEOUT, message=message, retryable=True)
        return Ending("fault", beat=beat, usage=_usage_of(beat), fault=fault)
    return _ending_of_fault(cause)


def _ending_of_fault(cause: BaseException | None) -> Ending:
    details = cause.details if isinstance(cause, ApplicationError) else ()
    if details:
        try:
            fault = FaultDetails.model_validate(details[0])
        except ValidationError:
            pass
        else:
            return Ending(
                "fault",
                beat=fault.beat,
                usage=fault.usage,
                fault=fault,
                worker=fault.worker or None,
                started_at=fault.started_at,
            )
    kind = cause.type if isinstance(cause, ApplicationError) else None
    code = ErrorCode.OUTPUT_TOO_LARGE if kind == "PayloadsTooLarge" else ErrorCode.INTERNAL
    why = cause.__cause__ if cause else None
    if not (isinstance(why, ApplicationError) and why.type == "PayloadKeyError"):
        why = cause  # what lies deeper may quote the input
    message = one_line(f"the worker could not run the attempt: {why}", 300)
    return Ending("fault", fault=FaultDetails(code=code, message=message, retryable=RETRYABLE[code]))


def _beat(details: Any) -> Beat | None:
    """Heartbeat details arrive untyped: a dict, or nothing when the worker died before its first beat."""
    try:
        return Beat.model_validate(details[0]) if details else None
    except ValidationError:
        return None


def _usage_of(beat: Beat | None) -> Usage:
    """What a silent attempt is known to have made."""
    if beat is None:
        return Usage()
    made = max(0, beat.output_tokens - beat.resumed_from_tokens)
    return Usage(
        prompt_tokens=beat.prompt_tokens, completion_tokens=made, discarded_tokens=beat.discarded_tokens
    )
