"""A floor to schedule on: real rows, a real engine, the real control worker and dispatcher, and GPU workers
whose work is scripted, so that what is measured is who starts when.

Pools have names of their own in each test, since the engine is shared.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from activities.records import RecordActivities
from perdure import names
from perdure.contracts import Beat, GenerateInput, GenerateResult, TaskResult, Usage
from perdure.dispatcher import Dispatcher
from perdure.models import Catalogue, parse_catalogue
from perdure.observability.metrics import Metrics
from perdure.store import Store
from perdure.store.rows import NewTask, TaskRow
from perdure.task.policy import QUICK_ATTEMPT
from perdure.task.states import Priority, Status
from perdure.temporal import TemporalGate
from tests.support.waiting import until
from workers.control import build_control_worker

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
_BEAT: Final = 0.2  # seconds
Work = Callable[[GenerateInput], Awaitable[GenerateResult | None]]


@dataclass(frozen=True)
class Start:
    """One attempt as its worker saw it. `ended` is set when it ended; times are monotonic."""

    task_id: str
    attempt: int
    user: str
    priority: Priority
    at: float


class Bay:
    """The GPU workers of one pool: they note every start and do the scripted work.

    `work` gives an attempt's result; None is a result like any other's. `hold` makes attempts without a
    result of their own wait, with a beating heart, until `let_go`.
    """

    def __init__(self, floor: Floor, pool: str) -> None:
        self._floor, self.pool = floor, pool
        self.starts: list[Start] = []
        self.spans: list[tuple[float, float]] = []
        self.seconds = 0.0  # that an attempt takes
        self.work: Work | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._passes = 0

    def hold(self) -> None:
        """From now on attempts wait."""
        self._open.clear()

    def let_go(self, count: int | None = None) -> None:
        """Lets so many waiting attempts end, or all and every later one."""
        if count is None:
            self._open.set()
        else:
            self._passes += count

    @property
    def ids(self) -> list[str]:
        """Tasks in the order of their starts."""
        return [start.task_id for start in self.starts]

    @property
    def users(self) -> list[str]:
        return [start.user for start in self.starts]

    @property
    def classes(self) -> list[Priority]:
        return [start.priority for start in self.starts]

    async def started(self, count: int) -> None:
        """Waits for so many starts."""
        await until(lambda: len(self.starts) >= count)

    @asynccontextmanager
    async def worker(self, slots: int = 1) -> AsyncIterator[None]:
        """A GPU worker, as the product builds it."""

        @activity.defn(name=names.ACT_GENERATE)
        async def generate(given: GenerateInput) -> GenerateResult:
            return await self._generate(given)

        async with Worker(
            self._floor.client,
            task_queue=names.pool_queue(self.pool),
            activities=[generate],
            max_concurrent_activities=slots,
            activity_task_poller_behavior=PollerBehaviorSimpleMaximum(min(slots, 2)),
            max_heartbeat_throttle_interval=timedelta(seconds=_BEAT),
            disable_eager_activity_execution=True,
        ):
            try:
                yield
            finally:
                self.let_go()

    async def _generate(self, given: GenerateInput) -> GenerateResult:
        user, priority = self._floor.known[given.task_id]
        began, at = time.monotonic(), datetime.now(UTC)
        self.starts.append(Start(given.task_id, given.attempt, user, priority, began))
        telling = asyncio.create_task(self._announce(given, at))
        try:
            result = await self.work(given) if self.work else None
            if self.seconds:
                await asyncio.sleep(self.seconds)
            while result is None and not self._open.is_set():
                if self._passes:
                    self._passes -= 1
                    break
                activity.heartbeat()
                await asyncio.sleep(0.01)
        finally:
            telling.cancel()
            self.spans.append((began, time.monotonic()))
        return result or ended(given, at=at)

    async def _announce(self, given: GenerateInput, at: datetime) -> None:
        """As the product's worker does, if the attempt is not quick."""
        await asyncio.sleep(QUICK_ATTEMPT)
        handle = self._floor.client.get_workflow_handle(given.task_id)
        await handle.signal(names.SIG_ATTEMPT_STARTED, args=[given.attempt, "scripted", at])


