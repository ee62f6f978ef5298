"""Event streams: one task, or all of the caller's. What may be refused is refused before a stream begins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api.auth import authenticate
from api.deps import PrincipalDep, Resources, ResourcesDep
from api.event_stream import EventStream, Source
from api.filters import include_of
from api.problems import FieldError, Problem, invalid, not_found
from api.render import dumps, json_response, task_fields
from api.replies import INVALID, NOT_FOUND, problem
from api.schemas import ModelId
from api.strict_json import StrictRoute, public, requires
from api.tasks import TaskId
from perdure import names
from perdure.live import sse
from perdure.live.cursor import Cursor
from perdure.live.follower import FeedUpdate, Follower
from perdure.live.mark import Mark
from perdure.live.reader import Reader, Update
from perdure.live.token import LIFETIME
from perdure.store.rows import Principal, TaskRow
from perdure.task.states import Status

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["events"])

EVENT: Final = "task-update"
_EVENT: Final[dict[str, Any]] = {
    "type": "object",
    "description": "One event. `data` is JSON: the task as lists show it, and what is live.",
    "properties": {"event": {"const": "task-update"}, "id": {"type": "string"}, "data": {"type": "string"}},
}
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "`text/event-stream`: events `task-update`, each with an `id` to resume after.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    },
    401: problem("No valid key or stream token."),
    422: INVALID,
    429: problem("Too many open streams of this user."),
}
_Token = Annotated[
    str | None, Query(description="A stream token, for readers that send no header.", max_length=1024)
]


class StreamTokenReply(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token: str
    expires_in: int = Field(description="Seconds.")


async def _reader(request: Request, token: str | None) -> Principal:
    """Who watches: by key as everywhere, or by a stream token. Raises Problem 401 and 403."""
    resources: Resources = request.app.state.resources
    if token is None or resources.settings.auth == "none":
        return await authenticate(request, "tasks:read")
    user_id = resources.stream_tokens.user_of(token)
    if user_id is None:
        raise Problem(401, "stream-token-refused", "This stream token is forged or too old; get another.")
    return Principal(user_id=user_id, scopes=frozenset({"tasks:read"}))


@router.post(
    "/stream-token",
    summary="Get a stream token",
    responses={
        200: {"model": StreamTokenReply, "description": "Good for a minute, on the two streams only."}
    },
)
@requires("tasks:read")
async def stream_token(principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """For browsers, whose `EventSource` sends no key: `…/events?token=…`. It reads this user's tasks and does
    nothing else. A stream that is open goes on after the token has run out."""
    token = resources.stream_tokens.issue(principal.user_id)
    return json_response({"token": token, "expires_in": LIFETIME}, 200, {"Cache-Control": "no-store"})


@router.get(
    "/tasks/{task_id}/events",
    summary="Watch a task",
    response_class=Response,
    responses={
        **_STREAM,
        204: {"description": "`Last-Event-ID` is the final event's: there is nothing more."},
        404: NOT_FOUND,
    },
)
@public
async def task_events(
    task_id: TaskId,
    request: Request,
    resources: ResourcesDep,
    include: Annotated[
        list[str] | None, Query(description="`partial`: the new part of the text.", max_length=8)
    ] = None,
    token: _Token = None,
) -> Response:
    """A snapshot, then each change, then the final event, and the stream ends. With `Last-Event-ID` it goes
    on after that event, on whichever process."""
    principal = await _reader(request, token)
    partial = "partial" in include_of(include)
    row = None
    if names.is_task_id(task_id):
        row = await resources.store.tasks.get(principal, task_id, include=["attempts"])
    if row is None:
        raise not_found()
    cursor = Cursor.parse(task_id, request.headers.get("last-event-id"))
    if row.status.final and cursor is not None and cursor.final:
        return Response(status_code=204, headers={"Cache-Control": "no-store"})
    found = row

    def open_source(stack: ExitStack) -> Source:
        _count(resources, principal, stack)
        waiter = stack.enter_context(resources.hub.watch(task_id, row=found, beats=True, text=partial))
        return _TaskSource(Reader(resources.hub, waiter, cursor, partial=partial), partial)

    return EventStream(open_source, resources.hub.on_drain)


@router.get("/events", summary="Watch all your tasks", response_class=Response, responses=_STREAM)
@public
async def all_events(
    request: Request,
    resources: ResourcesDep,
    status: Annotated[
        list[str] | None, Query(description="Tasks while they are in these states.", max_length=6)
    ] = None,
    model_id: ModelId | None = None,
    token: _Token = None,
) -> Response:
    """Your tasks that are not final, then each change of any, with the progress of those that run. With
    `Last-Event-ID` it goes on after that event. It has no end. An admin's key sees all users' tasks."""
    principal = await _reader(request, token)
    choose = _choice(status, model_id)
    mark = Mark.parse(principal.user_id, request.headers.get("last-event-id"))

    def open_source(stack: ExitStack) -> Source:
        _count(resources, principal, stack)
        member = stack.enter_context(resources.feeds.join(principal))
        return _FeedSource(Follower(resources.feeds, member, mark, choose, stack))

    return EventStream(open_source, resources.hub.on_drain)


def _choice(status: list[str] | None, model_id: str | None) -> Callable[[TaskRow], bool]:
    """The filter of a stream. Raises Problem 422 for a state that is none."""
    try:
        states = frozenset(Status(part) for value in status or () for part in value.split(",") if part)
    except ValueError:
        raise invalid(
            [FieldError(None, "status", f"some of {', '.join(Status)}", parameter="status")]
        ) from None
    return lambda row: (not states or row.status in states) and model_id in (None, row.model_id)


def _count(resources: Resources, principal: Principal, stack: ExitStack) -> None:
    """Holds one of the user's streams until the stack is left. Raises Problem 429."""
    stack.enter_context(resources.limits.take_stream(principal))
    resources.metrics.sse_streams.inc()
    stack.callback(resources.metrics.sse_streams.dec)


