"""The schedules of upkeep: brought up to date at each start, made again should Temporal lose them."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Final

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)
from temporalio.service import RPCError

from perdure import names
from perdure.temporal import EngineRefused, EngineUnavailable, bounded

log = logging.getLogger(__name__)

RECONCILE_EVERY: Final = timedelta(seconds=5)
SWEEP_EVERY: Final = timedelta(seconds=5)
RETENTION_EVERY: Final = timedelta(hours=1)
_RETRY_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 60.0  # an engine restored from a copy, or a schedule deleted by hand

SCHEDULES: Final = {
    names.SCHEDULE_RECONCILE: (names.WF_RECONCILE, RECONCILE_EVERY),
    names.SCHEDULE_CALLBACK_SWEEP: (names.WF_CALLBACK_SWEEP, SWEEP_EVERY),
    names.SCHEDULE_RETENTION: (names.WF_RETENTION, RETENTION_EVERY),
}


async def keep_schedules(client: Client, look_seconds: float = _LOOK_SECONDS) -> None:
    """Makes or updates every schedule and looks every `look_seconds` that they are there. Until cancelled."""
    pause = look_seconds
    while True:
        for schedule_id, (workflow, every) in SCHEDULES.items():
            try:
                await bounded(_put(client, schedule_id, _schedule(schedule_id, workflow, every)))
            except (EngineUnavailable, EngineRefused, RPCError) as error:
                log.warning("schedule not set yet", extra={"schedule": schedule_id, "reason": str(error)})
                pause = _RETRY_SECONDS
        await asyncio.sleep(pause)
        pause = look_seconds


def _schedule(schedule_id: str, workflow: str, every: timedelta) -> Schedule:
    return Schedule(
        action=ScheduleActionStartWorkflow(
            workflow,
            id=schedule_id,
            task_queue=names.CONTROL_QUEUE,
            execution_timeout=timedelta(minutes=15),
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=every)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(seconds=30)),
    )


async def _put(client: Client, schedule_id: str, schedule: Schedule) -> None:
    try:
        await client.create_schedule(schedule_id, schedule)
    except ScheduleAlreadyRunningError:
        await client.get_schedule_handle(schedule_id).update(lambda given: _updated(given, schedule))


def _updated(given: ScheduleUpdateInput, schedule: Schedule) -> ScheduleUpdate | None:
    """Ours, but an operator's pause stays."""
    current = given.description.schedule
    if current.spec.intervals == schedule.spec.intervals and isinstance(
        current.action, ScheduleActionStartWorkflow
    ):
        return None
    schedule.state = current.state
    return ScheduleUpdate(schedule)
