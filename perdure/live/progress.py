"""The last beat of running tasks: one `describe` serves all who look, within a budget.

    live = LiveProgress(gate)                    gate.describe_beat(task_id) -> Beat | None
    await live.beat(task_id, attempt=2)          at most `interval` seconds old while the budget lasts
    live.last_seen(task_id, attempt=2)           what was seen last; asks nobody
    live.want(task_id)                           asks, and does not wait: the next look finds it
    live.follow(task_id, on_beat) / unfollow     keeps asking while somebody watches

A beat never goes back: an answer older than what was seen is dropped. When Temporal does not answer, readers
get what was seen before and no error. All times are seconds of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from perdure.contracts import Beat

log = logging.getLogger(__name__)

BUDGET: Final = 100.0  # describe calls a second and process
MIN_INTERVAL: Final = 1.0
MAX_INTERVAL: Final = 10.0
AT_ONCE: Final = 32  # calls under way: a server that hangs holds no more of them
PATIENCE: Final = 0.5  # seconds that a reader waits for an answer before it takes the last one
PAUSE: Final = 5.0  # seconds without reader-driven calls after one that did not answer in time
_MISS: Final = 0.15  # seconds to the next look after one that found nothing new
_MISSES: Final = 7  # so often; then a task that is silent is looked at ever more rarely

OnBeat = Callable[[str, Beat], None]


class BeatSource(Protocol):
    """Where beats come from: the Temporal gate."""

    async def describe_beat(self, task_id: str) -> Beat | None: ...


@dataclass(slots=True)
class _Seen:
    """What is known of one task. `size` counts the text it holds."""

    beat: Beat | None = None
    asked_at: float = float("-inf")
    size: int = 0


@dataclass(slots=True)
class _Follow:
    on_beat: OnBeat
    misses: int = 0  # looks in a row that found nothing new
    fresh: bool = False  # the last beat was found right after a look that found none
    turn: int = 0  # the heap entry that counts; older ones are ignored


class LiveProgress:
    """Beats of running tasks, cached and budgeted. One per process; `aclose` ends its calls."""

    def __init__(
        self,
        source: BeatSource,
        *,
        budget: float = BUDGET,
        max_entries: int = 20_000,
        max_bytes: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._budget = budget
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._bytes = 0
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._tokens = budget
        self._tokens_at = clock()
        self._wanted: set[str] = set()  # asked for in this window of MAX_INTERVAL, and in the one before
        self._wanted_before: set[str] = set()
        self._window_at = clock()
        self._slow_until = float("-inf")
        self._follows: dict[str, _Follow] = {}
        self._due: list[tuple[float, int, str]] = []
        self._turns = 0
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    # Reading -------------------------------------------------------------------------------------

    async def beat(
        self, task_id: str, *, attempt: int | None = None, want_fresh: bool = True, at_least: int = 0
    ) -> Beat | None:
        """The task's beat, asked for when the last answer is older than `interval` and the budget allows.

        `attempt` is the row's current one: a beat of another attempt is none. `at_least`: somebody has seen
        this attempt's beat of that number already, so an older one is not fresh. Waits half a second at most.
        """
        if want_fresh and self._may_ask(task_id, attempt, at_least):
            flight = self._launch(task_id)
            done, _ = await asyncio.wait({flight}, timeout=PATIENCE)
            if not done:
                self._slow_until = self._clock() + PAUSE
        return self.last_seen(task_id, attempt)

    def last_seen(self, task_id: str, attempt: int | None = None) -> Beat | None:
        """The last beat seen of this attempt (of any, when None). None when there was none."""
        seen = self._seen.get(task_id)
        if seen is None or seen.beat is None:
            return None
        return seen.beat if attempt is None or seen.beat.attempt == attempt else None

    def want(self, task_id: str) -> None:
        """Has the task asked about in the background, as `beat` would: for lists, which wait for nobody."""
        if self._may_ask(task_id, None, 0):
            self._launch(task_id)

    @property
    def interval(self) -> float:
        """Seconds between two looks at one task: 1 to 10, even over all tasks that are looked at."""
        wanted = max(len(self._wanted), len(self._wanted_before), len(self._follows))
        return min(MAX_INTERVAL, max(MIN_INTERVAL, wanted / self._budget))

    def _may_ask(self, task_id: str, attempt: int | None, at_least: int) -> bool:
        now = self._clock()
        self._want(task_id, now)
        seen, last = self._seen.get(task_id), self.last_seen(task_id, attempt)
        behind = at_least > 0 and (last is None or last.seq < at_least)
        if seen is not None and now - seen.asked_at < self.interval and not behind:
            return False
        if task_id in self._flights:
            return True
        return now >= self._slow_until and len(self._flights) < AT_ONCE and self._spend(now)

    def _want(self, task_id: str, now: float) -> None:
        if now - self._window_at >= MAX_INTERVAL:
            stale = now - self._window_at >= 2 * MAX_INTERVAL
            self._wanted_before = set() if stale else self._wanted
            self._wanted = set()
            self._window_at = now
        self._wanted.add(task_id)

    def _spend(self, now: float) -> bool:
        """Takes one call from the budget. False when it is used up."""
        self._tokens = min(self._budget, self._tokens + (now - self._tokens_at) * self._budget)
        self._tokens_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    # Asking --------------------------------------------------------------------------------------

    def _launch(self, task_id: str) -> asyncio.Task[None]:
        """Starts the call, or joins the one under way: a reader that leaves does not end it for others."""
        flight = self._flights.get(task_id)
        if flight is None:
            flight = asyncio.create_task(self._ask(task_id))
            self._flights[task_id] = flight
        return flight

    async def _ask(self, task_id: str) -> None:
        beat: Beat | None = None
        try:
            beat = await self._source.describe_beat(task_id)
        except Exception:
            log.debug("no live progress", extra={"task_id": task_id}, exc_info=True)
        finally:
            self._flights.pop(task_id, None)
        news = self._take(task_id, beat)
        follow = self._follows.get(task_id)
        if follow is not None:
            if news is not None:
                follow.fresh, follow.misses = follow.misses > 0, 0
            else:
                follow.misses += 1
            self._schedule(task_id, follow, self._delay(follow))
            if news is not None:
                follow.on_beat(task_id, news)

    def _take(self, task_id: str, beat: Beat | None) -> Beat | None:
        """Keeps an answer. Returns it when it is newer than what was seen."""
        seen = self._seen.pop(task_id, None) or _Seen()
        self._seen[task_id] = seen  # the newest end
        seen.asked_at = self._clock()
        old = seen.beat
        if beat is None or (old is not None and (beat.attempt, beat.seq) <= (old.attempt, old.seq)):
            beat = None
        else:
            seen.beat = beat = beat.model_copy(update={"state": None})  # nobody reads an executor's own state
            self._bytes -= seen.size
            seen.size = len(beat.text or "") + len(beat.reasoning)
            self._bytes += seen.size
        while len(self._seen) > self._max_entries or (self._bytes > self._max_bytes and len(self._seen) > 1):
            self._bytes -= self._seen.popitem(last=False)[1].size
        return beat

    # Following -----------------------------------------------------------------------------------

    def follow(self, task_id: str, on_beat: OnBeat) -> None:
        """Looks at the task again and again; `on_beat` is called with each newer beat."""
        if task_id in self._follows:
            return
        follow = self._follows[task_id] = _Follow(on_beat)
        self._schedule(task_id, follow, 0.0)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())

    def unfollow(self, task_id: str) -> None:
        self._follows.pop(task_id, None)

    def _schedule(self, task_id: str, follow: _Follow, delay: float) -> None:
        self._turns += 1
        follow.turn = self._turns
        heapq.heappush(self._due, (self._clock() + delay, follow.turn, task_id))
        if self._due[0][1] == follow.turn:
            self._wake.set()

    def _delay(self, follow: _Follow) -> float:
        """Seconds to the next look. With room in the budget the looks fall into step with the worker's beats:
        a little before the next is due, then again and again, so that a beat is seen while it is fresh."""
        interval = self.interval
        if len(self._follows) > self._budget / 3 or interval > MIN_INTERVAL:
            return interval
        if follow.misses == 0:
            return 0.85 * interval if follow.fresh else 0.5 * interval
        return float(min(interval, _MISS * 2 ** max(0, min(follow.misses - _MISSES, 5))))

    async def _run(self) -> None:
        """Makes the calls that are due, oldest first, as the budget allows."""
        while True:
            self._wake.clear()
            wait = self._launch_due()
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _launch_due(self) -> float | None:
        """Starts what is due. Returns the seconds to wait, None while nothing is followed."""
        while self._due:
            due, turn, task_id = self._due[0]
            follow = self._follows.get(task_id)
            if follow is None or follow.turn != turn:
                heapq.heappop(self._due)
                continue
            now = self._clock()
            if due > now:
                return due - now
            if task_id not in self._flights and (len(self._flights) >= AT_ONCE or not self._spend(now)):
                return 1 / self._budget
            heapq.heappop(self._due)
            self._launch(task_id)
        return None

    async def aclose(self) -> None:
        """Ends every call under way."""
        tasks = [*self._flights.values(), *([self._runner] if self._runner else [])]
        self._runner = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
