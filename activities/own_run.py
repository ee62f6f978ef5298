"""What an attempt asks of its own workflow run, and tells it."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Final

from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from perdure import names
from perdure.contracts import Params, TaskInput
from perdure.task.errors import ErrorCode, TaskFault

_RPC_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
_PARAMS_PATIENCE: Final = 60.0  # seconds of an engine outage that reading the params sits out


class OwnRun:
    """The workflow run that started this attempt."""

    def __init__(self, client: Client, workflow_id: str, run_id: str) -> None:
        self._client = client
        self._workflow_id = workflow_id
        self._run_id = run_id

    @property
    def _handle(self) -> WorkflowHandle[object, object]:
        return self._client.get_workflow_handle(self._workflow_id, run_id=self._run_id)

    async def announce(self, number: int, worker: str, at: datetime, *, after: float) -> None:
        """Signals `attempt_started` after `after` seconds, until it lands or the run is gone."""
        await asyncio.sleep(after)
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._handle.signal(
                    names.SIG_ATTEMPT_STARTED,
                    args=[number, worker, at],
                    rpc_timeout=timedelta(seconds=_RPC_SECONDS),
                )
                return
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    async def params(self) -> Params:
        """The task's params from the run's first event: one small RPC. Raises TaskFault."""
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + _PARAMS_PATIENCE, _FIRST_PAUSE
        while True:
            try:
                return await self._first_event()
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND or loop.time() + pause > end:
                    raise TaskFault(
                        ErrorCode.INTERNAL,
                        f"the task's params could not be read from Temporal ({error.status.name.lower()})",
                    ) from error
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    async def _first_event(self) -> Params:
        events = self._handle.fetch_history_events(page_size=1, rpc_timeout=timedelta(seconds=_RPC_SECONDS))
        first = await anext(events)
        payloads = first.workflow_execution_started_event_attributes.input.payloads
        (task,) = await self._client.data_converter.decode(payloads, [TaskInput])
        assert isinstance(task, TaskInput)
        return task.params
