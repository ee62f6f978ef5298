"""One attempt on a GPU worker: who runs it, since when, what it has made, and how it tells its end."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Literal

import orjson
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure.contracts import MAX_RESULT_BYTES, Beat, FaultDetails, GenerateInput, GenerateResult, TaskResult
from perdure.llm.track import Track
from perdure.task.errors import ErrorCode, TaskFault


class Attempt:
    """One attempt: who runs it, since when, and what it has made."""

    def __init__(self, given: GenerateInput, worker: str) -> None:
        self.given = given
        self.worker = worker
        self.started_at = datetime.now(UTC)
        self.first_token: float | None = None  # seconds after the start
        self.track = Track(given.attempt, given.checkpoint, given.limits.max_output_bytes)
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()

    def seconds(self) -> float:
        """How long it has run, by a clock that nobody sets."""
        return self._clock() - self._begun

    def figures(self) -> dict[str, float | int]:
        """For the log: no text."""
        return {
            "seconds": round(self.seconds(), 3),
            "output_tokens": self.track.output_tokens,
            "resumed_from_tokens": self.track.resumed_from,
        }

    def ended(self, kind: Literal["cancelled", "drained"]) -> GenerateResult:
        """Cut short in order: the output so far goes back as the checkpoint."""
        beat = self.track.last_beat() if kind == "cancelled" else self.track.beat()
        return self._result(kind, beat, None)

    def generated(self, result: TaskResult) -> GenerateResult:
        """The end. Raises TaskFault where the result is larger than it may be."""
        size = len(orjson.dumps(result.model_dump(exclude_none=True)))
        if size > MAX_RESULT_BYTES:
            raise TaskFault(
                ErrorCode.OUTPUT_TOO_LARGE,
                f"the result is {size} bytes as JSON, more than the {MAX_RESULT_BYTES} that are kept; "
                "lower max_tokens or ask for less",
            )
        return self._result("generated", self.track.final_beat(), result)

    def _result(
        self, kind: Literal["generated", "cancelled", "drained"], beat: Beat, result: TaskResult | None
    ) -> GenerateResult:
        return GenerateResult(
            kind=kind,
            beat=beat,
            result=result,
            usage=self.track.usage(ended_well=kind == "generated"),
            worker=self.worker,
            started_at=self.started_at,
        )

    def error(self, fault: TaskFault) -> ApplicationError:
        """The fault as it crosses Temporal, with the checkpoint of the next attempt."""
        details = FaultDetails(
            code=fault.code,
            message=fault.message,
            retryable=fault.retryable,
            refused=fault.refused,
            retry_after=fault.retry_after,
            beat=self.track.beat(),
            usage=self.track.usage(ended_well=False),
            worker=self.worker,
            started_at=self.started_at,
        )
        return ApplicationError(
            fault.message,
            details,
            type=fault.code,
            non_retryable=True,
            category=ApplicationErrorCategory.BENIGN,
        )
