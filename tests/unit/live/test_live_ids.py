"""Event ids: they resume, they order, and junk is known as junk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.live.cursor import FINAL_CURSOR, FINAL_STAGE, Cursor, text_crc
from perdure.live.mark import Mark
from perdure.names import new_task_id
from perdure.store.news import Snapshot

TASK = new_task_id()
cursors = st.builds(
    Cursor,
    stage=st.integers(0, 200) | st.just(FINAL_STAGE),
    change=st.integers(0, 2**62),
    seq=st.integers(0, 10**9),
    offset=st.integers(0, 10**8),
    crc=st.integers(0, 2**32 - 1),
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    xmin = draw(st.integers(3, 2**60))
    width = draw(st.integers(0, 500))
    running = (
        draw(st.frozensets(st.integers(xmin, xmin + max(0, width - 1)), max_size=20))
        if width
        else frozenset()
    )
    return Snapshot(xmin, xmin + width, running)


@given(cursors)
def test_a_cursor_survives_its_id(cursor: Cursor) -> None:
    assert Cursor.parse(TASK, cursor.event_id(TASK)) == cursor


@given(cursors)
def test_another_tasks_id_is_junk(cursor: Cursor) -> None:
    assert Cursor.parse(new_task_id(), cursor.event_id(TASK)) is None


@given(st.text(max_size=60))
def test_junk_is_no_cursor_and_no_mark(text: str) -> None:
    assert Cursor.parse(TASK, text) is None
    assert Mark.parse("u", text) is None


@pytest.mark.parametrize(
    "junk", [None, "", "0", "-1", "abc", "9" * 30, "5", "1-2-3-4-5.zzzzzzzz", "\u0661-0-0-0-0.0"]
)
def test_known_junk(junk: str | None) -> None:
    assert Cursor.parse(TASK, junk) is None
    assert Mark.parse("u", junk) is None


@given(cursors, st.data())
def test_a_changed_id_is_junk(cursor: Cursor, data: st.DataObject) -> None:
    """A future made up by counting on is no future."""
    event_id = cursor.event_id(TASK)
    at = data.draw(st.integers(0, len(event_id) - 1))
    digit = data.draw(st.sampled_from("0123456789abcdef-."))
    changed = event_id[:at] + digit + event_id[at + 1 :]
    if changed != event_id:
        assert Cursor.parse(TASK, changed) != cursor


def test_the_final_id_is_one() -> None:
    assert FINAL_CURSOR.event_id(TASK) == Cursor(FINAL_STAGE).event_id(TASK)
    assert Cursor(120, 5, 9).event_id(TASK) != FINAL_CURSOR.event_id(TASK)
    assert Cursor(120, 2**62, 9) < FINAL_CURSOR


@given(st.text(max_size=30), st.text(max_size=30))
def test_the_crc_goes_on(first: str, second: str) -> None:
    assert text_crc(second, text_crc(first)) == text_crc(first + second)


@given(
    st.none() | snapshots(), st.none() | snapshots(), st.integers(0, 2**62), st.sampled_from(["", "0a1_2_3"])
)
def test_a_mark_survives_its_id(told: Snapshot | None, upto: Snapshot | None, after: int, beat: str) -> None:
    mark = Mark(told, upto, after)
    event_id = mark.event_id("user \u00e9", beat)
    assert event_id.isascii()
    assert Mark.parse("user \u00e9", event_id) == mark
    assert Mark.parse("another", event_id) is None


@given(snapshots())
def test_a_snapshot_survives_its_text(snapshot: Snapshot) -> None:
    assert Snapshot.parse(str(snapshot)) == snapshot


def test_what_a_snapshot_sees() -> None:
    snapshot = Snapshot.parse("10:20:12,15")
    assert [xid for xid in range(8, 22) if snapshot.sees(xid)] == [8, 9, 10, 11, 13, 14, 16, 17, 18, 19]
    assert Snapshot.parse("10:20:12").later(snapshot)
    assert Snapshot.parse("10:21:12,15,20").later(snapshot)
    assert not snapshot.later(Snapshot.parse("10:20:12"))
    assert not snapshot.later(snapshot)


@pytest.mark.parametrize("junk", ["", "1:2", "a:b:", "1:2:3,", "1:2:x", "-1:2:"])
def test_no_snapshot(junk: str) -> None:
    with pytest.raises(ValueError):
        Snapshot.parse(junk)
