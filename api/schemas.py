"""Shapes of the bodies that come in: every field bounded, unknown fields refused, no value bent into another.

What a model makes of `params` is checked apart, in `params.py`, since it depends on the model.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from perdure.task.states import Priority, Status

MAX_DURATION: Final = 30 * 86_400  # seconds that a task may wait, or take in all
MAX_AHEAD: Final = timedelta(days=366)  # of not_before
MAX_BULK: Final = 500
_PRINTABLE: Final = (
    r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,64}$"  # as perdure.keys.USER_ID; JSON has no surrogates
)
_TIME: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:[Zz]|[+-]\d\d:?\d\d)\Z", re.ASCII
)
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d\Z", re.ASCII)
_MICROSECONDS: Final = re.compile(r"(\.\d{6})\d+")


def parse_time(value: object) -> datetime:
    """An ISO 8601 time with an offset, as UTC. Raises ValueError: a naive time means nothing on a server."""
    if not isinstance(value, str) or not _TIME.match(value):
        raise ValueError("an ISO 8601 time with an offset is needed, like 2026-12-01T14:00:00Z")
    text = _MICROSECONDS.sub(r"\1", value.upper().replace(" ", "T"))
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError("there is no such time") from None


def parse_day(value: object) -> date:
    """A UTC day: a date, or the day of a time with an offset. Raises ValueError."""
    if isinstance(value, str) and _DAY.match(value):
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise ValueError("there is no such day") from None
    return parse_time(value).date()


def _not_too_far(value: datetime) -> datetime:
    if value > datetime.now(UTC) + MAX_AHEAD:
        raise ValueError(f"at most {MAX_AHEAD.days} days ahead")
    return value


def _no_repeats(value: list[Any]) -> list[Any]:
    if len(set(value)) != len(value):
        raise ValueError("a value stands twice")
    return value


def _bounded_pairs(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not 1 <= len(key) <= 64:
            raise ValueError("a key has 1 to 64 characters")
        if len(text) > 512:
            raise ValueError("a value has at most 512 characters")
    return value


Time = Annotated[datetime, BeforeValidator(parse_time, json_schema_input_type=str)]
Day = Annotated[date, BeforeValidator(parse_day, json_schema_input_type=str)]
StartTime = Annotated[Time, AfterValidator(_not_too_far)]
ModelId = Annotated[str, Field(strict=True, min_length=1, max_length=64)]
TaskType = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.-]{1,32}$")]
UserId = Annotated[str, Field(strict=True, pattern=_PRINTABLE)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=MAX_DURATION)]
AttemptSeconds = Annotated[float, Field(strict=True, gt=0, le=86_400)]
Retries = Annotated[int, Field(strict=True, ge=0, le=20)]
CallbackUrl = Annotated[str, Field(strict=True, min_length=1, max_length=2048)]
CallbackEvent = Literal["COMPLETED", "FAILED", "CANCELLED"]
CallbackEvents = Annotated[
    list[CallbackEvent], Field(min_length=1, max_length=3), AfterValidator(_no_repeats)
]
Metadata = Annotated[
    dict[Annotated[str, Field(strict=True)], Annotated[str, Field(strict=True)]],
    Field(max_length=16),
    AfterValidator(_bounded_pairs),
]
Reason = Annotated[str, StringConstraints(strict=True, max_length=500)]
Params = Annotated[dict[str, Any], Field(description="Input of the model. See *Params* in the introduction.")]

_EXAMPLE: Final[dict[str, Any]] = {
    "model_id": "smollm2-135m",
    "params": {
        "messages": [{"role": "user", "content": "Summarise in one sentence: …"}],
        "max_tokens": 200,
        "temperature": 0.2,
    },
    "task_type": "document",
    "priority": "NORMAL",
    "metadata": {"job": "nightly-7"},
    "deadline_seconds": 3600,
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SubmitBody(Body):
    """One task."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [_EXAMPLE]}, title="Submit"
    )

    model_id: ModelId = Field(description="A model of `GET /v1/models`.")
    params: Params
    task_type: TaskType = Field("chat", description="Yours to choose; a filter and a metric label.")
    priority: Priority = Priority.NORMAL
    max_retries: Retries | None = Field(None, description="Faults that are retried; the model's, else 3.")
    callback_url: CallbackUrl | None = Field(None, description="Receives the outcome. See docs/callbacks.md.")
    callback_events: CallbackEvents | None = Field(None, description="Which outcomes; all when not given.")
    metadata: Metadata | None = Field(None, description="Up to 16 pairs of yours; a filter of the list.")
    user_id: UserId | None = Field(None, description="With an `act-as` key, or where auth is off.")
    queue_timeout_seconds: Seconds | None = Field(None, description="To the first start; then FAILED.")
    timeout_seconds: AttemptSeconds | None = Field(None, description="One attempt; the model's, else 1800.")
    deadline_seconds: Seconds | None = Field(None, description="The whole task, retries included.")
    not_before: StartTime | None = Field(None, description="Starts no sooner. With an offset or `Z`.")


class BulkBody(Body):
    """Up to 500 tasks. Each is judged by itself; the good ones are written in one transaction."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"tasks": [_EXAMPLE]}]}, title="Bulk"
    )

    tasks: list[Any] = Field(
        min_length=1,
        max_length=MAX_BULK,
        description="Each a `Submit`; another value gets a problem as its entry.",
        json_schema_extra={"items": {"anyOf": [{"$ref": "#/components/schemas/SubmitBody"}, {}]}},
    )


class RerunBody(Body):
    """What the new task has otherwise than the old one; nothing given: the same again."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"priority": "HIGH"}]}, title="Rerun"
    )

    model_id: ModelId | None = None
    params: Params | None = None
    priority: Priority | None = None


class CancelBody(Body):
    """Why. Kept with the task."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_extra={"examples": [{"reason": "no longer needed"}]}
    )

    reason: Reason | None = None


class PatchBody(Body):
    """The task's new class."""

    priority: Priority


class CancelManyBody(Body):
    """Which tasks to cancel: at least one filter, or `all`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"examples": [{"metadata": {"job": "nightly-7"}, "reason": "wrong input"}]},
    )

    status: list[Literal["PENDING", "QUEUED", "PROCESSING"]] | None = Field(None, min_length=1, max_length=3)
    model_id: ModelId | None = None
    task_type: TaskType | None = None
    priority: Priority | None = None
    user_id: UserId | None = None
    created_after: Time | None = None
    created_before: Time | None = None
    metadata: Metadata | None = None
    all: Literal[True] | None = Field(None, description="Every task of yours that is not final.")
    reason: Reason | None = None

    @property
    def filters(self) -> bool:
        """Whether it names anything at all."""
        return any(getattr(self, name) for name in type(self).model_fields if name != "reason")


class PauseBody(Body):
    """Why. Shown in `GET /v1/queues` and `GET /v1/models`."""

    reason: Reason | None = None


EVENTS: Final = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
