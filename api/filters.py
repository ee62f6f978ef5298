"""Filters of a list, from the query or from a body, and the link to the next page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from api.problems import FieldError, Problem, invalid
from api.schemas import CancelManyBody, ModelId, TaskType, Time, UserId
from perdure.store.rows import Principal, TaskFilter
from perdure.task.states import Priority, Status
from perdure.task.text import one_line

INCLUDES: Final = ("params", "result", "attempts", "partial")
_METADATA: Final = "metadata."
_MAX_PAIRS: Final = 16


def _words(*words: str) -> str:
    """Pattern of one or more of these words with commas between them."""
    one = f"({'|'.join(words)})"
    return f"^{one}(,{one})*$"


StatusWords = Annotated[str, Field(pattern=_words(*Status), max_length=100)]
IncludeWords = Annotated[str, Field(pattern=_words(*INCLUDES), max_length=100)]


class ListQuery(BaseModel):
    """Query of `GET /v1/tasks`. `metadata.<key>` comes beside it: its name is the caller's."""

    model_config = ConfigDict(extra="allow")

    status: list[StatusWords] = Field(
        default_factory=list, max_length=6, description="One or more, repeated or with commas between them."
    )
    model_id: ModelId | None = None
    task_type: TaskType | None = None
    priority: Priority | None = None
    user_id: UserId | None = Field(None, description="For an admin.")
    created_after: Time | None = Field(None, description="Exclusive; with an offset or `Z`.")
    created_before: Time | None = Field(None, description="Exclusive; with an offset or `Z`.")
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(None, description="`next_cursor` of the page before.")
    include: list[IncludeWords] = Field(
        default_factory=list, max_length=8, description="What lists leave out; `partial`: the text so far."
    )


def include_of(values: Sequence[str] | None) -> frozenset[str]:
    """The members asked for. Raises Problem 422 for others."""
    wanted = [part for value in values or () for part in value.split(",")]
    if any(part not in INCLUDES for part in wanted):
        raise invalid([FieldError(None, "include", f"some of {', '.join(INCLUDES)}", parameter="include")])
    return frozenset(wanted)


def query_filter(query: ListQuery, principal: Principal) -> TaskFilter:
    """The filter of a list. Raises Problem 422 for a parameter that is none, 403 for another's `user_id`."""
    pairs = tuple((name, str(value)) for name, value in (query.model_extra or {}).items())
    unknown = [name for name, _ in pairs if not name.startswith(_METADATA) or name == _METADATA]
    if unknown:
        raise invalid(
            [FieldError(None, "unknown-parameter", "there is no such parameter", parameter=_shown(unknown))]
        )
    if len(pairs) > _MAX_PAIRS:
        raise invalid([FieldError(None, "too-many", f"at most {_MAX_PAIRS} pairs", parameter="metadata")])
    return TaskFilter(
        statuses=tuple(Status(part) for value in query.status for part in value.split(",")),
        model_id=query.model_id,
        task_type=query.task_type,
        priority=query.priority,
        user_id=_user(query.user_id, principal),
        created_after=query.created_after,
        created_before=query.created_before,
        metadata=tuple((name.removeprefix(_METADATA), value) for name, value in pairs),
    )


def body_filter(body: CancelManyBody, principal: Principal) -> TaskFilter:
    """The filter of a cancel. Raises Problem 422 when it names nothing: that would be everything."""
    if not body.filters:
        raise invalid([FieldError("", "filter-missing", 'name a filter, or say {"all": true}')])
    return TaskFilter(
        statuses=tuple(map(Status, body.status or ())),
        model_id=body.model_id,
        task_type=body.task_type,
        priority=body.priority,
        user_id=_user(body.user_id, principal),
        created_after=body.created_after,
        created_before=body.created_before,
        metadata=tuple((body.metadata or {}).items()),
    )


def next_link(request: Request, cursor: str) -> str:
    """The `Link` to the next page: the same query with another cursor."""
    pairs = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    return f'<{request.url.path}?{urlencode([*pairs, ("cursor", cursor)])}>; rel="next"'


def _user(user_id: str | None, principal: Principal) -> str | None:
    if user_id is not None and not principal.admin and user_id != principal.user_id:
        raise Problem(403, "scope-missing", "Only an admin key lists another user's tasks.", scope="admin")
    return user_id


def _shown(names: Iterable[str]) -> str:
    return one_line(next(iter(names)), 100)
