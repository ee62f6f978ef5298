"""The scheduled workflows: one activity each, started by a Temporal Schedule that never overlaps itself."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from perdure import names

_ONCE = RetryPolicy(maximum_attempts=1)  # the next tick of the schedule is the retry


@workflow.defn(name=names.WF_RECONCILE)
class Reconcile:
    """Settles rows and runs that disagree."""

    @workflow.run
    async def run(self) -> None:
        """One pass."""
        await workflow.execute_activity(
            names.ACT_RECONCILE,
            start_to_close_timeout=timedelta(seconds=120),
            heartbeat_timeout=timedelta(seconds=30),
            retry_policy=_ONCE,
        )


@workflow.defn(name=names.WF_CALLBACK_SWEEP)
class CallbackSweep:
    """Sends the callbacks that are due in the table."""

    @workflow.run
    async def run(self) -> None:
        """One pass."""
        await workflow.execute_activity(
            names.ACT_SWEEP_CALLBACKS,
            task_queue=names.CALLBACKS_QUEUE,
            schedule_to_start_timeout=timedelta(seconds=30),
            start_to_close_timeout=timedelta(seconds=90),
            heartbeat_timeout=timedelta(seconds=45),
            retry_policy=_ONCE,
        )


@workflow.defn(name=names.WF_RETENTION)
class Retention:
    """Deletes final tasks older than `retention_days`."""

    @workflow.run
    async def run(self) -> None:
        """One pass, in batches."""
        await workflow.execute_activity(
            names.ACT_PURGE,
            start_to_close_timeout=timedelta(minutes=10),
            heartbeat_timeout=timedelta(seconds=60),
            retry_policy=_ONCE,
        )
