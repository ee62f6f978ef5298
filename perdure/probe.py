"""Measures what a Temporal server does, since it accepts unknown settings silently.

    effects = await measure(client, EngineProbe)      2-10 s on queues of its own
    effects.losses()                                  what is missing, in words, with the remedy
    order = await measure_order(client, EngineProbe)  the order of tasks alone, 2-3 s

Each setting of deploy/temporal/dynamicconfig.yaml is seen by its effect.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest, ListTaskQueuePartitionsRequest
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure import names

SLOW_HOP: Final = 0.08  # seconds: 100 ms by default (two polls of 20 a second), about 10 ms where it is set
SLOW_TIMER: Final = 0.6  # of 0.05 s: 1 s by default
SLOW_CANCEL: Final = 1.0
_CANCEL_PATIENCE: Final = 3.0
_VALID: Final = timedelta(minutes=2)  # a run whose process was stopped ends by itself
_BACKLOG: Final = 34  # what EngineProbe puts on the queue


@dataclass(frozen=True)
class Loss:
    """A setting that is missing: what is lost, and the keys that mend it."""

    what: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.what} (set {', '.join(self.keys)}; see deploy/temporal/dynamicconfig.yaml)"


_PARTITIONS: Final = Loss(
    "priority is only approximate: a pool queue has several partitions",
    ("matching.numTaskqueueReadPartitions", "matching.numTaskqueueWritePartitions"),
)
_FAIRNESS: Final = Loss(
    "users do not share a class: whoever queued first is served first", ("matching.enableFairness",)
)
_CANCEL: Final = Loss(
    "a cancel reaches a GPU worker with its next heartbeat, about 1 s later",
    ("system.enableCancelActivityWorkerCommand", "frontend.WorkerCommandsEnabled"),
)
_HOPS: Final = Loss(
    "every step of a task waits up to 100 ms in the server when it is busy",
    ("history.transferProcessorMaxPollRPS", "history.timerProcessorMaxPollRPS"),
)
_TIMERS: Final = Loss("back-offs and timers below 1 s take 1 s", ("history.timerProcessorMaxTimeShift",))


@dataclass(frozen=True)
class Order:
    """How a server orders what waits on a queue."""

    partitions: int
    order: tuple[str, ...]  # of 24 "a", 8 "b" of another user, 2 "high": as they were handed out

    @property
    def classes_exact(self) -> bool:
        return self.order[:2] == ("high", "high")

    @property
    def users_share(self) -> bool:
        return "b" not in self.order[-8:]

    def losses(self) -> list[Loss]:
        """What this server lacks. The product works all the same."""
        found: list[Loss] = []
        if self.partitions != 1 or not self.classes_exact:
            found.append(_PARTITIONS)
        if not self.users_share:
            found.append(_FAIRNESS)
        return found


@dataclass(frozen=True)
class Effects(Order):
    """How a server behaved. Times in seconds; `cancel` None: without a heartbeat it did not arrive."""

    hop: float
    timer: float
    cancel: float | None

    def losses(self) -> list[Loss]:
        """What this server lacks. The product works all the same."""
        found = super().losses()
        if self.cancel is None or self.cancel > SLOW_CANCEL:
            found.append(_CANCEL)
        if self.hop > SLOW_HOP:
            found.append(_HOPS)
        if self.timer > SLOW_TIMER:
            found.append(_TIMERS)
        return found


class Probe:
    """The activities of EngineProbe, and what they saw."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.waiting = asyncio.Event()
        self.asked = 0.0
        self.seen: float | None = None

    def activities(self) -> list[Callable[..., Any]]:
        return [self.step, self.wait]

    @activity.defn(name=names.ACT_PROBE_STEP)
    async def step(self, label: str) -> None:
        """Notes its label."""
        self.order.append(label)

    @activity.defn(name=names.ACT_PROBE_WAIT)
    async def wait(self) -> None:
        """Waits without a heartbeat, and notes when a cancel arrives."""
        self.waiting.set()
        try:
            await asyncio.sleep(_CANCEL_PATIENCE)
        except asyncio.CancelledError:
            self.seen = time.monotonic()
            raise


