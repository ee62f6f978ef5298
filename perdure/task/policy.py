"""Retry and priority policy as data and pure functions: no clock, no randomness of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from perdure import names
from perdure.contracts import TaskInput
from perdure.task.states import Priority

BACK_OFF_CAP: Final = 60.0  # seconds
MAX_RUNS: Final = 60  # attempts and drains together
CANCEL_PATIENCE: Final = 4.0  # seconds that a cancel waits for the worker
QUICK_ATTEMPT: Final = 0.25  # seconds: an attempt that ends sooner need not announce itself
QUICK_TRIES: Final = 5
QUICK_TRY_DELAYS: Final = (0.0, 1.0, 2.0, 4.0, 8.0)  # seconds after the one before
SLOW_TRY_DELAYS: Final = (60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 86400.0, 108000.0)  # then DEAD

_KEYS: Final = {Priority.HIGH: 1, Priority.NORMAL: 3, Priority.LOW: 5}
# Lanes of rows: the classes' own, and beside HIGH's and NORMAL's one for those that moved up to them.
_AGED: Final = {5: 4, 4: 2, 3: 2}
_LANE_KEYS: Final = {1: 1, 2: 1, 3: 3, 4: 3, 5: 5}
_NEXT_WEIGHT: Final = 1000.0  # the server's largest: next of all that wait under the same key


def back_off(n: int, jitter: float, retry_after: float | None = None) -> float:
    """Seconds before the next attempt: min(60, 2**n) x jitter, never sooner than `retry_after`.

    n counts from 0; jitter is uniform in [0.5, 1]. Finite and non-negative for any n.
    """
    base = BACK_OFF_CAP if n >= 6 else float(2 ** max(0, n))  # 2**6 > 60: no large power is ever computed
    return max(min(BACK_OFF_CAP, base) * jitter, retry_after or 0.0)


def priority_key(priority: Priority) -> int:
    """Temporal's key of a class: HIGH 1, NORMAL 3, LOW 5."""
    return _KEYS[priority]


def continuing_key(key: int) -> int:
    """A continuing attempt (drained or lost) goes one key higher, never above 1."""
    return max(1, key - 1)


def next_lane(key: int) -> int:
    """The key after a full `max_wait` under `strict`: one class (two keys) up, never above 1."""
    return max(1, key - 2)


def aged_lane(lane: int) -> int:
    """The lane of a row after a full `max_wait`: 5 -> 4 -> 2 and 3 -> 2. 1 and 2 stay.

    Those that moved up have a lane, and so a window, of their own: an old backlog of LOW never stands between
    a HIGH task and the engine.
    """
    return _AGED.get(lane, lane)


def lane_key(lane: int) -> int:
    """The priority key of a row's lane: what moved up competes with the class that it has reached."""
    return _LANE_KEYS[lane]


@dataclass(frozen=True)
class Place:
    """Where an attempt stands on its pool's queue: Temporal's priority key, fairness key and weight."""

    key: int
    fairness_key: str
    weight: float


def place(task: TaskInput, priority: Priority, lane: int, *, ahead: bool) -> Place:
    """The place of an attempt whose lane is the key it has reached by waiting. `ahead`: it continues a
    drained or lost one and goes one key higher; under HIGH's own key it is the next.

    `strict`: the lane is the key, users share within it, and what moved up from another class takes turns
    with them as a user of its own: it waits neither behind nor before that user's own tasks. `weighted`: one
    key for all, and each pair of class and user is a fairness key whose weight is the class's share divided
    among its users (measured: 6 : 4 : 2 holds, and users of a class get equal parts).
    """
    if task.scheduling.mode == "strict":
        aged = lane < _KEYS[priority]
        key, share, owner = lane, task.user_weight, f"{priority}:{task.user_id}" if aged else task.user_id
        if ahead and key == 1:
            share, owner = _NEXT_WEIGHT, f"next:{task.user_id}"
    else:
        part = task.user_weight / max(task.class_users, task.user_weight)
        key, owner = _KEYS[Priority.NORMAL], f"{priority}:{task.user_id}"
        share = task.scheduling.weights.get(str(priority), 1.0) * part
    weight = min(1000.0, max(0.001, share))  # what the server takes
    return Place(continuing_key(key) if ahead else key, names.fairness_key(owner), weight)


def past(deadline: datetime | None, now: datetime, ahead: float = 0.0) -> bool:
    """Whether `now + ahead` seconds reaches the deadline. None never passes."""
    return deadline is not None and now + timedelta(seconds=ahead) >= deadline
