"""Whether Temporal still hears this worker: its attempts must end when it does not.

The SDK tells an attempt when a heartbeat could not be delivered, 5 s after the time-out; but not always
(measured with the engine killed: after 7 s four times in six, after 26 and 43 s the others). So the worker
asks by itself: one small call a second while attempts run, whatever their number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from temporalio.api.workflowservice.v1 import GetSystemInfoRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

EVERY: Final = 1.0  # seconds
_PATIENCE: Final = timedelta(seconds=2)
_NO_ANSWER: Final = (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)


class Pulse:
    """One per worker. Any answer counts, a refusal too: it shows that the way is open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._felt_by = 0
        self._beating: asyncio.Task[None] | None = None
        self._heard = 0.0

    @asynccontextmanager
    async def felt(self) -> AsyncIterator[None]:
        """Asks for as long as an attempt runs in it."""
        self._felt_by += 1
        if self._beating is None:
            self._heard = time.monotonic()  # the attempt has just come from there
            self._beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._felt_by -= 1
            if not self._felt_by:
                self._beating.cancel()
                self._beating = None

    async def lost(self, seconds: float) -> None:
        """Returns once Temporal has not answered for so long. A process that was frozen counts that time."""
        while (left := self._heard + seconds - time.monotonic()) > 0:  # noqa: ASYNC110 - time is waited for
            await asyncio.sleep(left)

    async def _beat(self) -> None:
        while True:
            asked = time.monotonic()
            if await self._answers():
                self._heard = asked
            await asyncio.sleep(EVERY)

    async def _answers(self) -> bool:
        try:
            await self._client.workflow_service.get_system_info(GetSystemInfoRequest(), timeout=_PATIENCE)
        except RPCError as error:
            return error.status not in _NO_ANSWER
        return True
