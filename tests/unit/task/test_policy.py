"""Back-off and lanes."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.task import policy
from perdure.task.states import Priority
from tests.unit.task.test_lifecycle import life


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


def test_deadlines() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert not policy.past(None, now, 1e9)
    assert policy.past(now, now)
    assert not policy.past(now + timedelta(seconds=2), now, 1)
    assert policy.past(now + timedelta(seconds=1), now, 1)


def test_the_callback_schedule_reaches_three_days() -> None:
    assert len(policy.QUICK_TRY_DELAYS) == policy.QUICK_TRIES
    assert 71 * 3600 < sum(policy.SLOW_TRY_DELAYS) < 73 * 3600


def test_strict_places_by_lane_and_shares_by_user() -> None:
    task = life(user_weight=2.5).task
    place = policy.place(task, Priority.NORMAL, 3, ahead=False)
    assert (place.key, place.fairness_key, place.weight) == (3, "ann", 2.5)
    assert policy.place(task, Priority.NORMAL, 3, ahead=True).key == 2


def test_what_moved_up_takes_turns_with_its_users_own_tasks() -> None:
    task = life(user_weight=2.5).task
    for key in (3, 1):
        place = policy.place(task, Priority.LOW, key, ahead=False)
        assert (place.key, place.fairness_key, place.weight) == (key, "LOW:ann", 2.5)


def test_a_continuing_attempt_of_the_best_class_is_the_next() -> None:
    task = life().task
    place = policy.place(task, Priority.HIGH, 1, ahead=True)
    assert (place.key, place.fairness_key, place.weight) == (1, "next:ann", 1000)
    assert policy.place(task, Priority.LOW, 1, ahead=True) == place
    assert policy.place(task, Priority.LOW, 5, ahead=True).fairness_key == "ann"


def test_lanes_of_rows_and_their_keys() -> None:
    assert [policy.aged_lane(lane) for lane in (5, 4, 3, 2, 1)] == [4, 2, 2, 2, 1]
    assert [policy.lane_key(lane) for lane in (5, 4, 3, 2, 1)] == [5, 3, 3, 1, 1]
    for lane in (5, 4, 3, 2, 1):  # rows and waiting attempts move up alike
        assert policy.lane_key(policy.aged_lane(lane)) == policy.next_lane(policy.lane_key(lane))


def test_weighted_divides_a_class_among_its_users() -> None:
    scheduling = {"mode": "weighted", "weights": {"HIGH": 6, "NORMAL": 4, "LOW": 2}}
    task = life(scheduling=scheduling, class_users=4.0).task
    place = policy.place(task, Priority.HIGH, 1, ahead=False)
    assert (place.key, place.fairness_key, place.weight) == (3, "HIGH:ann", 1.5)
    alone = life(scheduling=scheduling, class_users=0.0).task
    assert policy.place(alone, Priority.LOW, 5, ahead=False).weight == 2


@given(st.floats(0.0001, 1e6), st.floats(0, 1e6))
def test_weights_stay_within_what_the_server_takes(user: float, everybody: float) -> None:
    for mode in ("strict", "weighted"):
        task = life(scheduling={"mode": mode}, user_weight=user, class_users=everybody).task
        assert 0.001 <= policy.place(task, Priority.HIGH, 1, ahead=False).weight <= 1000
