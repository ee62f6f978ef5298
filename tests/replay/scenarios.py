"""One scenario per path of each workflow, run with fake activities: for golden histories and fingerprints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client, WorkflowHandle, WorkflowHistory
from temporalio.worker import Worker

from perdure import names
from perdure.contracts import Beat, GenerateInput, GenerateResult, ModelNews, WorkerNews
from perdure.task.states import Priority
from tests.support.waiting import until
from tests.workflow.conftest import Stage, announce, beat_until, fault, generated, until_cancelled
from workers.control import build_control_worker

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


async def retries_used_up(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("token_timeout")

    stage.world.script = [fail]
    return await _run(stage, max_retries=1)


async def refused_patiently(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def refuse(given: GenerateInput) -> GenerateResult:
        raise fault("upstream_unavailable", refused=True)

    stage.world.script = [refuse, _done]
    return await _run(stage, max_retries=0)


async def lost_too_often(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def vanish(given: GenerateInput) -> GenerateResult:
        await asyncio.Event().wait()
        raise AssertionError

    stage.world.script = [vanish]
    return await _run(stage, heartbeat_seconds=1, max_lost=1)


async def cancelled_in_temporal(stage: Stage) -> WorkflowHandle[Any, Any]:
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
        await handle.cancel()
        await stage.end(handle)
    return handle


async def cancelled_in_back_off(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("rate_limited", retry_after=300)

    stage.world.script = [fail]
    async with stage.gpu():
        handle = await stage.start()
        await until(lambda: bool(stage.world.rows))
        await handle.signal(names.SIG_CANCEL)
        await stage.end(handle)
    return handle


async def cancelled_before_its_start(stage: Stage) -> WorkflowHandle[Any, Any]:
    handle = await stage.start(cancel_requested=True)
    await stage.end(handle)
    return handle


async def silent_worker(stage: Stage) -> WorkflowHandle[Any, Any]:
    """It does not answer the cancel: the outcome is committed without it."""
    release = asyncio.Event()

    async def deaf(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        while not release.is_set():
            activity.heartbeat(Beat(attempt=1, text="seen"))
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue
        raise asyncio.CancelledError

    stage.world.script = [deaf]
    async with stage.gpu():
        handle = await stage.start(heartbeat_seconds=30)
        await until(lambda: bool(stage.world.rows))
        await handle.signal(names.SIG_CANCEL)
        await stage.end(handle)
        release.set()
    return handle


async def no_time_for_another(stage: Stage) -> WorkflowHandle[Any, Any]:
    async def fail(given: GenerateInput) -> GenerateResult:
        raise fault("rate_limited", retry_after=300)

    stage.world.script = [fail]
    return await _run(stage, total_deadline=datetime.now(UTC) + timedelta(seconds=60))


async def row_brought_later(stage: Stage) -> WorkflowHandle[Any, Any]:
    """The store is away for the local try and comes back for the ordinary activity."""

    async def run(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        await beat_until(lambda: bool(stage.world.rows))
        return generated(given)

    stage.world.script, stage.world.row_errors = [run], 1
    return await _run(stage)


async def moved_by_priority(stage: Stage) -> WorkflowHandle[Any, Any]:
    stage.world.script = [_done]
    handle = await stage.start()
    await _scheduled(handle)
    await handle.signal(names.SIG_SET_PRIORITY, "HIGH")
    await _scheduled(handle, 2)
    async with stage.gpu():
        await stage.end(handle)
    return handle


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
        retries_used_up,
        refused_patiently,
        lost_too_often,
        cancelled_in_temporal,
        cancelled_in_back_off,
        cancelled_before_its_start,
        silent_worker,
        no_time_for_another,
        row_brought_later,
        moved_by_priority,
    )
}

_NEWS: Final = WorkerNews(
    worker="gpu:p@host:1",
    pool="p",
    slots=2,
    models=[ModelNews(model_id="m")],
    at=datetime(2026, 1, 1, tzinfo=UTC),
)
# The others: one activity each, on the queue that its own worker serves.
UPKEEP: Final[dict[str, tuple[str, str, str, list[Any]]]] = {
    "reconcile": (names.WF_RECONCILE, names.ACT_RECONCILE, names.CONTROL_QUEUE, []),
    "retention": (names.WF_RETENTION, names.ACT_PURGE, names.CONTROL_QUEUE, []),
    "callback_sweep": (names.WF_CALLBACK_SWEEP, names.ACT_SWEEP_CALLBACKS, names.CALLBACKS_QUEUE, []),
    "worker_news": (names.WF_WORKER_NEWS, names.ACT_NOTE_WORKER, names.CONTROL_QUEUE, [_NEWS]),
}


async def upkeep_run(client: Client, name: str) -> WorkflowHandle[Any, Any]:
    """One run of a workflow that is no task's, with a fake activity."""
    workflow, act, queue, arguments = UPKEEP[name]

    @activity.defn(name=act)
    async def fake(*given: Any) -> bool:
        return True

    on_control = [fake] if queue == names.CONTROL_QUEUE else []
    async with (
        Worker(client, task_queue=names.CALLBACKS_QUEUE, activities=[fake]),
        build_control_worker(client, on_control, records_at_once=1),
    ):
        handle = await client.start_workflow(
            workflow,
            args=arguments,
            id=f"golden-{name}-{names.new_task_id()}",
            task_queue=names.CONTROL_QUEUE,
        )
        await asyncio.wait_for(handle.result(), 60)
    return handle


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
