"""How many tries one receiver may have in flight, so that a slow one never holds what others need.

    begun = await gate.enter(receiver)      None: no place, give the delivery back to the table
    gate.leave(receiver, begun)

A receiver that answers in time may have many tries at once, and another waits a moment for a place. One that
is slow, or has several tries hanging, gets few, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

FAST_PLACES: Final = 16
SLOW_PLACES: Final = 4
SLOW_SECONDS: Final = 2.0  # a try that takes longer makes its receiver a slow one ...
SLOW_MEMORY: Final = 60.0  # ... for so long
PATIENCE: Final = 2.0  # seconds that a try waits for a place
_TIDY_ABOVE: Final = 1000  # receivers remembered before the idle ones are dropped

Receiver = tuple[str, str]  # user and origin: one user's dead receiver is not another's


@dataclass
class _State:
    begun: list[float] = field(default_factory=list)  # of the tries in flight
    waiting: deque[asyncio.Future[float]] = field(default_factory=deque)
    slow_until: float = 0.0


class OriginGate:
    """Counts the tries in flight by receiver. For one event loop."""

    def __init__(self, clock: Callable[[], float] = monotonic, patience: float = PATIENCE) -> None:
        self._clock = clock
        self._patience = patience
        self._states: dict[Receiver, _State] = {}

    def full(self) -> list[Receiver]:
        """The receivers that have no place free now."""
        now = self._clock()
        return [receiver for receiver, state in self._states.items() if not _room(state, now)]

    async def enter(self, receiver: Receiver) -> float | None:
        """Takes a place: the time it was taken, for `leave`. None when there is none in time."""
        state, now = self._state(receiver), self._clock()
        if _room(state, now):
            state.begun.append(now)
            return now
        if _slow(state, now) or len(state.waiting) >= FAST_PLACES:
            return None
        place: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        state.waiting.append(place)
        try:
            async with asyncio.timeout(self._patience):
                return await place
        except BaseException as error:
            if place.done() and not place.cancelled():  # it came in the very moment of giving up
                self.leave(receiver, place.result())
            if isinstance(error, TimeoutError):
                return None
            raise
        finally:
            if place in state.waiting:
                state.waiting.remove(place)

    def leave(self, receiver: Receiver, begun: float) -> None:
        """Frees the place, notes how long it was held, and hands it to the next that waits."""
        state, now = self._state(receiver), self._clock()
        state.begun.remove(begun)
        if now - begun > SLOW_SECONDS:
            state.slow_until = now + SLOW_MEMORY
        while state.waiting and _room(state, now):
            place = state.waiting.popleft()
            if not place.done():
                state.begun.append(now)
                place.set_result(now)

    def _state(self, receiver: Receiver) -> _State:
        if receiver not in self._states and len(self._states) >= _TIDY_ABOVE:
            now = self._clock()
            idle = [
                r for r, s in self._states.items() if not s.begun and not s.waiting and s.slow_until < now
            ]
            for one in idle:
                del self._states[one]
        return self._states.setdefault(receiver, _State())


def _slow(state: _State, now: float) -> bool:
    hanging = sum(now - begun > SLOW_SECONDS for begun in state.begun)
    return state.slow_until > now or hanging >= SLOW_PLACES


def _room(state: _State, now: float) -> bool:
    return len(state.begun) < (SLOW_PLACES if _slow(state, now) else FAST_PLACES)
