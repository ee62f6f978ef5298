"""Short words for the tests of the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from perdure import names
from perdure.contracts import AttemptRecord, Outcome, Projection, TaskResult, Usage
from perdure.store import Store
from perdure.store.rows import NewTask, Principal, TaskRow
from perdure.task.states import Status

ANN = Principal("ann")
BOB = Principal("bob")
ADMIN = Principal("root", admin=True)
CALLBACK = "https://receiver.example/hook"


def new_task(**values: Any) -> NewTask:
    """An accepted submit of Ann's."""
    defaults: dict[str, Any] = {
        "task_id": names.new_task_id(),
        "user_id": "ann",
        "model_id": "model",
        "pool": "local",
        "params_json": '{"messages":[]}',
    }
    return NewTask(**(defaults | values))


async def created(store: Store, **values: Any) -> TaskRow:
    """A PENDING row."""
    task = (await store.tasks.create(new_task(**values))).task
    assert task is not None
    return task


async def claimed(store: Store, **values: Any) -> TaskRow:
    """A row under a dispatcher's lease."""
    task = await created(store, **values)
    rows = await store.dispatch.claim(task.pool, task.lane, 1000, 60, "test")
    return next(row.task for row in rows if row.task.task_id == task.task_id)


async def queued(store: Store, **values: Any) -> TaskRow:
    """A QUEUED row, version 1."""
    task = await claimed(store, **values)
    await store.dispatch.queued([(task.task_id, now())])
    return await row(store, task)


async def running(store: Store, **values: Any) -> TaskRow:
    """A PROCESSING row, version 2."""
    task = await queued(store, **values)
    assert await store.tasks.project(projection(task, 2, Status.PROCESSING, started_at=now()))
    return await row(store, task)


async def finished(store: Store, status: Status = Status.COMPLETED, **values: Any) -> TaskRow:
    """A final row, committed by its workflow."""
    task = await running(store, **values)
    await store.tasks.commit(outcome(task, 3, status))
    return await row(store, task)


async def row(store: Store, task: TaskRow) -> TaskRow:
    """The row as it is now, with everything."""
    found = await store.tasks.by_id_any(task.task_id)
    assert found is not None
    return found


def projection(task: TaskRow, version: int, status: Status, **values: Any) -> Projection:
    """What a workflow writes."""
    return Projection(task_id=task.task_id, version=version, status=status, **values)


def outcome(
    task: TaskRow, version: int, status: Status = Status.COMPLETED, at: datetime | None = None, **values: Any
) -> Outcome:
    """How a workflow ends."""
    last: dict[str, Any] = {
        "attempts": [AttemptRecord(number=1, worker="w", outcome="completed", output_tokens=7)],
        "usage": Usage(prompt_tokens=11, completion_tokens=7, discarded_tokens=2),
    }
    if status is Status.FAILED:
        last |= {"error_code": "internal", "error_message": "it broke"}
    result = TaskResult(text="the answer", finish_reason="stop", model="model")
    return Outcome(
        projection=projection(task, version, status, **(last | values)),
        result=result if status is Status.COMPLETED else None,
        completed_at=at or now(),
    )


def now() -> datetime:
    return datetime.now(UTC)
