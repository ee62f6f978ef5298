"""Types survive the sandbox: workflow, activity and back, on a real server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from perdure import names
from perdure.contracts import Beat, GenerateInput, GenerateResult, Scheduling, Snapshot
from perdure.task.states import Priority, Status
from tests.support.waiting import until
from tests.workflow.conftest import Stage, World, announce, beat_until, fault, generated

INDIA = timezone(timedelta(hours=5, minutes=30))
STATE = {"page": [1, {"none": None, "big": 2**53 - 1, "text": "é 🙂 \u2028"}]}


async def test_times_enums_and_nested_models(stage: Stage, world: World) -> None:
    created = datetime.now(INDIA).replace(microsecond=123457)
    deadline = datetime.now(UTC) + timedelta(hours=1)
    first_beat = Beat(attempt=1, text="a b", output_tokens=2, state=STATE, message="half")

    async def first(given: GenerateInput) -> GenerateResult:
        await announce(stage.client, given)
        await beat_until(lambda: bool(world.rows))
        raise fault("token_timeout", beat=first_beat)

    async def second(given: GenerateInput) -> GenerateResult:
        return generated(given, "a b c")

    world.script = [first, second]
    async with stage.gpu():
        handle = await stage.start(
            created_at=created,
            total_deadline=deadline,
            priority=Priority.HIGH,
            scheduling=Scheduling(mode="weighted", weights={"HIGH": 6.0}),
            params={"messages": [], "odd": {"float": 1.0, "int": 2**53 + 1, "none": None, "text": "\u0000"}},
        )
        await until(lambda: bool(world.given))
        snapshot = await handle.query(names.QUERY_SNAPSHOT, result_type=Snapshot)
        outcome = await stage.end(handle)
    assert isinstance(snapshot.projection.status, Status)
    assert [row.status for row in world.rows] == [Status.PROCESSING, Status.QUEUED]
    assert all(isinstance(row.status, Status) for row in world.rows)
    assert world.rows[1].next_attempt_at is not None
    assert world.rows[1].next_attempt_at.tzinfo is not None
    assert world.given[0].due_at == created
    assert world.given[0].params == {
        "messages": [], "odd": {"float": 1.0, "int": 2**53 + 1, "none": None, "text": "\u0000"},
    }  # fmt: skip
    assert world.given[1].checkpoint == first_beat
    assert outcome.due_at == created
    assert outcome.completed_at.utcoffset() == timedelta(0)
    assert outcome.projection.attempts[0].started_at is not None