def ended(given: GenerateInput, kind: Any = "generated", at: datetime | None = None) -> GenerateResult:
    """How an attempt ends in order."""
    return GenerateResult(
        kind=kind,
        beat=Beat(attempt=given.attempt, text="x", output_tokens=1),
        result=TaskResult(text="x", finish_reason="stop") if kind == "generated" else None,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        worker="scripted",
        started_at=at or datetime.now(UTC),
    )


class Floor:
    """Submits rows and watches them. `pool` is the pool of `model`."""

    def __init__(self, store: Store, client: Client) -> None:
        self.store, self.client = store, client
        self.pool = f"p{uuid.uuid4().hex[:10]}"
        self.known: dict[str, tuple[str, Priority]] = {}
        self.gate = TemporalGate(client)

    def catalogue(self, pool: str = "", more: str = "") -> Catalogue:
        """One pool with one model, `m`; `pool` are further lines of the pool."""
        return parse_catalogue(
            f"{more}\n[pools.{self.pool}]\n{pool}\n"
            f'[models.m]\npool = "{self.pool}"\nexecutor = "simulated"\nheartbeat_timeout = 2\n'
        )

    def bay(self) -> Bay:
        return Bay(self, self.pool)

    @asynccontextmanager
    async def running(self, known: Catalogue, dispatchers: int = 1) -> AsyncIterator[list[Dispatcher]]:
        """A control worker and so many dispatchers. What is left in the engine at the end is removed."""
        metrics = Metrics(known)
        made = [Dispatcher(self.store, self.gate, known, metrics, f"d{n}") for n in range(dispatchers)]

        def wake() -> None:
            for one in made:
                one.wake()

        records = RecordActivities(self.store, self.gate, metrics, on_room=wake)
        steps: list[Callable[..., Any]] = [records.record_now, records.record, records.commit_outcome]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(build_control_worker(self.client, steps, records_at_once=5))
            loops = [asyncio.create_task(one.run()) for one in made]
            try:
                yield made
            finally:
                while left := [loop for loop in loops if not loop.done()]:
                    for loop in left:
                        loop.cancel()
                    await asyncio.wait(left, timeout=1)
                await asyncio.gather(*map(self._drop, self.known))

    async def _drop(self, task_id: str) -> None:
        try:
            await self.client.get_workflow_handle(task_id).terminate()
        except RPCError:
            pass  # ended, or never started

    async def submit(
        self, count: int = 1, user: str = "ann", priority: Priority = NORMAL, **more: Any
    ) -> list[str]:
        """Commits so many PENDING rows at once; their ids in order."""
        news = [
            NewTask(
                **{
                    "task_id": names.new_task_id(),
                    "user_id": user,
                    "model_id": "m",
                    "pool": self.pool,
                    "params_json": "{}",
                    "priority": priority,
                    **more,
                }
            )
            for _ in range(count)
        ]
        self.known |= {new.task_id: (user, priority) for new in news}
        await self.store.tasks.create_many(news)
        return [new.task_id for new in news]

    async def row(self, task_id: str) -> TaskRow:
        found = await self.store.tasks.by_id_any(task_id)
        assert found is not None
        return found

    async def count(self, status: Status) -> int:
        return (await self.store.tasks.count_by_state())[status]

    async def reached(self, status: Status, count: int) -> None:
        """Waits until so many rows are in a state."""

        async def there() -> bool:
            return await self.count(status) >= count

        await until(there)

    async def in_engine(self, ids: Sequence[str]) -> None:
        """Waits until each of these tasks waits for a slot in the engine."""

        async def waits(task_id: str) -> bool:
            try:
                described = await self.client.get_workflow_handle(task_id).describe()
            except RPCError:
                return False
            return bool(described.raw_description.pending_activities)

        async def all_wait() -> bool:
            return all(await asyncio.gather(*map(waits, ids)))

        await until(all_wait, every=0.1)
        await asyncio.sleep(0.3)  # from the histories to the queue is a hop that nobody can see
