"""Runs one attempt on an executor, without Temporal, and keeps all it told."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from perdure.contracts import Beat, Limits, TaskResult
from perdure.llm.base import Delta, Executor, Job
from perdure.llm.openai import OpenAIExecutor
from perdure.llm.track import Track
from perdure.llm.wire import make_client
from perdure.models import Model
from perdure.task.errors import TaskFault

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 100}


@dataclass
class Told:
    """What an attempt told: its deltas, and either a result or a fault."""

    track: Track
    deltas: list[Delta] = field(default_factory=list)
    result: TaskResult | None = None
    fault: TaskFault | None = None

    @property
    def done(self) -> TaskResult:
        """The result, of an attempt that must have had one."""
        assert self.fault is None, f"{self.fault.code}: {self.fault.message}"
        assert self.result is not None
        return self.result

    @property
    def failed(self) -> TaskFault:
        """The fault, of an attempt that must have had one."""
        assert self.result is None
        assert self.fault is not None
        return self.fault

    @property
    def beat(self) -> Beat:
        """The checkpoint it left."""
        return self.track.beat()


async def attempt(
    executor: Executor,
    params: dict[str, Any] | None = None,
    *,
    number: int = 1,
    checkpoint: Beat | None = None,
    max_output_bytes: int = 1024 * 1024,
    stop_after: int | None = None,
    into: list[Told] | None = None,
) -> Told:
    """One attempt to its end. `stop_after`: the generator is closed after that many deltas. `into` holds what
    it tells from the start, for somebody who watches."""
    told = Told(Track(number, checkpoint, max_output_bytes))
    if into is not None:
        into.append(told)
    job = Job(
        task_id="task_" + "0" * 32,
        attempt=number,
        params=HELLO if params is None else params,
        checkpoint=checkpoint,
        limits=Limits(max_output_bytes=max_output_bytes),
    )
    try:
        async with aclosing(executor.run(job)) as deltas:
            async for delta in deltas:
                told.deltas.append(delta)
                told.track.apply(delta)
                told.result = delta.result or told.result
                if stop_after is not None and len(told.deltas) >= stop_after:
                    return told
    except TaskFault as fault:
        told.fault = fault
    return told


def executor_for(base_url: str, *, api_key: str | None = None, **model: Any) -> OpenAIExecutor:
    """An `openai` executor for a server, with a model's settings; short time limits unless given."""
    settings = {"first_token_timeout": 5.0, "token_timeout": 5.0, "connect_timeout": 2.0, **model}
    made = Model(pool="local", base_url=base_url, **settings)
    client = make_client(made.connect_timeout, verify=False)
    return OpenAIExecutor("test-model", made, base_url, client, api_key=api_key)


class LoopLag:
    """How long the event loop is held up at most while it is open: `worst`, in seconds of CPU time of its
    thread, so that other processes on a loaded machine do not count."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopLag:
        self._task = asyncio.create_task(self._measure())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _measure(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.002)
            self.worst = max(self.worst, time.thread_time() - before)
