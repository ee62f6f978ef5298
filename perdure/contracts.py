"""Models that cross a Temporal boundary, and the JSON that rows keep of them.

Every field added later has a default: old histories hold payloads without it. Times are aware UTC datetimes;
durations are seconds. Unknown fields are ignored, so that a new worker's payload is read by an old one.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perdure.task.states import Priority, Status

MAX_CHECKPOINT_BYTES = 256 * 1024  # above that a beat carries no text and the next attempt starts over
MAX_INLINE_PARAMS_BYTES = 16 * 1024  # above that `generate` reads the params from its run's first event
MAX_RESULT_BYTES = 1024 * 1024  # encoded result, measured on the GPU worker

Params = dict[str, Any]


class Contract(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Usage(Contract):
    """Tokens summed over attempts. None is unknown, not zero."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    discarded_tokens: int = 0  # made by an attempt whose text was thrown away


class Beat(Contract):
    """Heartbeat, checkpoint and progress in one record (DESIGN: the heartbeat is the checkpoint).

    `text`, `reasoning` and the counts are the whole output so far: what earlier attempts made and this one
    continued from is included, so a beat alone is enough to continue. `text` is None when the checkpoint
    would exceed MAX_CHECKPOINT_BYTES. `seq` counts beats within the attempt.
    """

    attempt: int
    seq: int = 0
    progress: int = 0  # 0-99
    text: str | None = ""
    reasoning: str = ""
    output_tokens: int = 0  # of the whole text so far
    resumed_from_tokens: int = 0  # how many of them came with the checkpoint of the attempt before
    restarted: bool = False  # this attempt threw an earlier checkpoint away and began again
    prompt_tokens: int | None = None
    discarded_tokens: int = 0  # by this attempt
    state: Any = None  # the executor's own checkpoint (python executor): any JSON
    message: str | None = None  # the executor's own progress text


class TaskResult(Contract):
    """`result` of a chat model. `tool_calls` in OpenAI's shape."""

    model_config = ConfigDict(extra="allow", frozen=True)  # a python executor may add keys of its own

    text: str = ""
    finish_reason: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    refusal: str | None = None
    logprobs: Any | None = None
    warnings: list[str] | None = None
    model: str | None = None
    resumed: bool = False


class Limits(Contract):
    """Bounds of one attempt, decided by the task and its model."""

    attempt_seconds: float = 1800
    heartbeat_seconds: float = 10
    max_output_bytes: int = 1024 * 1024


class GenerateInput(Contract):
    """Input of `generate`. `params` is None above MAX_INLINE_PARAMS_BYTES: the worker then reads the first
    event of its own run."""

    task_id: str
    attempt: int
    model_id: str
    params: Params | None = None
    checkpoint: Beat | None = None
    limits: Limits = Limits()
    announce: bool = True  # signal `attempt_started`
    traceparent: str | None = None
    due_at: datetime | None = (
        None  # created, or `not_before`; set for the first start, whose wait is measured
    )


class GenerateResult(Contract):
    """How an attempt ended in order. Faults are ApplicationErrors with a `FaultDetails` as their details.

    `generated`: `result` and `beat` are final. `cancelled`, `drained`: `beat` is the checkpoint.
    `usage` is this attempt's own.
    """

    kind: Literal["generated", "cancelled", "drained"]
    beat: Beat
    result: TaskResult | None = None
    usage: Usage = Usage()
    worker: str = ""
    started_at: datetime | None = None


class FaultDetails(Contract):
    """Details of the ApplicationError (type = error code) that ends a failed attempt."""

    code: str
    message: str
    retryable: bool
    refused: bool = False
    retry_after: float | None = None
    beat: Beat | None = None
    usage: Usage = Usage()
    worker: str = ""
    started_at: datetime | None = None


AttemptOutcome = Literal["completed", "failed", "cancelled", "drained", "lost"]


class AttemptRecord(Contract):
    """One entry of `attempts[]`. `outcome` is None while it runs."""

    number: int
    worker: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: AttemptOutcome | None = None
    error_code: str | None = None
    error_message: str | None = None
    output_tokens: int = 0
    resumed_from_tokens: int = 0


