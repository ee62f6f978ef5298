"""Bodies: every field is bounded, nothing is bent into another type, unknown fields are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from api.problems import from_pydantic
from api.schemas import CancelManyBody, SubmitBody

GOOD: dict[str, Any] = {"model_id": "m", "params": {}}
FAR = (datetime.now(UTC) + timedelta(days=400)).isoformat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", "LOW"),
        ("max_retries", 0),
        ("max_retries", 20),
        ("timeout_seconds", 1),
        ("timeout_seconds", 0.5),
        ("deadline_seconds", 30 * 86_400),
        ("metadata", {f"k{n}": "v" for n in range(16)}),
        ("metadata", {"k" * 64: "v" * 512, "é": "🙂"}),
        ("callback_events", ["FAILED"]),
        ("task_type", "code-review_2.x"),
        ("user_id", "ann@example.com"),
        ("not_before", "2020-01-01T00:00:00Z"),
        ("callback_url", None),
        ("metadata", None),
    ],
)
def test_good_values(field: str, value: Any) -> None:
    SubmitBody.model_validate({**GOOD, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", ""),
        ("model_id", "x" * 65),
        ("model_id", 5),
        ("model_id", None),
        ("params", []),
        ("params", "text"),
        ("params", None),
        ("task_type", ""),
        ("task_type", "a b"),
        ("task_type", "x" * 33),
        ("task_type", "chat\n"),
        ("priority", "high"),
        ("priority", 1),
        ("priority", 1.0),
        ("priority", None),
        ("max_retries", -1),
        ("max_retries", 21),
        ("max_retries", True),
        ("max_retries", 1.0),
        ("max_retries", "3"),
        ("timeout_seconds", 0),
        ("timeout_seconds", -1),
        ("timeout_seconds", 2**63 - 1),
        ("timeout_seconds", True),
        ("timeout_seconds", "30"),
        ("deadline_seconds", 30 * 86_400 + 1),
        ("queue_timeout_seconds", 0),
        ("callback_url", ""),
        ("callback_url", "https://example.com/" + "x" * 2048),
        ("callback_events", []),
        ("callback_events", ["COMPLETED", "COMPLETED"]),
        ("callback_events", ["STARTED"]),
        ("callback_events", "COMPLETED"),
        ("metadata", {f"k{n}": "v" for n in range(17)}),
        ("metadata", {"": "v"}),
        ("metadata", {"k" * 65: "v"}),
        ("metadata", {"k": "v" * 513}),
        ("metadata", {"k": 1}),
        ("metadata", {"k": None}),
        ("metadata", {"k": {"deep": 1}}),
        ("metadata", []),
        ("user_id", ""),
        ("user_id", "x" * 65),
        ("user_id", "a\nb"),
        ("user_id", "a\u2028b"),
        ("user_id", "a\x85b"),
        ("not_before", "2026-11-01T01:30:00"),
        ("not_before", "9999-12-31T00:00:00Z"),
        pytest.param("not_before", FAR, id="not_before-too-far"),
        ("not_before", 1_800_000_000),
        ("result", {}),
        ("status", "COMPLETED"),
        ("x" * 10_000, 1),
    ],
)
def test_bad_values_are_named_without_being_echoed(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        SubmitBody.model_validate({**GOOD, field: value})
    problem = from_pydantic(caught.value)
    assert problem.status == 422
    assert str(problem.errors[0].pointer).startswith("/" + field[:90])
    shown = str(problem.as_json())
    assert len(shown) < 2000
    if isinstance(value, str) and len(value) > 8:
        assert value not in shown


@pytest.mark.parametrize("body", [{}, {"reason": "x"}, {"status": None}, {"metadata": None, "reason": "x"}])
def test_a_cancel_by_filter_names_a_filter(body: dict[str, Any]) -> None:
    assert not CancelManyBody.model_validate(body).filters


@pytest.mark.parametrize("body", [{"all": True}, {"model_id": "m"}, {"metadata": {"a": "b"}}])
def test_a_cancel_by_filter_with_one(body: dict[str, Any]) -> None:
    assert CancelManyBody.model_validate(body).filters


def test_an_empty_metadata_filter_is_none() -> None:
    assert not CancelManyBody.model_validate({"metadata": {}}).filters
