"""What a GPU worker's attempts hear of its end."""

from __future__ import annotations

import asyncio


class DrainState:
    """Once `begin` is called, running attempts have `seconds` left; then, or at `now`, they hand over.

    Attempts wait on `handed_over`: it is set when they must return their checkpoint.
    """

    def __init__(self) -> None:
        self.handed_over = asyncio.Event()
        self.begun = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Starts the countdown. A second call changes nothing."""
        if not self.begun:
            self.begun = True
            self._timer = asyncio.get_running_loop().call_later(seconds, self.now)

    def now(self) -> None:
        """Hand over at once."""
        self.begun = True
        if self._timer is not None:
            self._timer.cancel()
        self.handed_over.set()
