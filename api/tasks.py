"""Tasks as callers read them: one, and many."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from api.deps import PrincipalDep, Resources, ResourcesDep
from api.filters import IncludeWords, ListQuery, include_of, next_link, query_filter
from api.headers import applied, prefer_wait
from api.problems import Problem, not_found
from api.render import (
    EVERYTHING,
    PRIVATE,
    RETRY_AFTER,
    etag,
    json_response,
    matches,
    task_fields,
)
from api.replies import INVALID, NOT_FOUND, ListReply, TaskReply, problem
from api.strict_json import StrictRoute, requires
from perdure import names
from perdure.contracts import Beat
from perdure.live.story import Story
from perdure.store.errors import InvalidCursor
from perdure.store.rows import Principal, TaskRow
from perdure.task.states import Status

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["tasks"])
TaskId = Annotated[str, Path(description="`task_` and 32 hex digits.")]


async def the_task(task_id: str, principal: Principal, resources: Resources) -> TaskRow:
    """The caller's task. Raises Problem 404: malformed, unknown and foreign ids are alike."""
    row = await resources.store.tasks.get(principal, task_id) if names.is_task_id(task_id) else None
    if row is None:
        raise not_found()
    return row


@router.get(
    "/tasks/{task_id}",
    summary="Read a task",
    responses={
        200: {"model": TaskReply, "description": "The task, in whatever state."},
        304: {"description": "Nothing changed since the `ETag` of `If-None-Match`."},
        404: NOT_FOUND,
        422: INVALID,
    },
)
@requires("tasks:read")
async def read(
    task_id: TaskId,
    request: Request,
    principal: PrincipalDep,
    resources: ResourcesDep,
    include: Annotated[
        list[IncludeWords] | None, Query(description="`partial`: the text so far.", max_length=8)
    ] = None,
) -> Response:
    """`ETag` covers transition and last beat. `Prefer: wait=N` waits for the end; together with
    `If-None-Match`, for any change. While PROCESSING, progress is live."""
    wanted = {*EVERYTHING, *include_of(include)}
    row = await the_task(task_id, principal, resources)
    wait = prefer_wait(request)
    known = request.headers.get("if-none-match")
    if wait and not row.status.final:
        row = await _wait(row, wait, known, principal, resources)
    beat = await _beat(row, resources)
    headers = {**PRIVATE, "ETag": etag(row, beat), **applied(wait)}
    if not row.status.final:
        headers["Retry-After"] = RETRY_AFTER
    if matches(known, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    place = await resources.queues.info(row)
    queue = place.as_json() if place is not None else None
    return json_response(task_fields(row, include=wanted, beat=beat, queue=queue), 200, headers)


async def _wait(
    row: TaskRow, seconds: int, known: str | None, principal: Principal, resources: Resources
) -> TaskRow:
    """The row after the wait: for its end, or for any change from what the caller knows."""
    if known is None:
        await resources.hub.wait_final(row.task_id, seconds)
    else:
        beat = await _beat(row, resources)
        if not matches(known, etag(row, beat)):
            return row
        seen = (beat.attempt, beat.seq) if beat is not None else (0, 0)
        await resources.hub.wait_change(
            row.task_id, row.version, seconds, change_seq=row.change_seq, beat=seen
        )
    return await the_task(row.task_id, principal, resources)


async def _beat(row: TaskRow, resources: Resources) -> Beat | None:
    """The last beat of the attempt that runs; None in any other state."""
    if row.status is not Status.PROCESSING:
        return None
    story = Story.of(row)
    return story.beat(await resources.hub.live.beat(row.task_id, attempt=story.attempt))


@router.get(
    "/tasks",
    summary="List tasks",
    responses={
        200: {
            "model": ListReply,
            "description": "A page, newest first.",
            "headers": {
                "Link": {"schema": {"type": "string"}, "description": '`rel="next"`, when there is more.'}
            },
        },
        400: problem("The cursor is junk, or belongs to other filters."),
        422: INVALID,
    },
)
@requires("tasks:read")
async def list_tasks(
    request: Request,
    principal: PrincipalDep,
    resources: ResourcesDep,
    query: Annotated[ListQuery, Query()],
) -> Response:
    """Newest first, in a total order. A cursor survives inserts and deletes. `metadata.<key>=<value>` filters
    by your pairs. `params`, `result` and `attempts` come with `?include=`."""
    include = include_of(query.include)
    wanted = [
        name for name in EVERYTHING if name in include or name == "attempts"
    ]  # they tell whose a beat is
    filter = query_filter(query, principal)
    try:
        page = await resources.store.tasks.list(
            principal, filter, cursor=query.cursor, limit=query.limit, include=wanted
        )
    except InvalidCursor:
        raise Problem(
            400, "invalid-cursor", "The cursor is not one of this list; start without it."
        ) from None
    data = [_listed(row, include, resources) for row in page.tasks]
    body = {"data": data, "next_cursor": page.next_cursor, "has_more": page.has_more}
    headers = dict(PRIVATE)
    if page.next_cursor is not None:
        headers["Link"] = next_link(request, page.next_cursor)
    return json_response(body, 200, headers)


def _listed(row: TaskRow, include: frozenset[str], resources: Resources) -> dict[str, Any]:
    beat = None
    if row.status is Status.PROCESSING:
        resources.hub.live.want(row.task_id)
        beat = Story.of(row).beat(resources.hub.live.last_seen(row.task_id))
    return task_fields(row, include=include, beat=beat)
