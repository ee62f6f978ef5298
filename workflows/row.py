"""Keeps a task's row up with its workflow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError

with workflow.unsafe.imports_passed_through():
    from perdure import names
    from perdure.contracts import Projection
    from perdure.task.lifecycle import Lifecycle

UNTIL_DONE = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5))
_ONCE = RetryPolicy(maximum_attempts=1)
_AT_ONCE = timedelta(milliseconds=500)  # a local activity holds back the other commands, a cancel too


async def keep_row(life: Lifecycle, written: int, before_write: Callable[[], None]) -> None:
    """Writes each new projection until the task is final; the end itself is committed elsewhere.

    First a short local try; where that fails, one ordinary activity in the background brings the projection
    until it lands or a later one replaces it. Never raises for a store that does not answer.
    """

    def is_newer() -> bool:
        return life.status.final or life.version > written

    while True:
        await workflow.wait_condition(is_newer)
        if life.status.final:
            return
        projection = life.project()
        before_write()
        try:
            await workflow.execute_local_activity(
                names.ACT_RECORD_NOW,
                projection,
                start_to_close_timeout=_AT_ONCE,
                schedule_to_close_timeout=_AT_ONCE,
                retry_policy=_ONCE,
                summary=f"row: {projection.status}",
            )
        except FailureError:  # a local activity fails with its cause, not with an ActivityError
            await _record_until_replaced(life, projection)
        written = projection.version


async def _record_until_replaced(life: Lifecycle, projection: Projection) -> None:
    handle = workflow.start_activity(
        names.ACT_RECORD,
        projection,
        start_to_close_timeout=timedelta(seconds=10),
        retry_policy=UNTIL_DONE,
        summary=f"row: {projection.status}",
    )
    await workflow.wait_condition(lambda: handle.done() or life.version > projection.version)
    if not handle.done():
        handle.cancel()
    try:
        await handle
    except FailureError:  # cancelled just now: a later projection, or the outcome, holds all of this one
        pass
