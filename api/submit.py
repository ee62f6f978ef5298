"""Tasks come in: submit, bulk, rerun."""

from __future__ import annotations

from typing import Any, Final

import orjson
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from api.accept import Acceptance, accepted
from api.deps import PrincipalDep, Resources, ResourcesDep, principal_of, resources_of
from api.headers import applied, idempotency, idempotency_key, key_reused, prefer_wait
from api.problems import Problem, from_pydantic, not_found, problem_of, request_id_of
from api.render import RETRY_AFTER, json_response, task_fields
from api.replies import ACCEPTED, BULK, REFUSED_BODY, TASK_OK
from api.schemas import BulkBody, RerunBody, SubmitBody
from api.strict_json import StrictRoute, requires
from api.tasks import TaskId
from perdure import names
from perdure.store.errors import StoreError
from perdure.store.rows import CreateResult, NewTask, TaskRow

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["tasks"])
BULK_BYTES: Final = 16 * 1024 * 1024


@router.post(
    "/tasks",
    status_code=202,
    summary="Submit a task",
    responses={202: ACCEPTED, 200: TASK_OK, **REFUSED_BODY},
)
@requires("tasks:write")
async def submit(body: SubmitBody, request: Request) -> Response:
    """Answers when the task is kept: from then on it survives crashes, deploys and outages. `Prefer: wait=N`
    (60 s at most) waits for its end; `Idempotency-Key` makes the submit safe to repeat."""
    resources, principal = resources_of(request), principal_of(request)  # as dependencies: 16 µs more
    key = idempotency_key(request)
    resources.limits.take_submits(principal)
    acceptance = Acceptance(resources, principal)
    new = acceptance.task(body)
    held = idempotency(key, new.user_id, "submit", accepted(body, new.user_id)) if key else None
    result = await acceptance.keep(new, held)
    return await _written(result, new, acceptance, "task created", request, resources)


@router.post(
    "/tasks/{task_id}/rerun",
    status_code=202,
    summary="Run a task again",
    responses={202: ACCEPTED, 200: TASK_OK, **REFUSED_BODY},
)
@requires("tasks:write")
async def rerun(
    task_id: TaskId,
    request: Request,
    principal: PrincipalDep,
    resources: ResourcesDep,
    body: RerunBody | None = None,
) -> Response:
    """A new task with the same input, whatever became of the old one; the body may name another model, class
    or other params. `rerun_of` names the old task."""
    key = idempotency_key(request)
    old = await resources.store.tasks.get(principal, task_id) if names.is_task_id(task_id) else None
    if old is None:
        raise not_found()
    resources.limits.take_submits(principal)
    acceptance = Acceptance(resources, principal)
    new = acceptance.rerun(old, body or RerunBody())
    asked = {"task_id": task_id, **(body or RerunBody()).model_dump(mode="python")}
    held = idempotency(key, new.user_id, "rerun", asked) if key else None
    result = await acceptance.keep(new, held)
    return await _written(result, new, acceptance, "task rerun", request, resources)


async def _written(
    result: CreateResult,
    new: NewTask,
    acceptance: Acceptance,
    action: str,
    request: Request,
    resources: Resources,
) -> Response:
    """The reply to a submit: what was created, or what the same request created before."""
    if result.kind == "conflict":
        raise key_reused()
    task = result.task
    if task is None:
        raise not_found()
    headers = {"Location": f"/v1/tasks/{task.task_id}", "Cache-Control": "private, no-cache"}
    if result.kind == "replayed":
        headers["Idempotent-Replayed"] = "true"
    else:
        acceptance.count(new, action)
    params = new.params_json if result.kind == "created" else None
    wait = prefer_wait(request)
    if wait is not None:
        headers |= applied(wait)
        later = await _after(wait, task, resources)
        if later is not None:
            task, params = later, None
    status = 200 if wait is not None and task.status.final else 202
    if not task.status.final:
        headers["Retry-After"] = RETRY_AFTER
    return json_response(task_fields(task, params_json=params), status, headers)


async def _after(wait: int, task: TaskRow, resources: Resources) -> TaskRow | None:
    """The task as it is once it is final or the time is up. None when it was deleted meanwhile, or cannot be
    read: it is kept all the same, and the caller must hear that."""
    if not task.status.final:
        await resources.hub.wait_final(task.task_id, wait)
    try:
        return await resources.store.tasks.by_id_any(task.task_id)
    except StoreError:
        return None


@router.post(
    "/tasks/bulk",
    status_code=202,
    summary="Submit up to 500 tasks",
    responses={202: BULK, **REFUSED_BODY},
)
@requires("tasks:write", max_body=BULK_BYTES)
async def bulk(
    body: BulkBody, request: Request, principal: PrincipalDep, resources: ResourcesDep
) -> Response:
    """Each task is judged by itself; the good ones are written in one transaction. The reply has one entry
    per task, in order: the task, or the problem that refuses it."""
    key = idempotency_key(request)
    acceptance = Acceptance(resources, principal)
    entries, good = await _judge(body, acceptance, request_id_of(request))
    reply = orjson.dumps(entries).decode()
    kept = False
    try:
        if good:
            resources.limits.take_submits(principal, len(good))
        held = idempotency(key, principal.user_id, "bulk", body.tasks, reply=reply) if key else None
        result = await resources.intake.add_many(good, held) if good else None
        kept = result is not None and result.kind == "created"
    finally:
        acceptance.settle(good, kept=kept)
    if result is None and held is not None:  # a repeat of what was kept before the bounds were reached
        result = await resources.store.tasks.recall(held)
    headers = {"Cache-Control": "private, no-cache"}
    if result is None:
        return json_response({"tasks": entries}, 202, headers)
    if result.kind == "conflict":
        raise key_reused()
    if result.kind == "replayed":
        headers["Idempotent-Replayed"] = "true"
        entries = orjson.loads(result.reply or reply)
    else:
        for new in good:
            acceptance.count(new, "task created")
    return json_response({"tasks": _merge(entries, result.tasks)}, 202, headers)


async def _judge(
    body: BulkBody, acceptance: Acceptance, request_id: str | None
) -> tuple[list[dict[str, Any] | None], list[NewTask]]:
    """(problems in the order of the call with None for each good task, the good tasks)."""
    entries: list[dict[str, Any] | None] = []
    good: list[NewTask] = []
    for item in body.tasks:
        try:
            new = acceptance.task(_item(item))
            refusal = await acceptance.refusal(new)
        except Problem as problem:
            refusal = problem
        except BaseException:
            acceptance.settle(good, kept=False)
            raise
        if refusal is None:
            good.append(new)
        entries.append(None if refusal is None else refusal.as_json(request_id))
    return entries, good


def _item(item: Any) -> SubmitBody:
    try:
        return SubmitBody.model_validate(item)
    except ValidationError as error:
        raise from_pydantic(error) from None


def _merge(entries: list[dict[str, Any] | None], tasks: list[TaskRow | None]) -> list[dict[str, Any]]:
    """Problems and tasks in the order of the call; a task deleted since is a 404."""
    written = iter(tasks)
    merged = []
    for entry in entries:
        if entry is not None:
            merged.append(entry)
            continue
        task = next(written)
        merged.append(problem_of(not_found()).as_json() if task is None else task_fields(task, include=()))
    return merged
