"""An event loop whose clock jumps to the next timer when nothing is ready: minutes pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Jumping(selectors.SelectSelector):
    """Does not sleep: tells the loop that the time has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test's coroutine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def clock() -> float:
    """The running loop's time: the `clock` of what is tested."""
    return asyncio.get_running_loop().time()
