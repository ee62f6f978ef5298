"""The `simulated` executor: words at a fixed rate, for load tests and demos. No model, no network.

params: tokens               words to make, 0 to 16,777,216 (100); 0 ends at once
        tokens_per_second    0.01 to 10,000,000 (50)
        fault                {"code": an error code, "after_tokens": n of this attempt (0), "times": m,
                             "retry_after": seconds, "refused": bool}: attempts 1 to m fault (every attempt
                             where `times` is not given)
        messages             optional; its words count as prompt tokens

Word k is always the same, so an interrupted task goes on from its checkpoint and its text is identical
however often it was interrupted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from perdure.contracts import Params, TaskResult, Usage
from perdure.llm.base import Delta, Job
from perdure.llm.quote import texts_of
from perdure.task.errors import ErrorCode, TaskFault

MAX_TOKENS: Final = 16_777_216
_MAX_RATE: Final = 10_000_000
_TICK: Final = 0.02  # seconds: at most 50 deltas a second, however fast the words come
_BATCH: Final = 5_000  # words of one delta, so that the event loop is never held up
_SENTENCE: Final = (
    "the durable task keeps its place while workers come and go and every word that was shown stands until "
    "the last one is written then the result is stored once signed once and delivered to whoever asked"
)
_WORDS: Final = _SENTENCE.split()


@dataclass(frozen=True)
class _Fault:
    code: ErrorCode
    after_tokens: int
    times: int | None
    retry_after: float | None
    refused: bool


class SimulatedExecutor:
    """Makes words. `name` is the model's id."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Yields words until there are `tokens`. Raises TaskFault as `fault` says, or for bad params."""
        total = _whole(job.params, "tokens", 100, MAX_TOKENS)
        rate = _rate(job.params)
        fault = _fault(job.params.get("fault"))
        start = _standing(job)
        if start is None:
            yield Delta(restart=True)
        first = made = start or 0
        stop = fault.after_tokens if fault and (fault.times is None or job.attempt <= fault.times) else None
        begun = asyncio.get_running_loop().time()
        while True:
            if fault and stop is not None and made - first >= stop:
                raise _raised(fault)
            if made >= total:
                break
            due = min(total, first + _due(begun, rate), made + _BATCH)
            if stop is not None:
                due = min(due, first + stop)
            if due > made:
                text = words(made, due)
                yield Delta(text=text, tokens=due - made, progress=min(99, 100 * due // total))
                made = due
                if made == total or (stop is not None and made - first == stop):
                    continue  # nothing more to wait for
            await asyncio.sleep(0 if made < first + _due(begun, rate) else _pause(begun, rate, made - first))
        yield Delta(result=self._result(total, resumed=bool(start)), usage=_usage(job.params, made - first))

    def _result(self, total: int, resumed: bool) -> TaskResult:
        return TaskResult(text=words(0, total), finish_reason="stop", model=self._name, resumed=resumed)

    async def aclose(self) -> None:
        """Holds nothing."""


def words(start: int, end: int) -> str:
    """The text from word `start` to before word `end`."""
    text = " ".join(_WORDS[k % len(_WORDS)] for k in range(start, end))
    return " " + text if start and text else text


def _standing(job: Job) -> int | None:
    """How many words of the checkpoint stand; None when it holds something else."""
    checkpoint = job.checkpoint
    if checkpoint is None:
        return 0
    made = checkpoint.output_tokens
    return made if checkpoint.text == words(0, made) else None


def _due(begun: float, rate: float) -> int:
    """Words that should stand by now."""
    return int((asyncio.get_running_loop().time() - begun) * rate + 1e-6)


def _pause(begun: float, rate: float, made: int) -> float:
    """Seconds until the next word is due."""
    return max(_TICK, begun + (made + 1) / rate - asyncio.get_running_loop().time())


def _usage(params: Params, made: int) -> Usage:
    prompt = sum(len(text.split()) for text in texts_of(params))
    return Usage(prompt_tokens=prompt, completion_tokens=made)


def _whole(params: Params, key: str, default: int, most: int) -> int:
    value = params.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _bad(f"{key} must be a whole number from 0 to {most}")
    return value


def _rate(params: Params) -> float:
    rate = params.get("tokens_per_second", 50)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate):
        raise _bad("tokens_per_second must be a number")
    if not 0.01 <= rate <= _MAX_RATE:
        raise _bad(f"tokens_per_second must be from 0.01 to {_MAX_RATE}")
    return float(rate)


def _fault(value: Any) -> _Fault | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("code") not in list(ErrorCode):
        raise _bad(f"fault must be an object with a code out of {', '.join(ErrorCode)}")
    wait = value.get("retry_after")
    if wait is not None and (
        isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= 86_400
    ):
        raise _bad("fault.retry_after must be seconds from 0 to 86400")
    times = None if value.get("times") is None else _whole(value, "times", 0, 1000)
    return _Fault(
        ErrorCode(value["code"]),
        _whole(value, "after_tokens", 0, MAX_TOKENS),
        times,
        None if wait is None else float(wait),
        value.get("refused") is True,
    )


def _raised(fault: _Fault) -> TaskFault:
    return TaskFault(
        fault.code,
        "a simulated fault, as params.fault asks",
        retry_after=fault.retry_after,
        refused=fault.refused,
    )


def _bad(message: str) -> TaskFault:
    return TaskFault(ErrorCode.INVALID_REQUEST, f"params.{message}")
