"""The control worker: every workflow, and the activities that write rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from perdure import names
from workflows.inference_task import InferenceTask
from workflows.maintenance import CallbackSweep, Reconcile, Retention
from workflows.worker_news import WorkerNews

WORKFLOWS: Final[list[type]] = [InferenceTask, Reconcile, CallbackSweep, Retention, WorkerNews]
_POLLERS: Final = 20
CACHED_WORKFLOWS: Final = 500  # about 130 kB each
_STICKY: Final = timedelta(seconds=2)  # what a killed control worker costs its tasks


def workflow_runner() -> SandboxedWorkflowRunner:
    """The sandbox. Our own pure modules pass through it: they hold no state that a replay could see."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules("perdure")
    )


def build_control_worker(
    client: Client,
    activities: Sequence[Callable[..., Any]],
    *,
    records_at_once: int,
    cached_workflows: int = CACHED_WORKFLOWS,
) -> Worker:
    """`records_at_once` bounds the activities that hold a database connection: the size of the pool.

    `cached_workflows`: runs beyond that are dropped from memory and replayed at their next event.
    """
    return Worker(
        client,
        task_queue=names.CONTROL_QUEUE,
        workflows=WORKFLOWS,
        activities=activities,
        workflow_runner=workflow_runner(),
        max_cached_workflows=cached_workflows,
        max_concurrent_workflow_tasks=CACHED_WORKFLOWS,
        max_concurrent_activities=records_at_once * 4,
        max_concurrent_local_activities=records_at_once,
        workflow_task_poller_behavior=PollerBehaviorSimpleMaximum(_POLLERS),
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(_POLLERS),
        sticky_queue_schedule_to_start_timeout=_STICKY,
        graceful_shutdown_timeout=timedelta(seconds=10),
    )
