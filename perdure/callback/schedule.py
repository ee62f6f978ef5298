"""When a delivery is tried again: pure, no clock and no randomness of its own.

    plan = after_failure(tries=…, slow_tries=…, quick=True, waited=…, retry_after=…, jitter=…)

Five quick tries under Temporal's retry policy, then the slow tail from the table, then DEAD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal

from perdure.task.policy import QUICK_TRIES, QUICK_TRY_DELAYS, SLOW_TRY_DELAYS

QUICK_PHASE: Final = 120.0  # seconds from the first try: schedule-to-close of `deliver_callback`
RETRY_AFTER_CAP: Final = 86_400.0
JITTER: Final = 0.2
SWEEP_LAG: Final = 60.0  # seconds that the table waits for a quick try which Temporal already holds
_SECONDS: Final = re.compile(r"[0-9]{1,400}(\.[0-9]{1,400})?\Z", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """What follows a failed try. `delay` in seconds; None for DEAD.

    quick  Temporal tries again after `delay`; the table takes over SWEEP_LAG later, should that not happen
    slow   the table tries again after `delay`
    dead   nothing but a redelivery
    """

    kind: Literal["quick", "slow", "dead"]
    delay: float | None


def after_failure(
    *, tries: int, slow_tries: int, quick: bool, waited: float, retry_after: float | None, jitter: float
) -> Plan:
    """The plan after a failed try.

    `tries`: all so far, this one included. `slow_tries`: those that the table made since the commit or the
    last redelivery, this one included. `quick`: Temporal drives this try. `waited`: seconds since the quick
    phase began. `retry_after`: seconds the receiver asked for, None if it did not. `jitter`: uniform in
    [-1, 1].
    """
    asked = min(retry_after or 0.0, RETRY_AFTER_CAP)
    if quick and tries < QUICK_TRIES:
        delay = max(QUICK_TRY_DELAYS[tries] * (1 + JITTER * jitter), asked)
        if waited + delay < QUICK_PHASE:
            return Plan("quick", delay)
    if slow_tries >= len(SLOW_TRY_DELAYS):
        return Plan("dead", None)
    return Plan("slow", max(SLOW_TRY_DELAYS[slow_tries], asked))


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After header: digits or an HTTP date (any of its three forms).

    None for what is missing, garbage, negative or past. At most RETRY_AFTER_CAP.
    """
    if value is None:
        return None
    text = value.strip()
    if _SECONDS.match(text):
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, TypeError, OverflowError):
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        try:
            seconds = (date - now).total_seconds()
        except OverflowError:
            return None
    return min(seconds, RETRY_AFTER_CAP) if seconds > 0 else None
