"""Tasks as callers steer them: cancel (one, or by filter), change of class, delete."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from api.accept import record
from api.deps import PrincipalDep, Resources, ResourcesDep
from api.filters import body_filter
from api.problems import Problem, not_found
from api.render import PRIVATE, json_response, task_fields
from api.replies import NOT_FOUND, REFUSED_BODY, CancelledMany, TaskReply, problem
from api.schemas import CancelBody, CancelManyBody, PatchBody
from api.strict_json import StrictRoute, requires
from api.tasks import TaskId
from perdure import names
from perdure.observability.ends import ended_in_place
from perdure.store.errors import StoreError
from perdure.store.rows import TaskRow

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["tasks"])
_BATCH: Final = 500  # tasks that one cancel by filter settles


@router.post(
    "/tasks/{task_id}/cancel",
    status_code=202,
    summary="Cancel a task",
    responses={
        202: {"model": TaskReply, "description": "CANCELLED, or told to stop (`cancel_requested`)."},
        404: NOT_FOUND,
        409: problem("COMPLETED or FAILED already: `current_status`."),
        **REFUSED_BODY,
    },
)
@requires("tasks:write")
async def cancel(
    task_id: TaskId, principal: PrincipalDep, resources: ResourcesDep, body: CancelBody | None = None
) -> Response:
    """Repeatable. A task that has not started is CANCELLED in place; one that runs is told to stop, and keeps
    its text."""
    if not names.is_task_id(task_id):
        raise not_found()
    reason = body.reason if body else None
    result = await resources.store.tasks.request_cancel(principal, task_id, reason)
    if result.kind == "unknown" or result.task is None:
        raise not_found()
    if result.kind == "finished":
        status = result.task.status.value
        raise Problem(
            409,
            "task-already-finished",
            f"The task is {status} already.",
            task_id=task_id,
            current_status=status,
        )
    if result.kind == "cancelled":
        ended_in_place(resources.metrics, result.task)
    if result.kind != "already_cancelled":
        record("task cancelled", principal, task_id, user=result.task.user_id)
    if result.signal:
        await resources.signals.cancel(task_id, reason)
    resources.hub.poke(task_id)
    return json_response(await _as_it_is(result.task, resources), 202, PRIVATE)


@router.post(
    "/tasks/cancel",
    status_code=202,
    summary="Cancel tasks by filter",
    responses={202: {"model": CancelledMany, "description": "What was done."}, **REFUSED_BODY},
)
@requires("tasks:write")
async def cancel_many(body: CancelManyBody, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Cancels up to 500 unfinished tasks that match; `has_more` says to call again."""
    wanted = body_filter(body, principal)
    results = await resources.store.tasks.cancel_where(principal, wanted, body.reason, _BATCH)
    cancelled = 0
    for one in results:
        cancelled += one.kind == "cancelled"
        if one.task is None:
            continue
        if one.kind == "cancelled":
            ended_in_place(resources.metrics, one.task)
        record("task cancelled", principal, one.task.task_id, user=one.task.user_id)
        if one.signal:
            resources.signals.cancel_later(one.task.task_id, body.reason)
        resources.hub.poke(one.task.task_id)
    done = {
        "cancelled": cancelled,
        "cancel_requested": len(results) - cancelled,
        "has_more": len(results) == _BATCH,
    }
    return json_response(done, 202, PRIVATE)


@router.patch(
    "/tasks/{task_id}",
    summary="Change a waiting task's class",
    responses={
        200: {"model": TaskReply, "description": "The task in its new class."},
        404: NOT_FOUND,
        409: problem("It runs, or is final: `current_status`."),
        **REFUSED_BODY,
    },
)
@requires("tasks:write")
async def change(
    task_id: TaskId, body: PatchBody, principal: PrincipalDep, resources: ResourcesDep
) -> Response:
    """Moves a PENDING or QUEUED task to another class; its age counts there."""
    if not names.is_task_id(task_id):
        raise not_found()
    result = await resources.store.tasks.set_priority(principal, task_id, body.priority)
    if result.kind == "unknown" or result.task is None:
        raise not_found()
    if result.kind == "not_waiting":
        status = result.task.status.value
        raise Problem(
            409,
            "task-not-waiting",
            f"The task is {status}: its class no longer matters.",
            current_status=status,
        )
    record(
        "task priority changed", principal, task_id, user=result.task.user_id, priority=body.priority.value
    )
    if result.signal:
        await resources.signals.priority(task_id, body.priority)
    resources.dispatcher.wake()
    resources.hub.poke(task_id)
    return json_response(await _as_it_is(result.task, resources), 200, PRIVATE)


@router.delete(
    "/tasks/{task_id}",
    status_code=204,
    summary="Delete a final task",
    responses={404: NOT_FOUND, 409: problem("The task is not final: cancel it first.")},
)
@requires("tasks:write")
async def delete(task_id: TaskId, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Removes a final task with its input, result and callbacks; its usage stays in the ledger."""
    if not names.is_task_id(task_id):
        raise not_found()
    result = await resources.store.tasks.delete(principal, task_id)
    if result == "unknown":
        raise not_found()
    if result == "active":
        raise Problem(409, "task-not-final", "The task is not final; cancel it first.")
    record("task deleted", principal, task_id)
    return Response(status_code=204)


async def _as_it_is(row: TaskRow, resources: Resources) -> dict[str, Any]:
    """The whole task after a change; the changed row where it cannot be read: the change stands."""
    try:
        return task_fields(await resources.store.tasks.by_id_any(row.task_id) or row)
    except StoreError:
        return task_fields(row)
