"""How long another side asks us to wait: `Retry-After` and `retry-after-ms`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

LONGEST: Final = 86_400.0  # a day: what asks for more is capped
_SECONDS: Final = re.compile(r"\d{1,18}(?:\.\d{1,9})?\Z", re.ASCII)


def parse_retry_after(values: Sequence[str], now: datetime) -> float | None:
    """Seconds to wait at least, from the values of all `Retry-After` headers; None where none is legal.

    Takes whole and decimal seconds and HTTP dates (against `now`, an aware time: the server's own `Date`
    where it sent one). The largest counts. A past date asks for no wait: 0. Negative numbers, `nan`, `inf`,
    exponents and dates that no calendar holds are junk.
    """
    found = [wait for wait in (_one(value.strip(), now) for value in values) if wait is not None]
    return min(LONGEST, max(found)) if found else None


def parse_retry_after_ms(values: Sequence[str]) -> float | None:
    """The same for `retry-after-ms`, which some servers send beside it."""
    found = [float(value) / 1000 for value in map(str.strip, values) if _SECONDS.match(value)]
    return min(LONGEST, max(found)) if found else None


def http_date(value: str) -> datetime | None:
    """An HTTP date in any of its three forms, None for anything else."""
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _one(value: str, now: datetime) -> float | None:
    if _SECONDS.match(value):
        return float(value)
    moment = http_date(value)
    if moment is None:
        return None
    try:
        return max(0.0, (moment - now).total_seconds())
    except OverflowError:
        return None
