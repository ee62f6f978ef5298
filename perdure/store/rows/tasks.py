"""Tasks as repositories take and give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from perdure.contracts import AttemptRecord, Usage
from perdure.store.jsontext import from_json
from perdure.task.states import Priority, Status

Include = Literal["params", "result", "attempts"]
ALL_EVENTS = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. Every query for a caller carries one; `admin` alone sees what others own."""

    user_id: str
    scopes: frozenset[str] = frozenset()
    admin: bool = False
    act_as: bool = False
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class NewTask:
    """One accepted submit. `params_json` is the JSON text as it will be read back (see `jsontext.to_json`).

    Durations count from the row's own creation, or from `not_before` when that is later; the database's clock
    makes them absolute.
    """

    task_id: str
    user_id: str
    model_id: str
    pool: str
    params_json: str
    task_type: str = "chat"
    priority: Priority = Priority.NORMAL
    max_retries: int = 3
    callback_url: str | None = None
    callback_events: tuple[Status, ...] = ALL_EVENTS
    metadata: Mapping[str, str] = field(default_factory=dict)
    not_before: datetime | None = None
    queue_timeout_seconds: float | None = None
    timeout_seconds: float = 1800
    deadline_seconds: float | None = None
    rerun_of: str | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Idempotency:
    """An Idempotency-Key: unique per (user, route, key). `fingerprint` is a hash of the accepted request's
    canonical JSON. `reply` is any text that a replay gets back (bulk: the problems between the tasks)."""

    user_id: str
    route: str
    key: str
    fingerprint: bytes
    reply: str | None = None
    ttl_seconds: float = 86_400


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task as its row shows it. `params_json`, `result_json` and `attempts_json` are None unless asked for.

    `lane` is the Temporal priority key that the next start gets (1, 3, 5; ageing lowers it). `change_seq`
    grows with every visible change of any task, `version` with every transition of this one.
    """

    task_id: str
    task_type: str
    user_id: str
    model_id: str
    pool: str
    status: Status
    priority: Priority
    lane: int
    progress: int
    version: int
    change_seq: int
    error_code: str | None
    error_message: str | None
    retry_count: int
    max_retries: int
    prompt_tokens: int | None
    completion_tokens: int | None
    discarded_tokens: int
    metadata_json: str
    callback_url: str | None
    callback_events: tuple[Status, ...]
    not_before: datetime | None
    queue_timeout_seconds: float | None
    timeout_seconds: float
    deadline_seconds: float | None
    queue_deadline: datetime | None
    total_deadline: datetime | None
    rerun_of: str | None
    traceparent: str | None
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    updated_at: datetime
    cancel_requested: bool
    cancel_reason: str | None
    next_attempt_at: datetime | None
    claimed_at: datetime | None  # first claim by a dispatcher: from then on a workflow may exist
    start_failures: int
    restarts: int  # by the reconciler
    params_json: str | None = None
    result_json: str | None = None
    attempts_json: str | None = None

    @property
    def params(self) -> dict[str, Any] | None:
        """The params, or None when they were not asked for."""
        return None if self.params_json is None else from_json(self.params_json)

    @property
    def result(self) -> dict[str, Any] | None:
        """The result, or None when there is none or it was not asked for."""
        return None if self.result_json is None else from_json(self.result_json)

    @property
    def attempts(self) -> list[AttemptRecord]:
        """The attempts; empty when they were not asked for."""
        if self.attempts_json is None:
            return []
        return [AttemptRecord.model_validate(entry) for entry in from_json(self.attempts_json)]

    @property
    def metadata(self) -> dict[str, str]:
        """The caller's pairs in the caller's order."""
        pairs: dict[str, str] = from_json(self.metadata_json)
        return pairs

    @property
    def usage(self) -> Usage:
        """Tokens summed over attempts."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            discarded_tokens=self.discarded_tokens,
        )


@dataclass(frozen=True, slots=True)
class CreateResult:
    """`created`; `replayed`: the same request came before, `task` is it as it is now; `conflict`: the key was
    used for another request, `task` is None."""

    kind: Literal["created", "replayed", "conflict"]
    task: TaskRow | None


@dataclass(frozen=True, slots=True)
class CreateManyResult:
    """Like CreateResult for a bulk submit. `tasks` are in the order of the call; None stands for one deleted
    since. `reply` is the text stored with the key."""

    kind: Literal["created", "replayed", "conflict"]
    tasks: list[TaskRow | None]
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Filters of a list. Empty means all. `user_id` is honoured for an admin only."""

    statuses: tuple[Status, ...] = ()
    model_id: str | None = None
    task_type: str | None = None
    priority: Priority | None = None
    user_id: str | None = None
    created_after: datetime | None = None  # exclusive
    created_before: datetime | None = None  # exclusive
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A page of tasks, newest first. `next_cursor` is None on the last page."""

    tasks: list[TaskRow]
    next_cursor: str | None

    @property
    def has_more(self) -> bool:
        return self.next_cursor is not None


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What a cancel found and did.

    `cancelled`: done in place, it had never been claimed; `requested`: the flag stands; `already_cancelled`;
    `finished`: COMPLETED or FAILED; `unknown`: not this caller's. `signal` says that a workflow exists or may
    exist and must be told.
    """

    kind: Literal["cancelled", "requested", "already_cancelled", "finished", "unknown"]
    task: TaskRow | None = None
    signal: bool = False


@dataclass(frozen=True, slots=True)
class PriorityResult:
    """`changed`, `not_waiting` (running or final) or `unknown`. `signal`: tell the workflow too."""

    kind: Literal["changed", "not_waiting", "unknown"]
    task: TaskRow | None = None
    signal: bool = False


DeleteResult = Literal["deleted", "active", "unknown"]


@dataclass(frozen=True, slots=True)
class Changes:
    """Answer to `changes`: rows that are no longer as known, and ids that no longer exist."""

    rows: list[TaskRow]
    gone: list[str]