async def measure(client: Client, workflow: type[Any]) -> Effects:
    """Runs the probe (`workflow` is workflows.probe.EngineProbe) on fresh queues. Raises RPCError."""
    queue = _fresh_queue()
    probe = Probe()
    async with _worker(client, queue, workflow, probe):
        hops = await _run(client, "hops", queue, queue)
        timers = await _run(client, "timers", queue, queue)
        await _cancel(client, probe, queue)
        order = await _order(client, probe, queue)
    return Effects(
        partitions=order.partitions,
        order=order.order,
        hop=statistics.quantiles(hops[-20:])[0],  # the quick ones: load only adds
        timer=min(timers),
        cancel=None if probe.seen is None else probe.seen - probe.asked,
    )


async def measure_order(client: Client, workflow: type[Any]) -> Order:
    """The same for the order of tasks alone. Raises RPCError."""
    queue = _fresh_queue()
    probe = Probe()
    async with _worker(client, queue, workflow, probe):
        return await _order(client, probe, queue)


def _fresh_queue() -> str:
    return f"perdure-probe-{uuid.uuid4().hex}"


def _worker(client: Client, queue: str, workflow: type[Any], probe: Probe) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        workflows=[workflow],
        activities=probe.activities(),
        workflow_runner=UnsandboxedWorkflowRunner(),
        disable_eager_activity_execution=True,  # else the steps never pass through the server's queue
    )


async def _order(client: Client, probe: Probe, queue: str) -> Order:
    """Lets a backlog stand on a queue of its own, then takes it one by one."""
    ordered = f"{queue}-order"
    probe.order.clear()
    handle = await client.start_workflow(
        names.WF_ENGINE_PROBE,
        args=["order", ordered],
        id=f"{ordered}-run",
        task_queue=queue,
        execution_timeout=_VALID,
    )
    await _backlog(client, handle, ordered)
    async with Worker(client, task_queue=ordered, activities=probe.activities(), max_concurrent_activities=1):
        await handle.result()
    return Order(await partitions(client, ordered), tuple(probe.order))


async def _run(client: Client, kind: str, target: str, queue: str) -> list[float]:
    seconds: list[float] = await client.execute_workflow(
        names.WF_ENGINE_PROBE,
        args=[kind, target],
        id=f"{queue}-{kind}",
        task_queue=queue,
        execution_timeout=_VALID,
        result_type=list[float],
    )
    return seconds


async def _cancel(client: Client, probe: Probe, queue: str) -> None:
    handle = await client.start_workflow(
        names.WF_ENGINE_PROBE,
        args=["cancel", queue],
        id=f"{queue}-cancel",
        task_queue=queue,
        execution_timeout=_VALID,
    )
    await probe.waiting.wait()
    probe.asked = time.monotonic()
    await handle.signal("go")
    await handle.result()


async def _backlog(client: Client, handle: WorkflowHandle[Any, Any], queue: str) -> None:
    """Waits until everything stands in the queue, so that the order is the queue's."""
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=queue),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        report_stats=True,
    )
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        described_run = await handle.describe()
        if len(described_run.raw_description.pending_activities) < _BACKLOG:
            await asyncio.sleep(0.1)
            continue
        await asyncio.sleep(0.5)  # the server keeps its answer for 5 s: not asked before it is likely true
        described = await client.workflow_service.describe_task_queue(request)
        if described.stats.approximate_backlog_count >= _BACKLOG:
            return


async def partitions(client: Client, queue: str) -> int:
    """How many partitions an activity queue has. Raises RPCError."""
    answer = await client.workflow_service.list_task_queue_partitions(
        ListTaskQueuePartitionsRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue))
    )
    return len(answer.activity_task_queue_partitions)
