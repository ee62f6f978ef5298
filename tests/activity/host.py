"""A workflow that does nothing but run one attempt and note what the attempt tells it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from pydantic import BaseModel

    from perdure import names
    from perdure.contracts import Beat, GenerateInput, GenerateResult, Limits, TaskInput


class Heard(BaseModel):
    """What the workflow knows in the end: a result, or the type of the failure and its last beat."""

    announced: list[tuple[int, str, datetime]] = []
    result: GenerateResult | None = None
    failure: str | None = None
    beat: Beat | None = None


@workflow.defn(name="TestHost")
class Host:
    """Runs attempts until one is not lost."""

    def __init__(self) -> None:
        self.heard = Heard()

    @workflow.signal(name=names.SIG_ATTEMPT_STARTED)
    def attempt_started(self, number: int, worker: str, at: datetime) -> None:
        self.heard.announced.append((number, worker, at))

    @workflow.signal
    def cancel(self) -> None:
        self.handle.cancel()

    @workflow.query
    def announced(self) -> int:
        return len(self.heard.announced)

    @workflow.run
    async def run(self, task: TaskInput) -> Heard:
        for number in range(1, 6):
            await self.attempt(task, number, self.heard.beat)
            if self.heard.failure != "HEARTBEAT":
                break
        return self.heard

    async def attempt(self, task: TaskInput, number: int, checkpoint: Beat | None) -> None:
        self.heard.failure = None
        self.handle: workflow.ActivityHandle[GenerateResult] = workflow.start_activity(
            names.ACT_GENERATE,
            GenerateInput(
                task_id=task.task_id,
                attempt=number,
                model_id=task.model_id,
                params=None,
                checkpoint=checkpoint,
                limits=Limits(attempt_seconds=60, heartbeat_seconds=task.heartbeat_seconds),
            ),
            result_type=GenerateResult,
            task_queue=names.pool_queue(task.pool),
            start_to_close_timeout=timedelta(seconds=90),
            heartbeat_timeout=timedelta(seconds=task.heartbeat_seconds),
            retry_policy=RetryPolicy(maximum_attempts=1),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        try:
            self.heard.result = await self.handle
        except ActivityError as error:
            cause: Any = error.cause
            self.heard.failure = getattr(getattr(cause, "type", None), "name", None) or str(cause.type)
            details = getattr(cause, "last_heartbeat_details", None)
            if details:
                self.heard.beat = Beat.model_validate(details[0])