class Scheduling(Contract):
    """What the workflow must know of its pool's policy."""

    mode: Literal["strict", "weighted"] = "strict"
    max_wait: float = 300  # seconds per class under `strict`
    weights: dict[str, float] = Field(default_factory=dict)  # class -> share under `weighted`


class TaskInput(Contract):
    """Start input of `InferenceTask`. A restart fills the running figures from the row, so numbers go on."""

    task_id: str
    user_id: str
    model_id: str
    task_type: str
    priority: Priority
    pool: str
    params: Params
    base_version: int = 0
    max_retries: int = 3
    max_lost: int = 5
    retry_count: int = 0
    lost_count: int = 0
    attempts: list[AttemptRecord] = Field(default_factory=list)
    usage: Usage = Usage()
    checkpoint: Beat | None = None
    created_at: datetime
    not_before: datetime | None = None
    queued_at: datetime | None = None  # None: the workflow's own start
    started_at: datetime | None = None
    queue_deadline: datetime | None = None  # to first start
    total_deadline: datetime | None = None
    timeout_seconds: float = 1800  # one attempt
    heartbeat_seconds: float = 10
    unavailable_patience: float = 600
    max_output_bytes: int = 1024 * 1024
    scheduling: Scheduling = Scheduling()
    lane: int | None = None  # Temporal's priority key it has reached by waiting; None: its class's own
    lane_since: datetime | None = None  # since when it waits on that lane
    user_weight: float = 1.0
    class_users: float = (
        1.0  # `weighted`: the weights of all users who wait in its class, summed at the start
    )
    cancel_requested: bool = False
    cancel_reason: str | None = None
    search_attributes: bool = False  # the start-up check found them registered
    callbacks: bool = False  # a callback may follow the outcome
    traceparent: str | None = None


class Projection(Contract):
    """The whole of a task that the row shows, as its workflow sees it. Every write carries all of it."""

    task_id: str
    version: int
    status: Status
    priority: Priority | None = None
    progress: int = 0
    retry_count: int = 0
    attempts: list[AttemptRecord] = Field(default_factory=list)
    usage: Usage = Usage()
    error_code: str | None = None
    error_message: str | None = None
    queued_at: datetime | None = None
    started_at: datetime | None = None
    next_attempt_at: datetime | None = None


class Outcome(Contract):
    """The final write: the projection at the end, and the result. `status` is final."""

    projection: Projection
    result: TaskResult | None = None
    completed_at: datetime
    take_last_beat: bool = False  # the worker did not answer the cancel: read the text from `describe`
    model_id: str = ""  # for the figures alone, as are the next two
    task_type: str = ""
    due_at: datetime | None = None  # created, or `not_before`
    traceparent: str | None = None


class CommitReceipt(Contract):
    """What `commit_outcome` did. `delivery_id` is set when a callback waits to be sent."""

    kind: Literal["committed", "superseded", "missing"]
    delivery_id: str | None = None


class DeliverInput(Contract):
    task_id: str
    delivery_id: str
    traceparent: str | None = None


class ModelNews(Contract):
    """What a GPU worker says of one model of its pool.

    `error_code`: it cannot serve it, and its tasks fail with that. `breaker`: None where the model has none;
    `since`: when the breaker closed, or when it last stood closed; `refusals` in a row.
    """

    model_id: str
    error_code: str | None = None
    breaker: Literal["closed", "half_open", "open"] | None = None
    since: datetime | None = None
    refusals: int = 0


class WorkerNews(Contract):
    """What a GPU worker says of itself: at its start, and when a breaker moves. `at` is its own clock."""

    worker: str
    pool: str
    slots: int
    models: list[ModelNews] = Field(default_factory=list)
    at: datetime


class AttemptStarted(Contract):
    """Argument of the signal `attempt_started`."""

    number: int
    worker: str
    at: datetime


class CancelRequest(Contract):
    """Argument of the signal `cancel`."""

    reason: str | None = None


class Snapshot(Contract):
    """Answer of the query `snapshot`."""

    projection: Projection
    cancel_requested: bool = False
    cancel_reason: str | None = None
    attempt: int = 0
    waiting: Literal["slot", "back_off", "record", "callback"] | None = None
