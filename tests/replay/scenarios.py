"""One scenario per path of InferenceTask, run with fake activities: for golden histories and fingerprints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.client import WorkflowHandle, WorkflowHistory

from perdure import names
from perdure.contracts import Beat, GenerateInput, GenerateResult
from perdure.task.states import Priority
from tests.support.waiting import until
from tests.workflow.conftest import Stage, announce, beat_until, fault, generated, until_cancelled

Scenario = Callable[[Stage], Awaitable[WorkflowHandle[Any, Any]]]


async def quick_success(stage: Stage) -> WorkflowHandle[Any, Any]:
    stage.world.script = [_done]
    return await _run(stage)


async def announced_success_with_callback(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def run(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        await beat_until(lambda: bool(stage.world.rows))
        return generated(given)

    stage.world.script, stage.world.delivery_id = [run], "msg_golden"
    return await _run(stage)


async def retry(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def first(given: GenerateInput) -> GenerateResult:
        raise fault("stream_truncated", beat=Beat(attempt=1, text="one two", output_tokens=2))

    stage.world.script = [first, _done]
    return await _run(stage)


async def cancel_queued(stage: Stage) -> WorkflowHandle[Any, Any]:
    handle = await stage.start()
    await _scheduled(handle)
    await handle.signal(names.SIG_CANCEL, {"reason": "golden"})
    await stage.end(handle)
    return handle


async def cancel_running(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def run(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            return GenerateResult(kind="cancelled", beat=Beat(attempt=1, text="so far", output_tokens=2))
        raise AssertionError

    stage.world.script = [run]
    async with stage.gpu():
        handle = await stage.start()
        await until(lambda: bool(stage.world.rows))
        await handle.signal(names.SIG_CANCEL)
        await stage.end(handle)
    return handle


async def permanent_failure(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("context_length_exceeded", retryable=False)

    stage.world.script = [fail]
    return await _run(stage)


async def lost_worker(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def vanish(given: GenerateInput) -> GenerateResult:
        activity.heartbeat(Beat(attempt=1, text="a b", output_tokens=2))
        await asyncio.Event().wait()
        raise AssertionError

    stage.world.script = [vanish, _done]
    return await _run(stage, heartbeat_seconds=1)


async def drained(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def drain(given: GenerateInput) -> GenerateResult:
        return GenerateResult(kind="drained", beat=Beat(attempt=1, text="a b", output_tokens=2), worker="w1")

    stage.world.script = [drain, _done]
    return await _run(stage)


async def queue_expired(stage: Stage) -> WorkflowHandle[Any, Any]:
    handle = await stage.start(queue_deadline=datetime.now(UTC) + timedelta(seconds=0.5))
    await stage.end(handle)
    return handle


async def deadline_exceeded(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def run(given: GenerateInput) -> GenerateResult:
        try:
            await until_cancelled()
        except asyncio.CancelledError:
            return GenerateResult(kind="cancelled", beat=Beat(attempt=1, text="part", output_tokens=1))
        raise AssertionError

    stage.world.script = [run]
    return await _run(stage, total_deadline=datetime.now(UTC) + timedelta(seconds=2))


async def aged(stage: Stage) -> WorkflowHandle[Any, Any]:
    stage.world.script = [_done]
    handle = await stage.start(
        priority=Priority.LOW, scheduling={"mode": "strict", "max_wait": 0.3}, created_at=datetime.now(UTC)
    )
    await _scheduled(handle, 3)
    async with stage.gpu():
        await stage.end(handle)
    return handle


async def restarted(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def run(given: GenerateInput) -> GenerateResult:
        await beat_until(lambda: bool(stage.world.rows))
        return generated(given)

    stage.world.script = [run]
    return await _run(stage, base_version=4)


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        quick_success,
        announced_success_with_callback,
        retry,
        cancel_queued,
        cancel_running,
        permanent_failure,
        lost_worker,
        drained,
        queue_expired,
        deadline_exceeded,
        aged,
        restarted,
    )
}

_COMMANDS: Final = {
    "activityTaskScheduledEventAttributes": lambda a: "activity " + a["activityType"]["name"],
    "timerStartedEventAttributes": lambda a: "timer",
    "markerRecordedEventAttributes": lambda a: "marker " + a["markerName"],
    "upsertWorkflowSearchAttributesEventAttributes": lambda a: "upsert",
    "activityTaskCancelRequestedEventAttributes": lambda a: "cancel activity",
    "timerCanceledEventAttributes": lambda a: "cancel timer",
    "workflowExecutionCompletedEventAttributes": lambda a: "complete",
    "workflowExecutionFailedEventAttributes": lambda a: "fail",
}


def fingerprint(history: WorkflowHistory) -> list[str]:
    """The commands of a history, in order."""
    found = []
    for event in history.to_json_dict()["events"]:
        found.extend(name(event[key]) for key, name in _COMMANDS.items() if key in event)
    return found


async def _done(given: GenerateInput) -> GenerateResult:
    return generated(given)


async def _run(stage: Stage, **changes: Any) -> WorkflowHandle[Any, Any]:
    async with stage.gpu():
        handle = await stage.start(**changes)
        await stage.end(handle)
    return handle


async def _scheduled(handle: WorkflowHandle[Any, Any], times: int = 1) -> None:
    async def enough() -> bool:
        commands = fingerprint(await handle.fetch_history())
        return commands.count(f"activity {names.ACT_GENERATE}") >= times

    await until(enough)
