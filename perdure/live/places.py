"""The places of watched tasks that wait: read in turn, a few a second, however many there are."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from perdure.live.queue import Queues
from perdure.live.watch import Place, Watch
from perdure.store.errors import StoreError

log = logging.getLogger(__name__)

WAIT_STEP: Final = 5.0  # seconds: how often a waiting task's place is told at the most
PER_SECOND: Final = 20  # places read in a second, for all watched tasks


class Places:
    """Keeps `Watch.place` of waiting tasks. `start` is called with every look at the rows."""

    def __init__(self, queues: Queues, clock: Callable[[], float]) -> None:
        self._queues = queues
        self._clock = clock
        self._today: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._started_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._reads: dict[Watch, asyncio.Task[bool]] = {}

    def start(self, watches: Iterable[Watch]) -> None:
        """Reads the places that were not read for longest, in the background, once a second."""
        now = self._clock()
        if now - self._started_at < 1 or (self._task is not None and not self._task.done()):
            return
        self._started_at = now
        waiting = (
            watch
            for watch in watches
            if watch.waits and watch.wants_beats and now - watch.placed_at >= WAIT_STEP
        )
        due = heapq.nsmallest(PER_SECOND, waiting, key=lambda watch: watch.placed_at)
        if due:
            self._task = asyncio.create_task(self._read_all(due))

    async def _read_all(self, due: Sequence[Watch]) -> None:
        for watch in due:
            if watch.waiters and await self.read(watch):
                watch.wake(beat=True)

    async def read(self, watch: Watch) -> bool:
        """Reads where a waiting task stands, once for all who ask at that time. True when that is news."""
        reading = self._reads.get(watch)
        if reading is None:
            reading = self._reads[watch] = asyncio.create_task(self._read(watch))
            reading.add_done_callback(lambda _: self._reads.pop(watch, None))
        return await asyncio.shield(reading)

    async def _read(self, watch: Watch) -> bool:
        story, before = watch.story, watch.place
        if story is None:
            return False
        watch.placed_at = self._clock()
        try:
            info = await self._queues.info(story.row)
        except StoreError as error:
            log.debug("a task's place cannot be read", extra={"error": str(error)})
            return False
        if info is None or watch.story is None or watch.story.stage != story.stage:
            return False
        waited = (self._today() - story.row.created_at).total_seconds()
        watch.place = Place(info, max(0, int(waited // WAIT_STEP)))
        return before is None or (before.info.position, before.info.reason) != (info.position, info.reason)

    async def aclose(self) -> None:
        tasks = [*self._reads.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
