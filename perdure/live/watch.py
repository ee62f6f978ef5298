"""What one process knows of a watched task, and who waits for news of it."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from perdure.contracts import Beat
from perdure.live.queue import QueueInfo
from perdure.live.story import Story
from perdure.task.states import Status

_UNREAD: Final = -1  # change number of a row that was not read yet


class Place(NamedTuple):
    """A waiting task's place as it was seen. `seq` grows with its waiting, the same in every process."""

    info: QueueInfo
    seq: int


class Watch:
    """What this process knows of one watched task; shared by all who watch it."""

    __slots__ = ("beat", "ending", "gone", "place", "placed_at", "story", "task_id", "waiters", "young_until")

    def __init__(self, task_id: str, young_until: float) -> None:
        self.task_id = task_id
        self.young_until = young_until
        self.story: Story | None = None
        self.beat: Beat | None = None  # the last seen, of whichever attempt; without text unless one wants it
        self.place: Place | None = None  # while it waits
        self.placed_at = float("-inf")
        self.gone = False  # there is no such row
        self.waiters: set[Waiter] = set()
        self.ending: asyncio.Task[str | None] | None = None  # reads the result's text, once for all

    @property
    def settled(self) -> bool:
        """Nothing more will change."""
        return self.gone or (self.story is not None and self.story.final)

    @property
    def waits(self) -> bool:
        """It stands in a queue."""
        return self.story is not None and self.story.row.status in (Status.PENDING, Status.QUEUED)

    @property
    def wants_beats(self) -> bool:
        """Somebody follows its progress."""
        return any(waiter.beats for waiter in self.waiters)

    @property
    def known(self) -> int:
        return self.story.row.change_seq if self.story else _UNREAD

    def wake(self, *, beat: bool = False) -> None:
        """Wakes who waits; for a beat, only those who want beats."""
        for waiter in self.waiters:
            if waiter.beats or not beat:
                waiter.wake.set()


class Waiter:
    """One who watches a task. `wake` is set whenever there may be news."""

    __slots__ = ("beats", "text", "wake", "watch")

    def __init__(self, watch: Watch, beats: bool, text: bool, wake: asyncio.Event) -> None:
        self.watch = watch
        self.beats = beats
        self.text = text
        self.wake = wake
