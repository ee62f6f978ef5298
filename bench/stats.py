"""Spreads of measured values. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """What a sample says: count, median, 99th percentile (nearest rank), mean and worst. NaN when empty."""

    count: int
    p50: float
    p99: float
    mean: float
    worst: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = sorted(values)
        if not found:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        return cls(len(found), rank(found, 50), rank(found, 99), sum(found) / len(found), found[-1])


def rank(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted values: always one that was measured."""
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def median(values: Iterable[float]) -> float:
    """The middle value, the lower one of two. NaN when there is none."""
    return Spread.of(values).p50


def busy_share(intervals: Iterable[tuple[float, float]], slots: int, start: float, end: float) -> float:
    """How much of `slots` x (end - start) seconds the intervals fill: 1.0 is every slot, all the time."""
    filled = sum(max(0.0, min(to, end) - max(since, start)) for since, to in intervals)
    return filled / (slots * (end - start))


def ms(seconds: float, digits: int = 0) -> str:
    """Seconds as milliseconds in words."""
    return "no sample" if math.isnan(seconds) else f"{seconds * 1000:.{digits}f} ms"


def sec(seconds: float, digits: int = 2) -> str:
    """Seconds in words."""
    return "no sample" if math.isnan(seconds) else f"{seconds:.{digits}f} s"


def pair(spread: Spread, show: str = "ms") -> str:
    """p50 / p99 in one unit."""
    if not spread.count:
        return "no sample"
    if show == "ms":
        return f"{spread.p50 * 1000:.0f} / {spread.p99 * 1000:.0f} ms"
    return f"{spread.p50:.2f} / {spread.p99:.2f} s"
