"""The state table: every move, and that final states absorb."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.task.states import ACTIVE, FINAL, Status, may_move

ALLOWED = {
    ("PENDING", "QUEUED"),
    ("PENDING", "CANCELLED"),
    ("PENDING", "FAILED"),
    ("QUEUED", "PROCESSING"),
    ("QUEUED", "CANCELLED"),
    ("QUEUED", "FAILED"),
    ("PROCESSING", "COMPLETED"),
    ("PROCESSING", "FAILED"),
    ("PROCESSING", "CANCELLED"),
    ("PROCESSING", "QUEUED"),
}


@pytest.mark.parametrize("old", Status)
@pytest.mark.parametrize("new", Status)
def test_the_table_is_the_design(old: Status, new: Status) -> None:
    assert may_move(old, new) is ((old.value, new.value) in ALLOWED)


@given(st.lists(st.sampled_from(Status), max_size=30))
def test_no_walk_leaves_a_final_state(walk: list[Status]) -> None:
    state = Status.PENDING
    ended: Status | None = None
    for new in walk:
        if may_move(state, new):
            state = new
        if state.final:
            ended = ended or state
        assert ended is None or state is ended


def test_the_states_are_split_in_two() -> None:
    assert set(Status) == ACTIVE | FINAL
    assert not ACTIVE & FINAL
