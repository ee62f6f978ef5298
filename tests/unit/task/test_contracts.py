"""What crosses a Temporal boundary comes out as it went in, from older and newer releases too."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import pydantic_data_converter

from perdure import contracts as c
from perdure.task.errors import ErrorCode
from perdure.task.states import Priority, Status

INDIA = timezone(timedelta(hours=5, minutes=30))
AT = datetime(2026, 11, 1, 1, 30, 0, 123456, tzinfo=INDIA)
BEAT = c.Beat(
    attempt=2, seq=7, progress=50, text="é 好 🙂 \u2028 </script>", reasoning="hm", output_tokens=3,
    resumed_from_tokens=1, prompt_tokens=2**53 - 1, state={"page": [1, {"x": None}]}, message="half",
)  # fmt: skip
USAGE = c.Usage(prompt_tokens=0, completion_tokens=None, discarded_tokens=4)
ATTEMPT = c.AttemptRecord(
    number=1, worker="gpu:p@h:1", started_at=AT, ended_at=AT, outcome="lost", error_code="worker_lost"
)
PROJECTION = c.Projection(
    task_id="task_1", version=3, status=Status.QUEUED, priority=Priority.HIGH, attempts=[ATTEMPT],
    usage=USAGE, queued_at=AT, next_attempt_at=AT,
)  # fmt: skip
TASK = c.TaskInput(
    task_id="task_1", user_id="ann", model_id="m", task_type="chat", priority=Priority.LOW, pool="p",
    params={"messages": [{"role": "user", "content": "\u0000 1e21"}], "n": 2**53 + 1, "x": 1.0, "none": None},
    attempts=[ATTEMPT], usage=USAGE, checkpoint=BEAT, created_at=AT, total_deadline=AT,
    scheduling=c.Scheduling(mode="weighted", weights={"HIGH": 6.0}),
)  # fmt: skip
RESULT = c.TaskResult(
    text="done", finish_reason="length", tool_calls=[{"id": "1", "function": {"name": "f"}}], own=1
)  # fmt: skip
EXAMPLES: list[BaseModel] = [
    BEAT,
    USAGE,
    ATTEMPT,
    PROJECTION,
    TASK,
    RESULT,
    c.GenerateInput(task_id="task_1", attempt=2, model_id="m", checkpoint=BEAT, due_at=AT),
    c.GenerateResult(kind="drained", beat=BEAT, usage=USAGE, worker="w", started_at=AT),
    c.FaultDetails(code=ErrorCode.RATE_LIMITED, message="x", retryable=True, retry_after=1.5, beat=BEAT),
    c.Outcome(projection=PROJECTION, result=RESULT, completed_at=AT, take_last_beat=True),
    c.CommitReceipt(kind="committed", delivery_id="msg_1"),
    c.DeliverInput(task_id="task_1", delivery_id="msg_1"),
    c.AttemptStarted(number=1, worker="w", at=AT),
    c.CancelRequest(reason="é"),
    c.Snapshot(projection=PROJECTION, waiting="slot"),
]
ids = [type(example).__name__ for example in EXAMPLES]


async def through(value: BaseModel, change: Any = None) -> Any:
    """Encoded, `change`d as JSON on the way, decoded as the type that its receiver names."""
    (payload,) = await pydantic_data_converter.encode([value])
    if change is not None:
        fields = json.loads(payload.data)
        change(fields)
        payload = Payload(metadata=payload.metadata, data=json.dumps(fields).encode())
    (back,) = await pydantic_data_converter.decode([payload], [type(value)])
    return back


@pytest.mark.parametrize("value", EXAMPLES, ids=ids)
async def test_what_goes_in_comes_out(value: BaseModel) -> None:
    back = await through(value)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("value", EXAMPLES, ids=ids)
async def test_old_code_reads_a_newer_payload(value: BaseModel) -> None:
    """A field that this release does not know is passed over, at every depth."""

    def grow(fields: dict[str, Any]) -> None:
        for name, inner in list(fields.items()):
            if isinstance(inner, dict) and name not in ("params", "state", "weights"):  # these are not ours
                grow(inner)
        fields["added_later"] = {"x": 1}

    back = await through(value, grow)
    if isinstance(back, c.Outcome):
        back = back.model_copy(update={"result": _without(back.result)})
    assert (_without(back) if isinstance(back, c.TaskResult) else back) == value


def _without(result: c.TaskResult | None) -> c.TaskResult | None:
    """A result keeps what an executor adds."""
    assert result is not None
    assert result.model_extra is not None
    assert result.model_extra.pop("added_later") == {"x": 1}
    return result


@pytest.mark.parametrize("value", EXAMPLES, ids=ids)
async def test_new_code_reads_an_older_payload(value: BaseModel) -> None:
    """A field with a default may be missing: its default is taken."""
    optional = [name for name, field in type(value).model_fields.items() if not field.is_required()]

    def shrink(fields: Any) -> None:
        for name in optional:
            fields.pop(name, None)

    back = await through(value, shrink)
    for name in optional:
        assert getattr(back, name) == type(value).model_fields[name].get_default(call_default_factory=True)


async def test_times_keep_their_moment_and_their_zone() -> None:
    back = await through(TASK)
    assert back.created_at == AT
    assert back.created_at.utcoffset() == timedelta(hours=5, minutes=30)
    assert back.created_at.astimezone(UTC).microsecond == 123456


async def test_enums_are_enums_again() -> None:
    back = await through(PROJECTION)
    assert back.status is Status.QUEUED
    assert back.priority is Priority.HIGH
