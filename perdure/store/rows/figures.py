"""Figures, workers seen, and what upkeep reports."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from perdure.contracts import ModelNews
from perdure.task.states import Priority


@dataclass(frozen=True, slots=True)
class QueueStat:
    """One class of one pool. `pending` + `queued` wait, `running` are PROCESSING, `scheduled` have a
    `not_before` to come and are in none of the others. `oldest_wait` in seconds, of
    tasks that have not started yet; 0 when none waits."""

    pool: str
    priority: Priority
    pending: int
    queued: int
    running: int
    scheduled: int
    oldest_wait: float

    @property
    def waiting(self) -> int:
        return self.pending + self.queued


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Of the last tasks that a pool completed: seconds from first start to end."""

    count: int
    mean: float
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The ledger of one user, model and UTC day (of the end)."""

    user_id: str
    model_id: str
    day: datetime
    tasks: int
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    discarded_tokens: int
    queue_seconds: float  # created (or not_before) to first start
    run_seconds: float  # first start to end


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the engine says of one GPU worker. `models` are those of its pool; what the worker itself tells of
    them outranks that. `silent`: seconds since its last heartbeat."""

    worker: str
    pool: str
    models: tuple[str, ...]
    slots: int
    in_use: int
    draining: bool = False
    silent: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker that was seen lately, as of its last heartbeat. `models` are those it serves; `told` is what
    it said of them, None as long as it has said nothing."""

    worker: str
    pool: str
    models: tuple[str, ...]
    slots: int
    in_use: int
    draining: bool
    seen_at: datetime
    told: tuple[ModelNews, ...] | None = None

    def serves(self, model_id: str) -> bool:
        """Whether it takes new tasks of the model."""
        return not self.draining and model_id in self.models


@dataclass(frozen=True, slots=True)
class SchemaState:
    """`ok` when the schema is the expected revision or a newer one (schemas only grow within a release)."""

    current: str | None
    expected: str
    ok: bool


@dataclass(frozen=True, slots=True)
class MissingMark:
    """How long the engine has not known a task's workflow. `age` in seconds, 0 at the first sight."""

    age: float
    restarts: int


@dataclass(frozen=True, slots=True)
class Purged:
    """Rows that a retention pass removed."""

    tasks: int = 0
    keys: int = 0
    workers: int = 0
    secrets: int = 0

    @property
    def total(self) -> int:
        return self.tasks + self.keys + self.workers + self.secrets
