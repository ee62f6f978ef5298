"""When a delivery is tried again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.callback.schedule import QUICK_PHASE, Plan, after_failure, parse_retry_after
from perdure.task.policy import SLOW_TRY_DELAYS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = 86_400.0


def plan(tries: int, *, quick: bool = True, slow_tries: int = 0, waited: float = 0, **more: float) -> Plan:
    return after_failure(
        tries=tries, slow_tries=slow_tries, quick=quick, waited=waited,
        retry_after=more.get("retry_after"), jitter=more.get("jitter", 0.0),
    )  # fmt: skip


def test_five_quick_tries_then_the_table() -> None:
    assert [plan(n) for n in (1, 2, 3, 4)] == [Plan("quick", d) for d in (1, 2, 4, 8)]
    assert plan(5) == Plan("slow", 60)


def test_quick_delays_spread_by_a_fifth() -> None:
    assert plan(4, jitter=1.0) == Plan("quick", 9.6)
    assert plan(4, jitter=-1.0) == Plan("quick", 6.4)


def test_the_tail_and_its_end() -> None:
    tail = [plan(6 + n, quick=False, slow_tries=n) for n in range(1, 8)]
    assert [one.delay for one in tail] == list(SLOW_TRY_DELAYS[1:])
    assert {one.kind for one in tail} == {"slow"}
    assert plan(13, quick=False, slow_tries=8) == Plan("dead", None)
    assert sum(SLOW_TRY_DELAYS) > 3 * DAY - 3600


def test_a_sweep_before_any_quick_try_starts_the_tail() -> None:
    """The crash after a commit: the sweep makes the first try, and the whole tail follows."""
    assert plan(1, quick=False, slow_tries=1) == Plan("slow", 300)
    assert plan(1, quick=False, slow_tries=0) == Plan("slow", 60)


def test_two_minutes_end_the_quick_phase() -> None:
    assert plan(1, waited=QUICK_PHASE - 1.5) == Plan("quick", 1)
    assert plan(1, waited=QUICK_PHASE - 1) == Plan("slow", 60)


def test_retry_after_is_never_undercut() -> None:
    assert plan(1, retry_after=30, jitter=-1) == Plan("quick", 30)
    assert plan(1, retry_after=0.1) == Plan("quick", 1)
    assert plan(1, retry_after=119) == Plan("quick", 119)
    assert plan(1, retry_after=120) == Plan("slow", 120)
    assert plan(1, retry_after=10) == Plan("quick", 10)
    assert plan(7, quick=False, slow_tries=1, retry_after=7000) == Plan("slow", 7000)
    assert plan(7, quick=False, slow_tries=1, retry_after=10 * DAY) == Plan("slow", DAY)


def test_retry_after_does_not_outlive_the_tail() -> None:
    assert plan(13, quick=False, slow_tries=8, retry_after=5) == Plan("dead", None)


@given(
    tries=st.integers(1, 40), slow=st.integers(0, 20), quick=st.booleans(), waited=st.floats(0, 1e6),
    asked=st.none() | st.floats(0, 1e300), jitter=st.floats(-1, 1),
)  # fmt: skip
def test_delays_are_bounded_and_dead_has_none(
    tries: int, slow: int, quick: bool, waited: float, asked: float | None, jitter: float
) -> None:
    made = after_failure(
        tries=tries, slow_tries=slow, quick=quick, waited=waited, retry_after=asked, jitter=jitter
    )
    if made.delay is None:
        assert made.kind == "dead"
    else:
        assert min(asked or 0, DAY) <= made.delay <= max(SLOW_TRY_DELAYS[-1], DAY)
        assert made.kind != "quick" or waited + made.delay < QUICK_PHASE


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        ("Thu, 01 Jan 2026 00:10:00 GMT", 600.0),
        ("Thursday, 01-Jan-26 00:10:00 GMT", 600.0),
        ("Thu Jan  1 00:10:00 2026", 600.0),
        ("99999999999", DAY),
        ("9" * 399, DAY),
        ("Fri, 01 Jan 2100 00:00:00 GMT", DAY),
        ("0", None),
        ("-5", None),
        ("", None),
        ("soon", None),
        ("10, 20", None),
        ("1e3", None),
        ("nan", None),
        ("inf", None),
        ("٣", None),
        ("9" * 5000, None),
        ("Wed, 31 Dec 2025 23:59:00 GMT", None),
        ("Thu, 99 Jan 2026 00:10:00 GMT", None),
        ("Thu, 01 Jan 9999999 00:10:00 GMT", None),
        (None, None),
    ],
)
def test_retry_after_in_all_forms(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, NOW) == seconds
