"""The changes of many tasks: one query a tick for every stream of this process.

    feeds = Feeds(store.news, hub)
    with feeds.join(principal) as member: ...         used by perdure.live.follower

The last answers are kept for a while. A stream that keeps pace takes its rows from them; one that joins, or
has fallen behind, reads on by itself from where it stands. A slow reader costs no memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, Protocol

from perdure.live.hub import TICK, Hub
from perdure.store.errors import StoreError
from perdure.store.news import News, NewsRow, Snapshot
from perdure.store.rows import Principal

log = logging.getLogger(__name__)

MAX_ROWS: Final = 10_000  # kept of the last answers
_PAGE: Final = 1_000
_PAUSE: Final = 1.0  # after a look that failed


class NewsSource(Protocol):
    """Where changes come from (`NewsRepository`)."""

    async def since(
        self,
        principals: Sequence[Principal],
        told: Snapshot | None,
        *,
        upto: Snapshot | None = None,
        after: int = 0,
        limit: int = 500,
    ) -> News: ...


class Batch(NamedTuple):
    """One answer: what changed up to `now`."""

    now: Snapshot
    rows: list[NewsRow]


class Member:
    """One stream. `at` is the number of the next batch it takes; `wake` is set when there is one."""

    __slots__ = ("at", "principal", "wake")

    def __init__(self, principal: Principal) -> None:
        self.principal = principal
        self.wake = asyncio.Event()
        self.at = 0

    def sees(self, entry: NewsRow) -> bool:
        return self.principal.admin or entry.row.user_id == self.principal.user_id


class Feeds:
    """Looks at what changed while a stream is open."""

    def __init__(self, news: NewsSource, hub: Hub, *, tick: float = TICK) -> None:
        self.news = news
        self.hub = hub
        self._tick = tick
        self._members: set[Member] = set()
        self._told: Snapshot | None = None  # None while nobody listens
        self._batches: deque[Batch] = deque()
        self._first = 0  # number of the first batch that is kept
        self._kept = 0  # rows in them
        self._looking = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None

    @contextmanager
    def join(self, principal: Principal) -> Iterator[Member]:
        """Listens for the length of the block. `settle` comes before the member's first own read."""
        member = Member(principal)
        self._members.add(member)
        forget = self.hub.on_drain(member.wake.set)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            yield member
        finally:
            forget()
            self._members.discard(member)
            if not self._members and self._runner is not None:
                self._runner.cancel()
                self._runner = None
                self._told = None
                self._first += len(self._batches)
                self._batches.clear()
                self._kept = 0

    async def settle(self, member: Member) -> None:
        """From here on the batches hold all that changes for this member: what it reads after this is no
        older than the first of them. Raises StoreError."""
        async with self._looking:
            if self._told is None:
                self._told = (await self.news.since([], None)).now
            member.at = self._first + len(self._batches)

    def next_batch(self, member: Member) -> Batch | None:
        """The member's next batch; None when there is none yet. Raises LookupError when it fell behind."""
        index = member.at - self._first
        if index < 0:
            raise LookupError
        if index >= len(self._batches):
            return None
        member.at += 1
        return self._batches[index]

    async def _run(self) -> None:
        failing = False
        while True:
            pause = self._tick
            try:
                await self._look()
                failing = False
            except StoreError as error:
                pause = _PAUSE
                if not failing:
                    log.warning("streams wait: changes cannot be read", extra={"error": str(error)})
                failing = True
            except Exception:
                pause = _PAUSE
                log.exception("streams wait: a look at the changes failed")
            await asyncio.sleep(pause)

    async def _look(self) -> None:
        async with self._looking:
            if self._told is None:
                return  # nobody has read yet
            askers = {member.principal.user_id: member.principal for member in self._members}
            admins = [member.principal for member in self._members if member.principal.admin]
            who = admins[:1] or list(askers.values())
            news = await self.news.since(who, self._told, limit=_PAGE)
            now, rows = news.now, news.rows
            while news.more:
                news = await self.news.since(
                    who, self._told, upto=now, after=rows[-1].row.change_seq, limit=_PAGE
                )
                rows += news.rows
            self._told = now
            if rows:
                self._keep(Batch(now, rows))

    def _keep(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._kept += len(batch.rows)
        while self._kept > MAX_ROWS and len(self._batches) > 1:
            self._kept -= len(self._batches.popleft().rows)
            self._first += 1
        users = {entry.row.user_id for entry in batch.rows}
        for member in self._members:
            if member.principal.admin or member.principal.user_id in users:
                member.wake.set()

    async def aclose(self) -> None:
        """Stops looking."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None
