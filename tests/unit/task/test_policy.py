"""Back-off and lanes."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.task import policy
from perdure.task.states import Priority


@given(st.integers(0, 5000), st.floats(0.5, 1.0), st.none() | st.floats(0, 1e9))
def test_every_delay_is_finite_capped_and_not_before_what_was_asked(
    n: int, jitter: float, asked: float | None
) -> None:
    delay = policy.back_off(n, jitter, asked)
    assert math.isfinite(delay)
    assert delay >= (asked or 0)
    assert delay <= max(policy.BACK_OFF_CAP, asked or 0)
    assert delay >= 0.5 * min(policy.BACK_OFF_CAP, 2 ** min(n, 6))


@pytest.mark.parametrize(("n", "expected"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (4999, 60)])
def test_it_doubles_to_the_cap(n: int, expected: float) -> None:
    assert policy.back_off(n, 1.0) == expected


def test_keys_lanes_and_names() -> None:
    assert [policy.priority_key(p) for p in (Priority.HIGH, Priority.NORMAL, Priority.LOW)] == [1, 3, 5]
    assert [policy.continuing_key(key) for key in (1, 3, 5)] == [1, 2, 4]
    assert [policy.next_lane(key) for key in (5, 3, 1, 4, 2)] == [3, 1, 1, 2, 1]
    assert policy.priority_key_of("LOW") == 5
    assert policy.priority_key_of("low") is None
    assert policy.priority_key_of("") is None


def test_deadlines() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert not policy.past(None, now, 1e9)
    assert policy.past(now, now)
    assert not policy.past(now + timedelta(seconds=2), now, 1)
    assert policy.past(now + timedelta(seconds=1), now, 1)


def test_the_callback_schedule_reaches_three_days() -> None:
    assert len(policy.QUICK_TRY_DELAYS) == policy.QUICK_TRIES
    assert 71 * 3600 < sum(policy.SLOW_TRY_DELAYS) < 73 * 3600
