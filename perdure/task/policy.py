"""Retry and priority policy as data and pure functions: no clock, no randomness of its own."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from perdure.task.states import Priority

BACK_OFF_CAP: Final = 60.0  # seconds
MAX_RUNS: Final = 60  # attempts and drains together
CANCEL_PATIENCE: Final = 4.0  # seconds that a cancel waits for the worker
QUICK_ATTEMPT: Final = 0.25  # seconds: an attempt that ends sooner need not announce itself
QUICK_TRIES: Final = 5
QUICK_TRY_DELAYS: Final = (0.0, 1.0, 2.0, 4.0, 8.0)  # seconds after the one before
SLOW_TRY_DELAYS: Final = (60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 86400.0, 108000.0)  # then DEAD

_KEYS: Final = {Priority.HIGH: 1, Priority.NORMAL: 3, Priority.LOW: 5}


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


def priority_key_of(name: str) -> int | None:
    """The key of a class by its name, None for a name that is no class."""
    return _KEYS[Priority(name)] if name in _KEYS else None


def next_lane(key: int) -> int:
    """The lane after a full `max_wait` under `strict`: one class (two keys) up, never above 1."""
    return max(1, key - 2)


def past(deadline: datetime | None, now: datetime, ahead: float = 0.0) -> bool:
    """Whether `now + ahead` seconds reaches the deadline. None never passes."""
    return deadline is not None and now + timedelta(seconds=ahead) >= deadline
