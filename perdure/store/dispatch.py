"""PENDING rows: who starts next, under which lease, and what becomes of those that cannot start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from perdure.store.rows import DispatchRow, Expired, Lane, Pause, Queued


class DispatchRepository:
    """The dispatcher's view. Safe for any number of dispatchers at once. All clocks are the database's."""

    async def lanes(self) -> list[Lane]:
        """Pools and classes that have rows to claim now. First wakes rows whose `not_before`, lease or
        back-off has passed. Rows of a paused pool or model do not count."""
        raise NotImplementedError

    async def claim(
        self,
        pool: str,
        lane: int,
        limit: int,
        lease_seconds: float,
        owner: str,
        max_running: Mapping[str, int] | None = None,
        default_max_running: int | None = None,
    ) -> list[DispatchRow]:
        """Leases up to `limit` rows: the user with the fewest rows in the window first, then age.

        `max_running` (per user, else the default) bounds a user's claimed, queued and running tasks together.
        """
        raise NotImplementedError

    async def queued(self, started: Sequence[tuple[str, datetime]]) -> list[Queued]:
        """Transition 1 for a batch in one statement; rows that moved on by themselves are left as they are.
        Returns only those that want a cancel signal."""
        raise NotImplementedError

    async def release(self, task_ids: Collection[str], retry_after: float = 0.0) -> None:
        """Ends the lease of rows that were not started; they can be claimed again after `retry_after` s."""
        raise NotImplementedError

    async def refuse(self, task_id: str, message: str) -> int:
        """Counts a start that Temporal refused as invalid: back-off, and after the third FAILED `internal` with
        its callback. Returns the count."""
        raise NotImplementedError

    async def expire(self, limit: int = 200) -> list[Expired]:
        """Fails PENDING rows past their queue or total deadline, with their callbacks: those never claimed at
        once, the others 10 s later."""
        raise NotImplementedError

    async def age(self, pool: str, max_wait: float, limit: int = 1000) -> int:
        """Moves PENDING rows that waited `max_wait` in their lane one class up (5 → 3 → 1)."""
        raise NotImplementedError

    async def next_due(self) -> datetime | None:
        """When the next row becomes claimable or passes a deadline; None when nothing is planned."""
        raise NotImplementedError

    async def pause(self, kind: str, name: str, paused_by: str, reason: str | None = None) -> None:
        """Pauses a "pool" or "model": what waits stays PENDING. Repeating it changes the reason."""
        raise NotImplementedError

    async def resume(self, kind: str, name: str) -> bool:
        """Ends a pause. False when there was none."""
        raise NotImplementedError

    async def pauses(self) -> list[Pause]:
        """All pauses."""
        raise NotImplementedError
