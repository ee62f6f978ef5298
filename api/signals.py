"""Signals to workflows, on their way. A reply waits for its own a moment; none is lost by that reply's end.

A signal that Temporal does not take is no error of the call: the row holds the wish. A cancel is signalled
again by the reconciler, a change of class by this process, for as long as that can matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from perdure.live.hub import Hub
from perdure.task.states import Priority
from perdure.temporal import EngineRefused, EngineUnavailable, TemporalGate

log = logging.getLogger(__name__)
PATIENCE: Final = 1.0  # seconds that a reply waits for Temporal
_AT_ONCE: Final = 32
_AGAIN: Final = (1.0, 2.0, 4.0, 8.0, *(15.0,) * 20)  # seconds between tries of a change of class


class Signals:
    """One per process."""

    def __init__(self, gate: TemporalGate, hub: Hub) -> None:
        self._gate = gate
        self._hub = hub
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes: dict[str, asyncio.Task[None]] = {}  # of class, under way
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def cancel(self, task_id: str, reason: str | None) -> None:
        """Tells the workflow to stop; waits PATIENCE seconds at most."""
        await self._wait(self.cancel_later(task_id, reason))

    def cancel_later(self, task_id: str, reason: str | None) -> asyncio.Task[None]:
        """The same without waiting."""
        return self._send("cancel", task_id, lambda: self._gate.signal_cancel(task_id, reason))

    async def priority(self, task_id: str, priority: Priority) -> None:
        """Tells the workflow its task's new class; waits PATIENCE seconds at most. The last one counts."""
        earlier = self._changes.get(task_id)
        if earlier is not None:
            earlier.cancel()
        task = self._send(
            "priority", task_id, lambda: self._gate.signal_priority(task_id, priority.value), _AGAIN
        )
        self._changes[task_id] = task
        task.add_done_callback(lambda one: self._changes.get(task_id) is one and self._changes.pop(task_id))
        await self._wait(task)

    async def aclose(self) -> None:
        """Gives what is on its way a moment, then drops it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(
        self, what: str, task_id: str, call: Callable[[], Awaitable[bool]], again: Sequence[float] = ()
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._try(what, task_id, call, again))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _try(
        self, what: str, task_id: str, call: Callable[[], Awaitable[bool]], again: Sequence[float]
    ) -> None:
        for wait in (*again, None):
            if await self._signal(what, task_id, call) or wait is None:
                return
            await asyncio.sleep(wait)

    async def _signal(self, what: str, task_id: str, call: Callable[[], Awaitable[bool]]) -> bool:
        """Whether Temporal answered."""
        async with self._room:
            try:
                taken = await call()
            except (EngineUnavailable, EngineRefused) as error:
                extra = {"task_id": task_id, "signal": what, "error": str(error)}
                log.warning("signal not taken; it will be repeated", extra=extra)
                return False
        if not taken:
            log.info("no open workflow for a signal", extra={"task_id": task_id, "signal": what})
        self._hub.poke(task_id)
        return True

    async def _wait(self, task: asyncio.Task[None]) -> None:
        await asyncio.wait({task}, timeout=PATIENCE)
