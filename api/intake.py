"""Writes accepted tasks: submits that come together share a transaction, so a burst costs few commits.

    result = await intake.add(new, idempotency)        answers when the row is committed
    result = await intake.add_many(items, idempotency)

A lone submit is written at once. While two transactions are under way the next submits gather, and the next
transaction takes them all; a row that Postgres refuses fails alone. One with an Idempotency-Key has a
transaction of its own, since key and task stand or fall together; equal ones that come while it is under way
share its answer, so that a stampede of repeats holds one connection and not all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from perdure.dispatcher import Dispatcher
from perdure.store.errors import StoreRefused
from perdure.store.rows import CreateManyResult, CreateResult, Idempotency, NewTask
from perdure.store.tasks import TaskRepository

MAX_BATCH: Final = 64  # rows in one transaction
MAX_BATCH_BYTES: Final = 1024 * 1024  # params in one transaction, beyond its first row
AT_ONCE: Final = 2  # transactions under way: one commits while the next is sent


@dataclass(frozen=True)
class _Flight:
    """A keyed submit under way."""

    fingerprint: bytes
    params_json: str
    writing: asyncio.Task[CreateResult]

    def repeated(self, result: CreateResult) -> CreateResult:
        """The answer to an equal request that came meanwhile."""
        if result.kind != "created" or result.task is None:
            return result
        return CreateResult("replayed", replace(result.task, params_json=self.params_json))


class Intake:
    """One per process."""

    def __init__(self, tasks: TaskRepository, dispatcher: Dispatcher) -> None:
        self._tasks = tasks
        self._dispatcher = dispatcher
        self._waiting: deque[tuple[NewTask, asyncio.Future[CreateResult]]] = deque()
        self._writers: set[asyncio.Task[None]] = set()
        self._flights: dict[tuple[str, str, str], _Flight] = {}

    async def add(self, new: NewTask, idempotency: Idempotency | None = None) -> CreateResult:
        """Writes one task. Raises StoreUnavailable, StoreRefused."""
        if idempotency is not None:
            return await self._add_keyed(new, idempotency)
        written: asyncio.Future[CreateResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((new, written))
        if len(self._writers) < AT_ONCE:
            writer = asyncio.create_task(self._write())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)
        return await written

    async def _add_keyed(self, new: NewTask, key: Idempotency) -> CreateResult:
        name = (key.user_id, key.route, key.key)
        flight = self._flights.get(name)
        if flight is not None and flight.fingerprint == key.fingerprint:
            return flight.repeated(await asyncio.shield(flight.writing))
        writing = asyncio.create_task(self._tasks.create(new, key))
        if flight is None:
            self._flights[name] = _Flight(key.fingerprint, new.params_json, writing)
            writing.add_done_callback(lambda _: self._flights.pop(name))
        result = await asyncio.shield(writing)
        self._dispatcher.wake()
        return result

    async def add_many(self, new: Sequence[NewTask], idempotency: Idempotency | None) -> CreateManyResult:
        """Writes several tasks in one transaction, all or none. Raises StoreUnavailable, StoreRefused."""
        result = await self._tasks.create_many(new, idempotency)
        self._dispatcher.wake()
        return result

    async def aclose(self) -> None:
        """Waits for what is being written."""
        flights = [flight.writing for flight in self._flights.values()]
        await asyncio.gather(*self._writers, *flights, return_exceptions=True)

    async def _write(self) -> None:
        """Writes batches until nothing waits."""
        while batch := self._take():
            await self._write_batch(batch)
            self._dispatcher.wake()
        # At once, not in the done-callback: a submit that came between would count on this writer and wait.
        if (me := asyncio.current_task()) is not None:
            self._writers.discard(me)

    def _take(self) -> list[tuple[NewTask, asyncio.Future[CreateResult]]]:
        batch: list[tuple[NewTask, asyncio.Future[CreateResult]]] = []
        size = 0
        while self._waiting and len(batch) < MAX_BATCH:
            size += len(self._waiting[0][0].params_json)
            if batch and size > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _write_batch(self, batch: list[tuple[NewTask, asyncio.Future[CreateResult]]]) -> None:
        try:
            if len(batch) == 1:
                results = [await self._tasks.create(batch[0][0])]
            else:
                many = await self._tasks.create_many([new for new, _ in batch])
                results = [CreateResult("created", task) for task in many.tasks]
        except StoreRefused as error:
            if len(batch) == 1:
                _fail(batch, error)
                return
            for one in batch:
                await self._write_batch([one])
            return
        except BaseException as error:
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, written), result in zip(batch, results, strict=True):
            if not written.done():
                written.set_result(result)


def _fail(batch: list[tuple[NewTask, asyncio.Future[CreateResult]]], error: BaseException) -> None:
    for _, written in batch:
        if not written.done():
            written.set_exception(error)
