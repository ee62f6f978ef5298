"""Shapes of the replies, for the OpenAPI document. Replies are written by `render.py`; a test holds the two
together by checking live replies against this document.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from perdure.task.states import Priority, Status

_Time = str | None


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FieldProblem(_Reply):
    pointer: str | None = Field(None, description="JSON pointer into the body.")
    parameter: str | None = Field(None, description="Query parameter, path parameter or header.")
    code: str
    detail: str


class ProblemReply(BaseModel):
    """RFC 9457. `code` is stable and for programs; `detail` is for people."""

    model_config = ConfigDict(extra="allow", title="Problem")

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str | None = None
    errors: list[FieldProblem] | None = None


class UsageReply(_Reply):
    prompt_tokens: int | None = Field(description="Null: the model server did not say.")
    completion_tokens: int | None
    discarded_tokens: int = Field(description="Made by attempts whose text was thrown away.")


class LinksReply(_Reply):
    self: str
    events: str
    cancel: str
    callbacks: str


class QueueReply(_Reply):
    """Estimates, while the task waits."""

    position: int
    ahead: int
    reason: Literal["waiting_for_slot", "behind_higher_priority", "no_worker", "backing_off", "not_before"]
    estimated_start_at: _Time
    estimated: Literal[True]


class AttemptReply(BaseModel):
    model_config = ConfigDict(extra="allow")

    number: int
    worker: str | None
    started_at: _Time
    ended_at: _Time
    outcome: str | None = Field(description="Null while it runs.")
    error_code: str | None
    error_message: str | None
    output_tokens: int
    resumed_from_tokens: int


class TaskSummary(_Reply):
    """A task as lists show it; `params`, `result` and `attempts` come with `?include=`."""

    task_id: str
    task_type: str
    user_id: str
    model_id: str
    status: Status
    priority: Priority
    progress: int = Field(ge=0, le=100)
    error_code: str | None
    error_message: str | None
    retry_count: int
    max_retries: int
    callback_url: str | None
    callback_events: list[Literal["COMPLETED", "FAILED", "CANCELLED"]]
    metadata: dict[str, str]
    not_before: _Time
    queue_timeout_seconds: float | None
    timeout_seconds: float
    deadline_seconds: float | None
    rerun_of: str | None
    created_at: str
    queued_at: _Time
    started_at: _Time = Field(description="Of the first attempt.")
    completed_at: _Time = Field(description="Set in every final state.")
    updated_at: str
    version: int = Field(description="Number of the last transition.")
    cancel_requested: bool
    next_attempt_at: _Time
    queue: QueueReply | None
    usage: UsageReply
    links: LinksReply
    params: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    attempts: list[AttemptReply] | None = None
    partial_text: str | None = None


class TaskReply(TaskSummary):
    """A task."""

    model_config = ConfigDict(extra="forbid", title="Task")

    params: dict[str, Any] | None
    result: dict[str, Any] | None
    attempts: list[AttemptReply]


class ListReply(_Reply):
    data: list[TaskSummary]
    next_cursor: str | None
    has_more: bool


class BulkReply(_Reply):
    tasks: list[TaskSummary | ProblemReply]


class CancelledMany(_Reply):
    cancelled: int = Field(description="CANCELLED in place: they had not started.")
    cancel_requested: int = Field(description="Told to stop.")
    has_more: bool = Field(description="More tasks match: call again.")


class PauseReply(_Reply):
    reason: str | None
    paused_by: str
    paused_at: str


class BreakerReply(_Reply):
    state: Literal["closed", "half_open", "open"]
    since: str | None = Field(description="When it closed; for the others, when it last stood closed.")
    refusals: int = Field(description="In a row, as of the last change.")


class ServingReply(_Reply):
    worker: str
    seen_at: str
    breaker: BreakerReply | None = Field(description="Null: the model has none, or it is not known yet.")


class BrokenReply(_Reply):
    worker: str
    error_code: str


class ModelReply(_Reply):
    model_id: str
    pool: str
    executor: str
    state: Literal["ok", "no_worker", "paused"]
    workers: int
    breaker: Literal["closed", "half_open", "open"] | None = Field(description="The best of `serving`.")
    serving: list[ServingReply]
    broken: list[BrokenReply] = Field(description="Workers whose tasks of this model fail at once.")
    paused: PauseReply | None
    limits: dict[str, Any]


class ModelsReply(_Reply):
    data: list[ModelReply]


class ClassReply(_Reply):
    waiting: int
    running: int
    scheduled: int = Field(description="Waiting for their `not_before`.")
    oldest_wait_seconds: float
    max_waiting: int | None


class WorkerReply(_Reply):
    worker: str
    models: list[str]
    slots: int
    in_use: int
    draining: bool
    seen_at: str


class PoolReply(_Reply):
    pool: str
    scheduling: Literal["strict", "weighted"]
    waiting: int
    running: int
    demand: int = Field(description="`waiting` + `running`: for a scaler.")
    oldest_wait_seconds: float
    slots: int = Field(description="Of live workers that take new work.")
    slots_in_use: int
    workers: list[WorkerReply]
    models: list[str]
    paused: PauseReply | None
    classes: dict[Literal["HIGH", "NORMAL", "LOW"], ClassReply]


class QueuesReply(_Reply):
    data: list[PoolReply]


class PausedReply(_Reply):
    kind: Literal["pool", "model"]
    name: str
    paused: PauseReply | None


class UsageLine(_Reply):
    user_id: str
    model_id: str
    day: str = Field(description="UTC day of the tasks' end.", examples=["2026-12-01"])
    tasks: int
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    discarded_tokens: int
    queue_seconds: float
    run_seconds: float


class UsagePage(_Reply):
    data: list[UsageLine]


class HealthReply(_Reply):
    status: Literal["ok"]


class ReadyReply(BaseModel):
    model_config = ConfigDict(extra="allow")

    status: Literal["ready", "not ready"]
    postgres: str
    db_schema: str = Field(alias="schema")
    temporal: str
    models: dict[str, str]
    stopping: bool


def problem(description: str, *, retry: bool = False) -> dict[str, Any]:
    """A documented refusal."""
    headers = {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}} if retry else {}
    return {
        "description": description,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        "headers": headers,
    }


_LOCATION: Final = {"Location": {"schema": {"type": "string"}, "description": "Where the task is read."}}
_RETRY: Final = {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds; while not final."}}
ACCEPTED: Final[dict[str, Any]] = {
    "model": TaskReply,
    "description": "The task is kept.",
    "headers": {
        **_LOCATION,
        **_RETRY,
        "Idempotent-Replayed": {
            "schema": {"type": "string"},
            "description": "`true`: the same request came before.",
        },
    },
}
TASK_OK: Final[dict[str, Any]] = {"model": TaskReply, "description": "The task."}
BULK: Final[dict[str, Any]] = {"model": BulkReply, "description": "One entry per task, in order."}
NOT_FOUND: Final = problem("No such task, as far as this key can see.")
INVALID: Final = problem("A value is refused; `errors` names it.")
TOO_MANY: Final = problem("A limit of rate or of waiting tasks.", retry=True)
REFUSED_BODY: Final[dict[int | str, dict[str, Any]]] = {
    400: problem("Not JSON as this service reads it, or a bad header."),
    413: problem("The body, or the model's input, is too large."),
    415: problem("Another content type or encoding."),
    422: INVALID,
    429: TOO_MANY,
}
