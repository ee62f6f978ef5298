"""EngineProbe: small runs from which `perdure doctor` reads how a server behaves. No task of a user."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.exceptions import ActivityError
from temporalio.workflow import ActivityCancellationType, ActivityHandle

with workflow.unsafe.imports_passed_through():
    from perdure import names

_HOPS = 36  # the first dozen fit into the burst that a limited server allows
_ONCE = RetryPolicy(maximum_attempts=1)
_SECONDS = timedelta(seconds=30)


@workflow.defn(name=names.WF_ENGINE_PROBE)
class EngineProbe:
    """One kind of run per question. Answers are seconds, but for `order`, which its activities note."""

    def __init__(self) -> None:
        self._go = False

    @workflow.run
    async def run(self, kind: str, queue: str) -> list[float]:
        if kind == "hops":
            return [await self._hop(queue) for _ in range(_HOPS)]
        if kind == "timers":
            return [await self._timer() for _ in range(3)]
        if kind == "cancel":
            return await self._cancel(queue)
        return await self._order(queue)

    @workflow.signal
    def go(self) -> None:
        """Cancels the waiting activity."""
        self._go = True

    async def _hop(self, queue: str) -> float:
        began = workflow.time()
        await self._step(queue, "hop", Priority())
        return workflow.time() - began

    async def _timer(self) -> float:
        began = workflow.time()
        await asyncio.sleep(0.05)
        return workflow.time() - began

    async def _cancel(self, queue: str) -> list[float]:
        waiting = workflow.start_activity(
            names.ACT_PROBE_WAIT,
            task_queue=queue,
            start_to_close_timeout=_SECONDS,
            retry_policy=_ONCE,
            cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        await workflow.wait_condition(lambda: self._go)
        waiting.cancel()
        try:
            await waiting
        except ActivityError:
            pass
        return []

    async def _order(self, queue: str) -> list[float]:
        """A backlog of one user, then another user's, then two of a better class."""
        steps = []
        for label, key, user, count in (("a", 3, "a", 24), ("b", 3, "b", 8), ("high", 1, "a", 2)):
            priority = Priority(priority_key=key, fairness_key=user)
            steps += [self._step(queue, label, priority) for _ in range(count)]
            await asyncio.sleep(0.3)  # steps that are scheduled together arrive in any order
        await asyncio.gather(*steps)
        return []

    def _step(self, queue: str, label: str, priority: Priority) -> ActivityHandle[None]:
        return workflow.start_activity(
            names.ACT_PROBE_STEP,
            label,
            task_queue=queue,
            start_to_close_timeout=_SECONDS,
            retry_policy=_ONCE,
            priority=priority,
        )
