"""The states of a task and the moves between them: pure, one table."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Status(StrEnum):
    """Where a task stands. COMPLETED, FAILED and CANCELLED are final and absorb."""

    PENDING = "PENDING"
    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL: Final = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})
ACTIVE: Final = frozenset(set(Status) - FINAL)

_MOVES: Final[dict[Status, frozenset[Status]]] = {
    Status.PENDING: frozenset({Status.QUEUED, Status.CANCELLED, Status.FAILED}),
    Status.QUEUED: frozenset({Status.PROCESSING, Status.CANCELLED, Status.FAILED}),
    Status.PROCESSING: frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.QUEUED}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}


def may_move(old: Status, new: Status) -> bool:
    """Whether a task may go from `old` to `new`. A state never moves to itself."""
    return new in _MOVES[old]


class Priority(StrEnum):
    """The class of a task."""

    HIGH = "HIGH"
    NORMAL = "NORMAL"
    LOW = "LOW"


CLASSES: Final = (Priority.HIGH, Priority.NORMAL, Priority.LOW)  # best first
