"""The dispatcher between a real store and a real Temporal server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from perdure.contracts import TaskInput
from perdure.dispatcher import Dispatcher
from perdure.embedded.ports import free_port
from perdure.models import Catalogue
from perdure.observability.metrics import Metrics
from perdure.starts import Pace
from perdure.store import Store
from perdure.store.rows import TaskRow
from perdure.task.policy import place
from perdure.task.states import Priority, Status
from perdure.temporal import TemporalGate
from tests.support.tasks import ANN, catalogue, submit
from tests.support.waiting import until

Running = Callable[..., AbstractAsyncContextManager[Dispatcher]]


@pytest.fixture
def running(store: Store, temporal_client: Client) -> Running:
    @asynccontextmanager
    async def run(
        client: Client = temporal_client, known: Catalogue | None = None
    ) -> AsyncIterator[Dispatcher]:
        known = known or catalogue()
        dispatcher = Dispatcher(store, TemporalGate(client), known, Metrics(known), "test")
        task = asyncio.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return run


async def row(store: Store, task_id: str) -> TaskRow:
    found = await store.tasks.by_id_any(task_id)
    assert found is not None
    return found


async def reaches(store: Store, task_id: str, status: Status) -> TaskRow:
    async def there() -> bool:
        return (await row(store, task_id)).status is status

    await until(there)
    return await row(store, task_id)


async def input_of(client: Client, task_id: str) -> TaskInput:
    history = await client.get_workflow_handle(task_id).fetch_history()
    payloads = history.events[0].workflow_execution_started_event_attributes.input.payloads
    (task,) = await client.data_converter.decode(payloads, [TaskInput])
    assert isinstance(task, TaskInput)
    return task


async def test_a_row_becomes_a_workflow(store: Store, running: Running, temporal_client: Client) -> None:
    task_id = await submit(store, {"tokens": 7}, priority=Priority.LOW, deadline_seconds=600)
    async with running():
        queued = await reaches(store, task_id, Status.QUEUED)
    assert queued.version == 1
    assert queued.queued_at is not None
    task = await input_of(temporal_client, task_id)
    assert task.params == {"tokens": 7}
    assert (task.base_version, task.lane, task.pool) == (0, 5, "p")
    assert task.total_deadline == queued.total_deadline
    assert task.search_attributes
    described = await temporal_client.get_workflow_handle(task_id).describe()
    assert dict(described.search_attributes)["TaskUser"] == ["ann"]
    assert await described.static_summary() == "m · LOW · chat · ann"
    assert described.raw_info.priority.priority_key == 5


async def test_a_wake_starts_at_once_and_a_second_dispatcher_does_no_harm(
    store: Store, running: Running, temporal_client: Client
) -> None:
    async with running() as one, running() as two:
        ids = [await submit(store) for _ in range(20)]
        one.wake()
        two.wake()
        for task_id in ids:
            await reaches(store, task_id, Status.QUEUED)
    for task_id in ids:
        assert (await row(store, task_id)).version == 1
        runs = [run async for run in temporal_client.list_workflows(f"WorkflowId = '{task_id}'")]
        assert len(runs) <= 1


async def test_the_window_keeps_the_rest_pending(store: Store, running: Running) -> None:
    known = catalogue('[pools.p]\nslots = 1\nwindow = 3\n[models.m]\npool = "p"\nexecutor = "simulated"\n')
    ids = [await submit(store) for _ in range(10)]
    async with running(known=known):
        await until(lambda: _count(store, Status.QUEUED, 3))
        high = await submit(store, priority=Priority.HIGH)
        await reaches(store, high, Status.QUEUED)
        counts = await store.tasks.count_by_state()
    assert counts[Status.QUEUED] == 4
    assert counts[Status.PENDING] == 7
    queued = [task_id for task_id in ids if (await row(store, task_id)).status is Status.QUEUED]
    assert queued == sorted(ids)[:3]


async def test_a_full_window_keeps_no_other_user_out(store: Store, running: Running) -> None:
    known = catalogue('[pools.p]\nslots = 2\nwindow = 4\n[models.m]\npool = "p"\nexecutor = "simulated"\n')
    ids = [await submit(store) for _ in range(6)]
    async with running(known=known) as dispatcher:
        await until(lambda: _count(store, Status.QUEUED, 4))
        ids += [await submit(store, user_id=user) for user in ("bob",) * 4 + ("eve",)]
        dispatcher.wake()
        await until(lambda: _count(store, Status.QUEUED, 7))
        await asyncio.sleep(0.5)  # some looks later it is still so
    rows = [await row(store, task_id) for task_id in ids]
    queued = [task.user_id for task in rows if task.status is Status.QUEUED]
    assert queued == ["ann"] * 4 + ["bob"] * 2 + ["eve"]


async def _count(store: Store, status: Status, number: int) -> bool:
    return (await store.tasks.count_by_state())[status] == number


async def test_not_before_waits(store: Store, running: Running) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1)
    task_id = await submit(store, not_before=due)
    async with running():
        queued = await reaches(store, task_id, Status.QUEUED)
    assert queued.queued_at is not None
    assert queued.queued_at >= due - timedelta(seconds=0.2)


async def test_rows_expire_while_temporal_is_away(store: Store, running: Running) -> None:
    dead = await Client.connect(f"127.0.0.1:{free_port()}", lazy=True, data_converter=pydantic_data_converter)
    queue = await submit(store, queue_timeout_seconds=0.5, callback_url="https://example.com/x")
    total = await submit(store, deadline_seconds=0.5)
    async with running(client=dead):
        first = await reaches(store, queue, Status.FAILED)
        second = await reaches(store, total, Status.FAILED)
    assert first.error_code == "queue_expired"
    assert second.error_code == "deadline_exceeded"
    assert first.completed_at is not None
    deliveries = await store.deliveries.list_for_task(ANN, queue)
    assert deliveries is not None
    assert [d.event for d in deliveries] == ["FAILED"]


async def test_starts_wait_out_an_engine_that_comes_back(
    store: Store, running: Running, temporal_address: str
) -> None:
    """A proxy stands in for the engine's address: closed first, then open."""
    port = free_port()
    client = await Client.connect(f"127.0.0.1:{port}", lazy=True, data_converter=pydantic_data_converter)
    task_id = await submit(store)
    async with running(client=client) as dispatcher:
        await until(lambda: dispatcher.engine_paused)
        assert (await row(store, task_id)).status is Status.PENDING
        async with _proxy(port, temporal_address):
            await reaches(store, task_id, Status.QUEUED)


