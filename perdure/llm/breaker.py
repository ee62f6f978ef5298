"""A breaker per model and worker: a dead server is tried by one task at a time, not by all that wait.

closed -> open        after `threshold` refusals in a row; entries are refused, for 1 s at first, 15 s at most
open -> probing       the pause is over: one entry passes, the others are refused
probing -> recovering the probe was answered: 2, 4, 8, ... entries pass in the following seconds
recovering -> closed  after five seconds; any refusal opens it again

The pauses are shorter than a lone task's back-off, so a task that is alone is always the probe.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from perdure.task.errors import ErrorCode, TaskFault

State = Literal["closed", "open", "probing", "recovering"]

_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds
_RECOVERY: Final = 5.0  # seconds from the first answer to closed


@dataclass(frozen=True)
class BreakerState:
    """What an operator sees. `refusals` in a row; `retry_in`: seconds until the next probe may go; `age`:
    seconds for which it has been closed, or for which it has not."""

    state: State
    refusals: int = 0
    retry_in: float | None = None
    age: float = field(default=0.0, compare=False)


class Breaker:
    """The breaker of one model. `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        threshold: int = 3,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._threshold = threshold
        self._clock = clock
        self._uniform = uniform
        self._state: State = "closed"
        self._refusals = 0
        self._opened = 0  # times in a row
        self._until = 0.0  # open: when the pause ends
        self._since = 0.0  # recovering: since when
        self._moved = clock()  # when it closed, or left that state
        self._passed = 0  # entries that passed since then
        self._probe: Ticket | None = None

    def enter(self) -> Ticket:
        """Lets a request through. Raises TaskFault (`upstream_unavailable`, refused) where it must wait."""
        now = self._clock()
        if self._state == "open" and now >= self._until:
            self._state = "probing"
        if self._state == "recovering" and now - self._since >= _RECOVERY:
            self._close(self._since + _RECOVERY)
        if self._state == "closed":
            return Ticket(self)
        if self._state == "probing" and self._probe is None:
            self._probe = Ticket(self)
            return self._probe
        if self._state == "recovering" and self._passed < 2 ** (int(now - self._since) + 1):
            self._passed += 1
            return Ticket(self)
        raise self._refuse(now)

    def state(self) -> BreakerState:
        """The state now."""
        now = self._clock()
        if self._state == "recovering" and now - self._since >= _RECOVERY:
            self._close(self._since + _RECOVERY)
        age = now - self._moved
        if self._state == "open":
            return BreakerState("open", self._refusals, max(0.0, self._until - now), age)
        return BreakerState(self._state, self._refusals, age=age)

    def _refuse(self, now: float) -> TaskFault:
        # Spread over a span as long as the pause, so that those who wait come back one by one.
        pause = max(1.0, self._pause())
        wait = max(0.5, self._until - now if self._state == "open" else 0.0) + self._uniform(0.0, pause)
        message = (
            "the model server has just come back and is not given all waiting tasks at once"
            if self._state == "recovering"
            else f"the model server refused the last {self._refusals} requests of this worker; "
            "one task at a time tries it again, this one waits"
        )
        return TaskFault(ErrorCode.UPSTREAM_UNAVAILABLE, message, retry_after=wait, refused=True)

    def _pause(self) -> float:
        return _PAUSES[min(max(self._opened, 1), len(_PAUSES)) - 1]

    def _close(self, at: float) -> None:
        self._state, self._refusals, self._opened, self._moved = "closed", 0, 0, at

    def _answered(self, ticket: Ticket) -> None:
        self._refusals = 0
        if self._probe is ticket:
            self._probe = None
        if self._state in ("open", "probing"):
            self._state, self._since, self._passed = "recovering", self._clock(), 0

    def _refused(self, ticket: Ticket) -> None:
        if self._state == "open":
            return  # it entered before the breaker opened and tells nothing new
        self._refusals += 1
        if self._probe is ticket or self._state == "recovering" or self._refusals >= self._threshold:
            self._probe = None
            self._opened += 1
            now = self._clock()
            if self._state == "closed":
                self._moved = now
            self._state, self._until = "open", now + self._pause()

    def _left(self, ticket: Ticket) -> None:
        if self._probe is ticket:  # cancelled before it knew: the next entry probes
            self._probe = None


class Ticket:
    """One request that passed. The first of `answered` and `refused` counts; `leave` always comes last."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker: Breaker | None = breaker

    def answered(self) -> None:
        """The server serves: output came, or an answer that is no refusal."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker._answered(self)

    def refused(self) -> None:
        """The server refused, or could not be reached."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker._refused(self)

    def leave(self) -> None:
        """The request is over. Without an answer before, it tells nothing."""
        breaker, self._breaker = self._breaker, None
        if breaker is not None:
            breaker._left(self)
