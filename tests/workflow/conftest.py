"""The real workflow on a real server, with fake activities under the real names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from perdure import names
from perdure.contracts import (
    Beat,
    CommitReceipt,
    DeliverInput,
    FaultDetails,
    GenerateInput,
    GenerateResult,
    Outcome,
    Projection,
    TaskInput,
    TaskResult,
    Usage,
)
from perdure.task.states import Priority
from tests.support.temporal import temporal_address, temporal_client, temporal_server  # noqa: F401 - fixtures
from tests.support.waiting import until
from workers.control import build_control_worker

Generate = Callable[[GenerateInput], Awaitable[GenerateResult]]


def fault(code: str, *, retryable: bool = True, beat: Beat | None = None, **more: Any) -> ApplicationError:
    details = FaultDetails(
        code=code, message=f"fake {code}", retryable=retryable, beat=beat, worker="w1", **more
    )
    return ApplicationError(details.message, details, type=code, non_retryable=True)


def generated(given: GenerateInput, text: str = "done", **more: Any) -> GenerateResult:
    tokens = len(text.split())
    resumed = given.checkpoint.output_tokens if given.checkpoint else 0
    return GenerateResult(
        kind="generated",
        beat=Beat(attempt=given.attempt, text=text, output_tokens=tokens, resumed_from_tokens=resumed),
        result=TaskResult(text=text, finish_reason="stop", model=given.model_id),
        usage=Usage(prompt_tokens=3, completion_tokens=tokens - resumed),
        worker="w1",
        started_at=datetime.now(UTC),
        **more,
    )


@dataclass
class World:
    """Fake activities and what they saw. `script` gives one function per attempt, the last for all others.

    The server is shared: where the test started tasks through `Stage`, those of other tests are not recorded.
    """

    mine: set[str] = field(default_factory=set)
    script: list[Generate] = field(default_factory=list)
    given: list[GenerateInput] = field(default_factory=list)
    priorities: list[Any] = field(default_factory=list)
    rows: list[Projection] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    deliveries: list[DeliverInput] = field(default_factory=list)
    row_errors: int = 0  # how many of the next row writes fail
    commit_errors: int = 0
    delivery_id: str | None = None
    callback: Callable[[], Awaitable[None]] | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def _foreign(self, task_id: str) -> bool:
        return bool(self.mine) and task_id not in self.mine

    async def _write(self, projection: Projection) -> None:
        assert not projection.status.final, "a final projection is committed, not recorded"
        if self._foreign(projection.task_id):
            return
        if self.row_errors:
            self.row_errors -= 1
            raise RuntimeError("the store is away")
        self.rows.append(projection)

    def activities(self) -> list[Callable[..., Any]]:
        @activity.defn(name=names.ACT_RECORD_NOW)
        async def record_now(projection: Projection) -> None:
            await self._write(projection)

        @activity.defn(name=names.ACT_RECORD)
        async def record(projection: Projection) -> None:
            await self._write(projection)

        @activity.defn(name=names.ACT_COMMIT_OUTCOME)
        async def commit_outcome(outcome: Outcome) -> CommitReceipt:
            if self._foreign(outcome.projection.task_id):
                return CommitReceipt(kind="superseded")
            if self.commit_errors:
                self.commit_errors -= 1
                raise RuntimeError("the store is away")
            self.outcomes.append(outcome)
            return CommitReceipt(kind="committed", delivery_id=self.delivery_id)

        return [record_now, record, commit_outcome]

    def generate(self) -> Callable[..., Any]:
        @activity.defn(name=names.ACT_GENERATE)
        async def generate(given: GenerateInput) -> GenerateResult:
            self.given.append(given)
            self.priorities.append(activity.info().priority)
            self.started.set()
            step = self.script[min(len(self.given), len(self.script)) - 1]
            return await step(given)

        return generate

    def deliver(self) -> Callable[..., Any]:
        @activity.defn(name=names.ACT_DELIVER_CALLBACK)
        async def deliver_callback(given: DeliverInput) -> None:
            self.deliveries.append(given)
            if self.callback:
                await self.callback()

        return deliver_callback


async def announce(client: Client, given: GenerateInput, worker: str = "w1") -> None:
    handle = client.get_workflow_handle(given.task_id)
    await handle.signal(names.SIG_ATTEMPT_STARTED, args=[given.attempt, worker, datetime.now(UTC)])


async def beat_until(condition: Callable[[], bool]) -> None:
    """Waits with a beating heart."""

    def look() -> bool:
        activity.heartbeat()
        return condition()

    await until(look)


async def until_cancelled() -> None:
    """Runs until the activity is cancelled, with a beating heart."""
    await beat_until(lambda: False)


@dataclass
class Stage:
    """A client, the world, and workers that can be started and stopped."""

    client: Client
    world: World
    stack: AsyncExitStack
    pool: str = field(default_factory=lambda: f"p{uuid4().hex[:8]}")

    @asynccontextmanager
    async def gpu(self, slots: int = 2) -> AsyncIterator[Worker]:
        async with Worker(
            self.client,
            task_queue=names.pool_queue(self.pool),
            activities=[self.world.generate()],
            max_concurrent_activities=slots,
            max_heartbeat_throttle_interval=timedelta(milliseconds=100),
        ) as worker:
            yield worker

    async def start(self, **changes: Any) -> WorkflowHandle[Any, CommitReceipt]:
        task = task_input(**({"pool": self.pool} | changes))
        self.world.mine.add(task.task_id)
        return await self.client.start_workflow(
            names.WF_INFERENCE_TASK,
            task,
            id=task.task_id,
            task_queue=names.CONTROL_QUEUE,
            result_type=CommitReceipt,
        )

    async def end(self, handle: WorkflowHandle[Any, CommitReceipt]) -> Outcome:
        await asyncio.wait_for(handle.result(), 60)
        return self.world.outcomes[-1]


def task_input(**changes: Any) -> TaskInput:
    fields: dict[str, Any] = {
        "task_id": names.new_task_id(),
        "user_id": "ann",
        "model_id": "m",
        "task_type": "chat",
        "priority": Priority.NORMAL,
        "pool": "p",
        "params": {"messages": [{"role": "user", "content": "hi"}]},
        "created_at": datetime.now(UTC),
        "heartbeat_seconds": 2,
        "search_attributes": True,
    }
    return TaskInput(**(fields | changes))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def stage(temporal_client: Client, world: World) -> AsyncIterator[Stage]:  # noqa: F811 - a fixture
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            build_control_worker(temporal_client, world.activities(), records_at_once=5)
        )
        await stack.enter_async_context(
            Worker(temporal_client, task_queue=names.CALLBACKS_QUEUE, activities=[world.deliver()])
        )
        yield Stage(temporal_client, world, stack)
