"""PENDING rows as the dispatcher sees them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from perdure.store.rows.tasks import TaskRow
from perdure.task.states import Priority


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane of one pool as the dispatcher sees it: 1 HIGH, 3 NORMAL, 5 LOW; 2 and 4 hold what has moved up
    to HIGH and NORMAL by waiting.

    `pending`: rows that could be claimed now, counted up to 1,000. `waiting`: rows in the window (QUEUED, and
    PENDING under a lease). `oldest`: creation of the oldest row that could be claimed.
    """

    pool: str
    lane: int
    pending: int
    waiting: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class DispatchRow:
    """A claimed row. `task` holds params and attempts. The lease ends at `leased_until` (database clock)."""

    task: TaskRow
    leased_until: datetime


@dataclass(frozen=True, slots=True)
class Queued:
    """What `queued` found of a started task: a cancel, or another class, that must be signalled now."""

    task_id: str
    cancel_requested: bool
    cancel_reason: str | None
    priority: Priority | None = None  # set where it is not the one that the task was started with


@dataclass(frozen=True, slots=True)
class Expired:
    """A PENDING row that passed its deadline and is FAILED now. `delivery_id`: its callback, if any."""

    task: TaskRow
    delivery_id: str | None


@dataclass(frozen=True, slots=True)
class Pause:
    """A paused pool or model: what waits stays, nothing starts."""

    kind: Literal["pool", "model"]
    name: str
    reason: str | None
    paused_by: str
    paused_at: datetime
