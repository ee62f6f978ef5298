"""The body: six fields, frozen bytes, any content."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.callback.body import MAX_BODY_BYTES, build_body, build_test_body
from perdure.task.states import ACTIVE, FINAL, Status

AT = datetime(2026, 5, 4, 3, 2, 1, 987_654, tzinfo=UTC)
TASK = "task_0190a1b2c3d4e5f60718293a4b5c6d7e"
FIELDS = ["task_id", "event", "status", "result", "error", "timestamp"]


def body(status: Status = Status.COMPLETED, **changes: Any) -> bytes:
    given_ = {"result": {"text": "hi"}, "error_code": None, "error_message": None, "at": AT} | changes
    return build_body(task_id=TASK, status=status, **given_)


def test_completed_body_is_exactly_these_bytes() -> None:
    assert body() == (
        b'{"task_id":"task_0190a1b2c3d4e5f60718293a4b5c6d7e","event":"COMPLETED","status":"COMPLETED",'
        b'"result":{"text":"hi"},"error":null,"timestamp":1777863721988}'
    )


@pytest.mark.parametrize("status", sorted(FINAL))
def test_six_fields_in_order_for_every_final_state(status: Status) -> None:
    made = json.loads(body(status, error_code="internal", error_message="it broke"))
    assert list(made) == FIELDS
    assert made["event"] == made["status"] == status
    assert made["error"] == ({"code": "internal", "message": "it broke"} if status is Status.FAILED else None)


def test_cancelled_keeps_the_partial_result() -> None:
    made = json.loads(body(Status.CANCELLED, result={"text": "half a sen"}))
    assert made["result"] == {"text": "half a sen"}
    assert made["error"] is None


def test_failed_without_a_code_is_internal() -> None:
    made = json.loads(body(Status.FAILED, result=None))
    assert made["error"] == {"code": "internal", "message": ""}
    assert made["result"] is None


@pytest.mark.parametrize("status", sorted(ACTIVE))
def test_no_body_for_a_state_that_is_not_final(status: Status) -> None:
    with pytest.raises(ValueError, match="not final"):
        body(status)


def test_a_time_needs_a_zone_and_any_zone_will_do() -> None:
    with pytest.raises(ValueError, match="zone"):
        body(at=AT.replace(tzinfo=None))
    assert body(at=AT.astimezone(timezone(timedelta(hours=9)))) == body()


@pytest.mark.parametrize(
    "text",
    ["é", "😀", "</script>", "\u2028\u2029", "a/b", "\\", '"', "\t\r\n", "x" * 50_000, "ﷺ", "\U0010ffff"],
)
def test_text_comes_back_as_it_was(text: str) -> None:
    assert json.loads(body(result={"text": text}))["result"] == {"text": text}


@pytest.mark.parametrize("value", [1.0, 1e21, 2**53 + 1, 10**40, -0.0, {}, [], None, True])
def test_values_come_back_as_they_were(value: object) -> None:
    made = json.loads(body(result={"value": value}))["result"]["value"]
    assert made == value
    assert type(made) is type(value)


def test_text_that_no_encoding_holds_is_replaced() -> None:
    made = json.loads(body(result={"a": "x\ud800y", "b": "\x00", "n": float("nan"), "i": float("inf")}))
    assert made["result"] == {"a": "x\ufffdy", "b": "\ufffd", "n": None, "i": None}
    failed = json.loads(body(Status.FAILED, error_code="internal", error_message="\udfff" + "m" * 9_000))
    assert failed["error"]["message"].startswith("\ufffdm")
    assert len(failed["error"]["message"]) == 4_000


def test_a_large_result_is_left_out_and_said_where_it_is() -> None:
    result = {"text": "é" * MAX_BODY_BYTES}
    made = body(result=result)
    size = len(json.dumps(result, ensure_ascii=False, separators=(",", ":")).encode())
    assert json.loads(made)["result"] == {"omitted": True, "bytes": size, "url": f"/v1/tasks/{TASK}"}
    assert list(json.loads(made)) == FIELDS


def test_the_limit_is_on_the_whole_body_and_exact() -> None:
    rest = len(body(result={"text": ""}))
    fits = body(result={"text": "x" * (MAX_BODY_BYTES - rest)})
    assert len(fits) == MAX_BODY_BYTES
    assert "omitted" not in json.loads(fits)["result"]
    assert json.loads(body(result={"text": "x" * (MAX_BODY_BYTES - rest + 1)}))["result"]["omitted"] is True


def test_the_test_event_has_the_same_six_fields() -> None:
    made = json.loads(build_test_body(AT))
    assert list(made) == FIELDS
    assert made["event"] == "TEST"
    assert made["timestamp"] == 1777863721988


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=20,
)


@given(result=st.none() | st.dictionaries(st.text(st.characters()), _JSON, max_size=5))
def test_any_result_gives_utf8_json_and_the_same_bytes_again(result: dict[str, Any] | None) -> None:
    first = body(result=result)
    assert list(json.loads(first.decode("utf-8"))) == FIELDS
    assert body(result=result) == first
