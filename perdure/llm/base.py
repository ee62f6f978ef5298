"""The seam between an attempt and what generates: an executor yields deltas.

An executor holds the resources of one model (an HTTP client, an imported function) for the worker's lifetime.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from perdure.contracts import Beat, Limits, Params, TaskResult, Usage


class Delta(BaseModel):
    """A step of real output. Only what an executor yields counts as progress; keep-alives are not yielded.

    `text` and `reasoning` are new characters, appended to what stands. `tokens` is how many output tokens the
    step is worth (1 where the server does not say). `restart` is yielded first when the checkpoint was not
    continued from: all text so far but its first `keep_chars` characters (`keep_tokens` tokens) is dropped,
    and `discarded_tokens` counts that.
    `progress` (0-99), `message` and `state` are the executor's own figures.
    `result` comes last and once: positive proof of the end.
    """

    model_config = ConfigDict(frozen=True)

    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    restart: bool = False
    keep_chars: int = 0
    keep_tokens: int = 0
    progress: int | None = None
    message: str | None = None
    state: Any = None
    usage: Usage | None = None  # as the server last reported for this attempt
    result: TaskResult | None = None


class Job(BaseModel):
    """One attempt as an executor sees it."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    task_id: str
    attempt: int
    params: Params
    checkpoint: Beat | None = None
    limits: Limits = Field(default_factory=Limits)
    headers: dict[str, str] = Field(default_factory=dict)  # traceparent, for the model server


class Executor(Protocol):
    """Generates. Closing the generator closes the model connection at once, without draining it."""

    def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Yields deltas, the last with `result`. Raises TaskFault."""
        ...

    async def aclose(self) -> None: ...
