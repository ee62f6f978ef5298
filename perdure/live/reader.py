"""One watcher of one task: a place in its story, moved on by what the hub knows.

    with hub.watch(task_id, row=row, beats=True) as waiter:
        reader = Reader(hub, waiter, Cursor.parse(task_id, last_event_id), partial=False)
        while not reader.ended:
            update = await reader.next(15)       None: nothing new in 15 seconds

Moves and text come without gap or repeat. Beats between two looks of a slow watcher are merged: it gets the
last one, with all the text since.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, NamedTuple

from perdure.contracts import Beat
from perdure.live.cursor import FINAL_CURSOR, Cursor, text_crc
from perdure.live.hub import Hub
from perdure.live.queue import QueueInfo
from perdure.live.story import Story, shown
from perdure.live.watch import Waiter
from perdure.store.errors import StoreError
from perdure.store.rows import TaskRow
from perdure.task.text import clean

log = logging.getLogger(__name__)

MAX_PART: Final = 32_768  # characters in one event: a slow line gets a long text in pieces it can finish
_AGAIN: Final = 0.5  # seconds until a result that could not be read is asked for again


class Part(NamedTuple):
    """New text: it stands at `offset` (code points) of the whole."""

    offset: int
    text: str


@dataclass(frozen=True, slots=True)
class Update:
    """One event. `beat` is of the attempt that runs, None in any other state. `attempt` runs or ran last, 0
    before the first. `restarted`: the text begins anew, what was sent before is void."""

    cursor: Cursor
    row: TaskRow
    attempt: int
    beat: Beat | None = None
    queue: QueueInfo | None = None
    restarted: bool = False
    part: Part | None = None

    @property
    def event_id(self) -> str:
        return self.cursor.event_id(self.row.task_id)


class _Text(NamedTuple):
    """What of a text a watcher has not seen: `part` to send now, `rest` characters after that."""

    part: Part | None
    restarted: bool
    offset: int
    crc: int
    rest: int = 0


class Reader:
    """Yields the updates that follow `cursor`; a snapshot first where that is None.

    `ended` is set with the final update, when the row is gone, and when the process stops.
    """

    def __init__(self, hub: Hub, waiter: Waiter, cursor: Cursor | None, *, partial: bool) -> None:
        self.ended = False
        self.finished = False  # ended, and all was told
        self._hub = hub
        self._waiter = waiter
        self._watch = waiter.watch
        self._cursor = cursor
        self._partial = partial
        self._ready = False
        self._shown: object = None  # what the last update said of beat and queue
        self._text_read: str | None = None  # the text that the last part was taken from

    async def next(self, seconds: float) -> Update | None:
        """The next update, as soon as there is one. None when there was none in time, or it ended."""
        try:
            async with asyncio.timeout(seconds):
                while not self.ended:
                    self._waiter.wake.clear()
                    if update := await self._look():
                        self._cursor = update.cursor
                        self.finished = self.ended = update.cursor.final
                        return update
                    if self._hub.draining or self._watch.gone:
                        self.ended = True
                    else:
                        await self._waiter.wake.wait()
        except TimeoutError:
            pass
        return None

    def close(self) -> None:
        """Ends a `next` that waits."""
        self.ended = True
        self._waiter.wake.set()

    async def _look(self) -> Update | None:
        await self._prepare()
        story, last = self._watch.story, self._cursor
        if story is None:
            return None
        if last is None or last.stage > story.stage:
            return await self._end(story, None) if story.final else self._now(story, None)
        if last.stage < story.stage:
            following = last.stage + 1
            if following <= story.last_stage and following < story.stage:
                return self._retold(story.at(following), last)
            return await self._end(story, last) if story.final else self._now(story, last)
        if story.final:
            self.finished = self.ended = True  # all was told before
            return None
        return self._now(story, last)

    async def _prepare(self) -> None:
        """The first update says all that can be known, and so does the first of a task that waits."""
        here = self._watch.story.stage if self._watch.story else None
        moved = self._cursor is None or self._cursor.stage != here
        if not self._ready or (moved and self._watch.waits and self._watch.place is None):
            told = 0 if self._cursor is None or moved else self._cursor.seq
            await self._hub.freshen(self._watch, beat=told)
            self._ready = True

    def _retold(self, story: Story, last: Cursor) -> Update:
        """A move that lies behind. It is known by the attempts, not by a row: it has no change number."""
        self._shown = None
        cursor = Cursor(story.stage, 0, 0, last.offset, last.crc)
        return Update(cursor, story.row, story.attempt)

    def _now(self, story: Story, last: Cursor | None) -> Update | None:
        """Where the task stands, if that is news."""
        same = last is not None and last.stage == story.stage
        before = last if last is not None and same else Cursor(story.stage)
        beat = story.beat(self._watch.beat)
        if beat is not None and same and beat.seq < before.seq:
            beat = None  # the watcher has seen a later one elsewhere
        place = self._watch.place if self._watch.waits else None
        seq = beat.seq if beat else place.seq if place else 0
        looks = (shown(beat), (place.info.position, place.info.reason) if place else None)
        text = self._text(beat, last, anew=not (same and before.seq > 0))
        moved = not same or story.row.change_seq > before.change
        if not (moved or text.part or text.restarted or (seq > before.seq and looks != self._shown)):
            return None
        self._shown = looks
        cursor = Cursor(story.stage, story.row.change_seq, max(seq, before.seq), text.offset, text.crc)
        return Update(
            cursor, story.row, story.attempt, beat, place.info if place else None, text.restarted, text.part
        )

    async def _end(self, story: Story, last: Cursor | None) -> Update | None:
        """The final update, after all text that is still to come."""
        text = _Text(None, False, 0, 0)
        if self._partial:
            try:
                whole = await self._hub.final_text(self._watch)
            except StoreError as error:
                log.debug("a result is read again", extra={"error": str(error)})
                await asyncio.sleep(_AGAIN)
                self._waiter.wake.set()
                return None
            if whole is None and self._watch.beat is not None and self._watch.beat.text:
                whole = clean(self._watch.beat.text)  # it keeps none: what was seen last is all there is
            text = self._unseen(whole, last, whole=True)
            if text.rest:
                stage = story.last_stage
                back = story.at(stage)
                cursor = Cursor(stage, story.row.change_seq, last.seq if last else 0, text.offset, text.crc)
                return Update(cursor, back.row, back.attempt, None, None, text.restarted, text.part)
        return Update(FINAL_CURSOR, story.row, story.attempt, None, None, text.restarted, text.part)

    def _text(self, beat: Beat | None, last: Cursor | None, *, anew: bool) -> _Text:
        """The beat's text that was not sent. `anew`: this is the attempt's first beat that is told."""
        offset, crc = (last.offset, last.crc) if last else (0, 0)
        if beat is None:
            return _Text(None, False, offset, crc)
        over = beat.restarted and anew and last is not None
        if not self._partial or beat.text is None:
            return _Text(None, over, offset, crc)
        whole = beat.restarted or (beat.attempt > 1 and not beat.resumed_from_tokens)
        text = self._unseen(clean(beat.text), None if over else last, whole=whole)
        return text._replace(restarted=text.restarted or over)

    def _unseen(self, text: str | None, last: Cursor | None, *, whole: bool) -> _Text:
        """What follows the place of `last` in a text; all of it, marked as restarted, when that place is in
        another text. A text shorter than that place is waited for, unless it is `whole`."""
        offset, crc = (last.offset, last.crc) if last else (0, 0)
        if text is None:
            return _Text(None, False, offset, crc)
        restarted = False
        if len(text) < offset:
            if not whole:
                return _Text(None, False, offset, crc)
            restarted = True
        elif offset and text is not self._text_read and text_crc(text[:offset]) != crc:
            restarted = True
        if restarted:
            offset, crc = 0, 0
        self._text_read = text  # from here on the place is known to be in this very text
        new = text[offset : offset + MAX_PART]
        part = Part(offset, new) if new or restarted else None
        end = offset + len(new)
        return _Text(part, restarted, end, text_crc(new, crc), len(text) - end)