@asynccontextmanager
async def _proxy(port: int, address: str) -> AsyncIterator[None]:
    host, _, target = address.partition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(target))
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


async def test_a_start_that_took_effect_unseen_is_success(
    store: Store, running: Running, temporal_client: Client
) -> None:
    """The crash between the start and its record: the lease runs out and the same id is tried again."""
    task_id = await submit(store)
    (claimed,) = await store.dispatch.claim("p", 3, 1, 0.5, "crashed")
    assert claimed.task.task_id == task_id
    gate = TemporalGate(temporal_client)
    from perdure.start import task_input

    assert await gate.start_task(task_input(claimed.task, catalogue(), search_attributes=False))
    async with running():
        queued = await reaches(store, task_id, Status.QUEUED)
    assert queued.version == 1


async def test_a_model_that_was_removed_fails_its_rows(store: Store, running: Running) -> None:
    task_id = await submit(store, model_id="gone")
    async with running():
        failed = await reaches(store, task_id, Status.FAILED)
    assert failed.error_code == "model_unknown"


async def test_a_refused_start_counts_against_its_row_alone(
    store: Store, running: Running, temporal_client: Client
) -> None:
    """An input above what Temporal takes: the API refuses such bodies, so only a bug could make one."""
    big = await submit(store, {"messages": [{"role": "user", "content": _noise(5_000_000)}]})
    good = await submit(store)
    async with running():
        await reaches(store, good, Status.QUEUED)

        async def refused() -> bool:
            return (await row(store, big)).start_failures >= 1

        await until(refused)
    with pytest.raises(RPCError):
        await temporal_client.get_workflow_handle(big).describe()


def _noise(size: int) -> str:
    import random

    return "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=size))


async def test_a_cancel_between_claim_and_start_is_signalled(
    store: Store, running: Running, temporal_client: Client
) -> None:
    task_id = await submit(store)
    await store.dispatch.claim("p", 3, 1, 0.2, "crashed")
    result = await store.tasks.request_cancel(ANN, task_id, "changed my mind")
    assert result.kind == "requested"
    async with running():
        await reaches(store, task_id, Status.QUEUED)

        async def told() -> bool:
            task = await input_of(temporal_client, task_id)
            history = await temporal_client.get_workflow_handle(task_id).fetch_history()
            signalled = any(
                e.HasField("workflow_execution_signaled_event_attributes") for e in history.events
            )
            return task.cancel_requested or signalled

        await until(told)


async def test_a_paused_pool_keeps_what_waits(store: Store, running: Running) -> None:
    await store.dispatch.pause("pool", "p", "ops", "maintenance")
    task_id = await submit(store)
    async with running() as dispatcher:
        dispatcher.wake()
        await asyncio.sleep(1.5)  # nothing happens: there is no event to wait for
        assert (await row(store, task_id)).status is Status.PENDING
        await store.dispatch.resume("pool", "p")
        await reaches(store, task_id, Status.QUEUED)


def test_the_pace_grows_while_starts_are_quick_and_halves_when_slow() -> None:
    pace = Pace()
    assert int(pace.limit) == 2
    for _ in range(2000):
        pace.took(0.01, now=1.0)
    assert pace.limit == 32
    pace.took(0.2, now=10.0)
    pace.took(0.2, now=10.01)  # the same slow moment
    assert pace.limit == 16
    for moment in range(20, 40):
        pace.took(9.0, now=float(moment))
    assert pace.limit == 1


async def test_a_weighted_pool_divides_a_class_among_its_users(
    store: Store, running: Running, temporal_client: Client
) -> None:
    known = catalogue(
        '[pools.p]\nscheduling = "weighted"\n[models.m]\npool = "p"\nexecutor = "simulated"\n'
        "[users.bob]\nweight = 3\n"
    )
    ids = [await submit(store, user_id=user, priority=Priority.LOW) for user in ("ann", "bob", "ann")]
    async with running(known=known):
        for task_id in ids:
            await reaches(store, task_id, Status.QUEUED)
    tasks = [await input_of(temporal_client, task_id) for task_id in ids]
    places = [place(task, Priority.LOW, task.lane or 5, ahead=False) for task in tasks]
    assert {one.key for one in places} == {3}
    assert {(one.fairness_key, one.weight) for one in places} == {("LOW:ann", 0.5), ("LOW:bob", 1.5)}