class _TaskSource:
    """Frames of one task's updates."""

    def __init__(self, reader: Reader, partial: bool) -> None:
        self._reader = reader
        self._partial = partial
        self.close = reader.close

    @property
    def ended(self) -> bool:
        return self._reader.ended

    @property
    def finished(self) -> bool:
        return self._reader.finished

    async def next(self, seconds: float) -> bytes | None:
        update = await self._reader.next(seconds)
        if update is None:
            return None
        return sse.frame(EVENT, update.event_id, dumps(_task_data(update, self._partial)))


class _FeedSource:
    """Frames of many tasks' updates."""

    finished = False

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self.close = follower.close

    @property
    def ended(self) -> bool:
        return self._follower.ended

    async def next(self, seconds: float) -> bytes | None:
        update = await self._follower.next(seconds)
        return None if update is None else sse.frame(EVENT, update.event_id, dumps(_feed_data(update)))


def _task_data(update: Update, partial: bool) -> dict[str, Any]:
    """Data of one task's event: the task as lists show it, and what is live."""
    queue = update.queue.as_json() if update.queue else None
    data = task_fields(update.row, include=(), beat=update.beat, queue=queue)
    data["attempt"] = update.attempt
    data["output_tokens"] = update.beat.output_tokens if update.beat else None
    data["message"] = update.beat.message if update.beat else None
    data["restarted"] = update.restarted
    if partial:
        part = update.part
        data["partial"] = {"offset": part.offset, "text": part.text} if part else None
    return data


def _feed_data(update: FeedUpdate) -> dict[str, Any]:
    """Data of an event among many tasks'."""
    data = task_fields(update.row, include=(), beat=update.beat)
    data["attempt"] = update.attempt
    data["output_tokens"] = update.beat.output_tokens if update.beat else None
    data["message"] = update.beat.message if update.beat else None
    return data
