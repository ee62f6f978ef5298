"""The hub: one per API process. One query a tick for all that is watched, however many watch.

    hub = Hub(store.tasks, gate)
    row = await hub.wait_final(task_id, 30)              the final row; None when time is up
    row = await hub.wait_change(task_id, version, 30)    the row once its version is another
    hub.poke(task_id)                                    look now: this process has just changed the row
    hub.live.last_seen(task_id, attempt=2)               the last beat (perdure.live.progress)
    hub.drain()                                          every wait and stream ends: the process stops
    await hub.aclose()

A watcher holds no database connection and no queue: it keeps a place in the story and is woken when there may
be more. So a slow one costs what an idle one costs. It all runs in one event loop; nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from perdure.contracts import Beat
from perdure.live.places import WAIT_STEP, Places
from perdure.live.progress import BeatSource, LiveProgress
from perdure.live.queue import Queues
from perdure.live.story import Story
from perdure.live.watch import Waiter, Watch
from perdure.store.errors import StoreError
from perdure.store.rows import Changes, Include, TaskRow
from perdure.task.states import Status

log = logging.getLogger(__name__)

TICK: Final = 0.3  # seconds between two looks
YOUNG_TICK: Final = 0.1  # for what began to be watched less than YOUNG seconds ago: most tasks move then
YOUNG: Final = 2.0
_GAP: Final = 0.03  # seconds between two looks at the least: a burst of pokes is one look
_PAUSE: Final = 1.0  # after a look that failed
_CHUNK: Final = 5_000  # tasks in one query


class RowSource(Protocol):
    """Where rows come from: the task repository."""

    async def changes(self, known: Mapping[str, int]) -> Changes:
        """The rows among `known` (task id -> change_seq) that have another change_seq now, with attempts."""
        ...

    async def by_id_any(self, task_id: str, include: Sequence[Include] = ()) -> TaskRow | None: ...


class Hub:
    """Watches rows and beats for everybody in this process."""

    def __init__(
        self,
        rows: RowSource,
        beats: BeatSource,
        *,
        queues: Queues | None = None,
        live: LiveProgress | None = None,
        tick: float = TICK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = rows
        self.queues = queues
        self._places = Places(queues, clock) if queues else None
        self._tick = tick
        self._clock = clock
        self.live = live or LiveProgress(beats, clock=clock)
        self.draining = False
        self._watches: dict[str, Watch] = {}
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._failing = False
        self._on_drain: dict[Callable[[], None], None] = {}

    # Waiting -------------------------------------------------------------------------------------

    async def wait_final(self, task_id: str, seconds: float) -> TaskRow | None:
        """The task's final row (without params and result). None when it is not final in time, is unknown, or
        the process stops."""
        return await self._wait(task_id, seconds, lambda watch: watch.settled)

    async def wait_change(
        self,
        task_id: str,
        version: int,
        seconds: float,
        *,
        change_seq: int | None = None,
        beat: tuple[int, int] | None = None,
    ) -> TaskRow | None:
        """The task's row once its version is not `version`, its change number not `change_seq`, or a newer
        beat than `beat` (attempt, seq) was seen; the last two where given. None as in `wait_final`."""

        def news(watch: Watch) -> bool:
            if watch.story is None:
                return watch.gone
            seen, row = watch.story.beat(watch.beat), watch.story.row
            fresh = beat is not None and seen is not None and (seen.attempt, seen.seq) > beat
            return fresh or row.version != version or row.change_seq != (change_seq or row.change_seq)

        return await self._wait(task_id, seconds, news, beats=beat is not None)

    async def _wait(
        self, task_id: str, seconds: float, ready: Callable[[Watch], bool], *, beats: bool = False
    ) -> TaskRow | None:
        with self.watch(task_id, beats=beats) as waiter:
            try:
                async with asyncio.timeout(seconds):
                    while not self.draining:
                        waiter.wake.clear()
                        watch = waiter.watch
                        if ready(watch):
                            return watch.story.row if watch.story and not watch.gone else None
                        await waiter.wake.wait()
            except TimeoutError:
                pass
        return None

    @contextmanager
    def watch(
        self,
        task_id: str,
        *,
        row: TaskRow | None = None,
        beats: bool = False,
        text: bool = False,
        wake: asyncio.Event | None = None,
    ) -> Iterator[Waiter]:
        """Watches a task for the length of the block. `row` is a fresh read, with attempts, where the caller
        has one. `beats`: live progress too; `text`: with its text. `wake` where one waits for many tasks."""
        watch = self._watches.get(task_id)
        if watch is None:
            watch = self._watches[task_id] = Watch(task_id, self._clock() + YOUNG)
        waiter = Waiter(watch, beats or text, text, wake or asyncio.Event())
        watch.waiters.add(waiter)
        if row is not None and row.attempts_json is not None:
            self._take(watch, row)
        if text and (seen := self.live.last_seen(task_id)):
            watch.beat = seen  # the one kept for watchers may be without its text
        self._tend(watch)
        self.poke(task_id)
        try:
            yield waiter
        finally:
            watch.waiters.discard(waiter)
            if not watch.waiters:
                del self._watches[task_id]
                if watch.ending:
                    watch.ending.cancel()
            self._tend(watch)

    def poke(self, task_id: str) -> None:
        """Looks at the task now, if it is watched here."""
        watch = self._watches.get(task_id)
        if watch is None or watch.settled:
            return
        watch.young_until = max(watch.young_until, self._clock() + self._tick)
        self._wake.set()
        if self._runner is None and not self.draining:
            self._runner = asyncio.create_task(self._run())

    async def final_text(self, watch: Watch) -> str | None:
        """The text of a final task's result: one read for all who watch. None when it has no text.

        Raises StoreError.
        """
        if watch.ending is None:
            watch.ending = asyncio.create_task(self._read_text(watch.task_id))
        ending = watch.ending
        try:
            return await asyncio.shield(ending)
        except StoreError:
            if watch.ending is ending:
                watch.ending = None  # the next reader asks again
            raise

    async def _read_text(self, task_id: str) -> str | None:
        row = await self._rows.by_id_any(task_id, ("result",))
        result = row.result if row else None
        text = result.get("text") if isinstance(result, dict) else None
        return text if isinstance(text, str) else None

    async def freshen(self, watch: Watch, *, beat: int = 0) -> None:
        """Has at hand what is known beside the row: a running task's beat, a waiting one's place. `beat`: the
        number of one that was seen elsewhere already."""
        story = watch.story
        if story is None or story.final:
            return
        if story.row.status is Status.PROCESSING:
            found = await self.live.beat(watch.task_id, attempt=story.attempt, at_least=beat)
            if found is not None and (watch.beat is None or watch.beat.attempt < found.attempt):
                watch.beat = found
        elif self._places and (watch.place is None or self._clock() - watch.placed_at >= WAIT_STEP):
            await self._places.read(watch)

    # Looking -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Looks at rows while something is watched that may change; sleeps otherwise."""
        last_full = float("-inf")
        while True:
            started = self._clock()
            full = started - last_full >= self._tick
            last_full = started if full else last_full
            pause = _GAP
            try:
                await self._look(full)
                self._failing = False
                if self._places:
                    self._places.start(self._watches.values())
            except StoreError as error:
                pause = _PAUSE
                if not self._failing:
                    log.warning("watchers wait: rows cannot be read", extra={"error": str(error)})
                self._failing = True
            except Exception:
                pause = _PAUSE
                log.exception("watchers wait: a look at the rows failed")
            await asyncio.sleep(pause)
            await self._rest(started)

    async def _rest(self, started: float) -> None:
        """Sleeps until the next look is due, or something begins to be watched."""
        now = self._clock()
        active = [watch for watch in self._watches.values() if not watch.settled]
        young = any(watch.young_until > now for watch in active)
        wait = started + (min(YOUNG_TICK, self._tick) if young else self._tick) - now if active else None
        try:
            async with asyncio.timeout(wait):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _look(self, full: bool) -> None:
        now = self._clock()
        known = {
            task_id: watch.known
            for task_id, watch in self._watches.items()
            if not watch.settled and (full or watch.young_until > now)
        }
        ids = list(known)
        for start in range(0, len(ids), _CHUNK):
            part = {task_id: known[task_id] for task_id in ids[start : start + _CHUNK]}
            changes = await self._rows.changes(part)
            for row in changes.rows:
                if watch := self._watches.get(row.task_id):
                    self._take(watch, row)
            for task_id in changes.gone:
                if watch := self._watches.get(task_id):
                    watch.gone = True
                    watch.wake()

    def _take(self, watch: Watch, row: TaskRow) -> None:
        """Keeps a row that is newer than the one known, and wakes who waits."""
        if watch.story is not None and row.change_seq <= watch.known:
            return
        stage = watch.story.stage if watch.story else None
        watch.story = Story.of(row)
        if stage != watch.story.stage:
            watch.place, watch.placed_at = None, float("-inf")
        self._tend(watch)
        watch.wake()

    def _tend(self, watch: Watch) -> None:
        """Follows the beats of a running task while somebody wants them."""
        running = watch.story is not None and watch.story.row.status is Status.PROCESSING
        if running and watch.wants_beats:
            if watch.beat is None:
                watch.beat = self.live.last_seen(watch.task_id)
            self.live.follow(watch.task_id, self._on_beat)
        else:
            self.live.unfollow(watch.task_id)

    def _on_beat(self, task_id: str, beat: Beat) -> None:
        watch = self._watches.get(task_id)
        if watch is None:
            return
        if not any(waiter.text for waiter in watch.waiters):
            beat = beat.model_copy(update={"text": None, "reasoning": ""})  # two thousand texts are memory
        watch.beat = beat
        watch.wake(beat=True)

    # Ending --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ends every wait and stream: they answer with what they have."""
        self.draining = True
        for watch in self._watches.values():
            watch.wake()
        for callback in list(self._on_drain):
            callback()

    def on_drain(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Arranges that `callback` is called when the process stops (now, if it does already). Returns the
        undoing."""
        self._on_drain[callback] = None
        if self.draining:
            callback()
        return lambda: self._on_drain.pop(callback, None)

    async def aclose(self) -> None:
        """Stops looking. Waits that are still open end."""
        self.drain()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None
        if self._places:
            await self._places.aclose()
        await self.live.aclose()
