"""One watcher of many tasks: their states now, then each change, and the progress of those that run.

    with feeds.join(principal) as member, ExitStack() as stack:
        follower = Follower(feeds, member, Mark.parse(user, last_event_id), choose, stack)
        while not follower.ended:
            update = await follower.next(15)       None: nothing new in 15 seconds

A task that changed several times between two looks is told as it is then; its end is always told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from perdure.contracts import Beat
from perdure.live.feed import Feeds, Member
from perdure.live.mark import Mark
from perdure.live.story import Story, shown
from perdure.live.watch import Watch
from perdure.store.errors import StoreError, StoreRefused
from perdure.store.news import NewsRow
from perdure.store.rows import TaskRow
from perdure.task.states import Status

log = logging.getLogger(__name__)

MAX_RUNNING: Final = 200  # running tasks of one stream whose progress is told
_PAGE: Final = 200
_AGAIN: Final = 0.5  # seconds until a read that failed is made again


@dataclass(frozen=True, slots=True)
class FeedUpdate:
    """One event. `beat` is of the attempt that runs, None in any other state."""

    event_id: str
    row: TaskRow
    attempt: int
    beat: Beat | None = None


@dataclass(slots=True)
class _Running:
    """A running task of this stream. `told`: the last progress."""

    story: Story
    watch: Watch
    leave: ExitStack
    told: object = None


class Follower:
    """Yields what follows `mark`; with None all tasks that are not final first. `choose` filters rows."""

    def __init__(
        self,
        feeds: Feeds,
        member: Member,
        mark: Mark | None,
        choose: Callable[[TaskRow], bool],
        stack: ExitStack,
    ) -> None:
        self.ended = False
        self.finished = False  # such a stream never is
        self._feeds = feeds
        self._member = member
        self._user = member.principal.user_id
        self._mark = mark or Mark()
        self._choose = choose
        self._page: deque[NewsRow] = deque()
        self._last_page = False  # nothing follows it in its answer
        self._level = False  # takes batches; else reads by itself
        self._running: dict[str, _Running] = {}
        stack.callback(self._leave_all)

    def close(self) -> None:
        """Ends a `next` that waits."""
        self.ended = True
        self._member.wake.set()

    async def next(self, seconds: float) -> FeedUpdate | None:
        """The next update, as soon as there is one. None when there was none in time, or it ended."""
        try:
            async with asyncio.timeout(seconds):
                while not self.ended:
                    self._member.wake.clear()
                    if update := self._from_page():
                        return update
                    if await self._turn():
                        continue
                    if update := self._progress():
                        return update
                    if self._feeds.hub.draining:
                        self.ended = True
                    else:
                        await self._member.wake.wait()
        except TimeoutError:
            pass
        return None

    # Rows ----------------------------------------------------------------------------------------

    def _from_page(self) -> FeedUpdate | None:
        """The next chosen row of the page at hand."""
        while self._page:
            row = self._page.popleft().row
            self._mark = self._mark._replace(after=row.change_seq)
            event_id = self._mark.event_id(self._user)
            if not self._page and self._last_page:
                self._mark = Mark(told=self._mark.upto)
            story = Story.of(row)
            if not self._choose(row):
                self._leave(row.task_id)
                continue
            return FeedUpdate(event_id, row, story.attempt, self._watch(story))
        return None

    async def _turn(self) -> bool:
        """Gets the next page. False when there is none yet."""
        if not self._level:
            try:
                await self._read()
            except StoreRefused:
                self._mark = Mark()  # an id that no database of ours gave
            except StoreError as error:
                log.debug("changes are read again", extra={"error": str(error)})
                await asyncio.sleep(_AGAIN)
            return True
        try:
            batch = self._feeds.next_batch(self._member)
        except LookupError:
            self._level = False
            return True
        if batch is None:
            return False
        told = self._mark.told
        assert told is not None, "who is level has read once"
        rows = [entry for entry in batch.rows if self._member.sees(entry) and not told.sees(entry.xid)]
        if rows:
            self._page, self._last_page = deque(rows), True
            self._mark = Mark(told, batch.now)
        elif batch.now.later(told):
            self._mark = Mark(told=batch.now)
        return True

    async def _read(self) -> None:
        """Reads the next page by itself."""
        told, upto, after = self._mark
        if upto is None:
            await self._feeds.settle(self._member)
        news = await self._feeds.news.since(
            [self._member.principal], told, upto=upto, after=after, limit=_PAGE
        )
        if any(known is not None and known.xmax > news.now.xmax for known in (told, upto)):
            self._mark = Mark()  # an id of another database, ahead of this one
            return
        self._level = upto is None and not news.more
        self._page, self._last_page = deque(news.rows), not news.more
        end = upto or news.now
        self._mark = Mark(told, end, after) if news.rows else Mark(told=end)

    # Progress ------------------------------------------------------------------------------------

    def _watch(self, story: Story) -> Beat | None:
        """Follows the progress of a running task. Its beat, if one was seen already."""
        row = story.row
        if row.status is not Status.PROCESSING:
            self._leave(row.task_id)
            return None
        running = self._running.get(row.task_id)
        if running is None:
            if len(self._running) >= MAX_RUNNING:
                return None
            leave = ExitStack()
            waiter = leave.enter_context(
                self._feeds.hub.watch(row.task_id, row=row, beats=True, wake=self._member.wake)
            )
            running = self._running[row.task_id] = _Running(story, waiter.watch, leave)
        running.story = story
        beat = story.beat(running.watch.beat)
        running.told = shown(beat)
        return beat

    def _progress(self) -> FeedUpdate | None:
        """A running task's progress, if it is news."""
        for task_id, running in self._running.items():
            beat = running.story.beat(running.watch.beat)
            if beat is not None and shown(beat) != running.told:
                running.told = shown(beat)
                event_id = self._mark.event_id(self._user, f"{task_id[-12:]}_{beat.attempt:x}_{beat.seq:x}")
                return FeedUpdate(event_id, running.story.row, running.story.attempt, beat)
        return None

    def _leave(self, task_id: str) -> None:
        if running := self._running.pop(task_id, None):
            running.leave.close()

    def _leave_all(self) -> None:
        for task_id in list(self._running):
            self._leave(task_id)
