"""Retry-After in all its forms."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.llm.retry_after import LONGEST, parse_retry_after, parse_retry_after_ms

NOW = datetime(2026, 11, 6, 8, 49, 37, tzinfo=UTC)


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        (["3"], 3.0),
        ([" 3 "], 3.0),
        (["0"], 0.0),
        (["1.5"], 1.5),
        (["Fri, 06 Nov 2026 08:49:40 GMT"], 3.0),
        (["Friday, 06-Nov-26 08:49:40 GMT"], 3.0),
        (["Fri Nov  6 08:49:40 2026"], 3.0),
        (["Fri, 06 Nov 2020 08:49:40 GMT"], 0.0),
        (["Fri, 31 Dec 9999 23:59:59 GMT"], LONGEST),
        (["Fri, 31 Dec 99999 23:59:59 GMT"], None),
        (["999999999"], LONGEST),
        (["9" * 18], LONGEST),
        (["9" * 400], None),
        (["-5"], None),
        (["nan"], None),
        (["inf"], None),
        (["1e400"], None),
        (["1e3"], None),
        (["٣"], None),
        ([""], None),
        (["soon"], None),
        (["3, 5"], None),
        (["3", "5"], 5.0),
        (["junk", "2"], 2.0),
        ([], None),
    ],
)
def test_forms(values: list[str], seconds: float | None) -> None:
    assert parse_retry_after(values, NOW) == seconds


def test_milliseconds() -> None:
    assert parse_retry_after_ms(["1500"]) == 1.5
    assert parse_retry_after_ms(["nan", "-1", ""]) is None


@given(st.lists(st.text(max_size=40), max_size=3))
def test_whatever_comes_the_wait_is_finite_or_none(values: list[str]) -> None:
    wait = parse_retry_after(values, NOW)
    assert wait is None or 0 <= wait <= LONGEST
