"""PENDING rows: who starts next, under which lease, and what becomes of those that cannot start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from perdure.store import dispatch_sql as q
from perdure.store.base import INDEX_ORDER, Repository, Rows, Unit, sql
from perdure.store.columns import WIDTH, task_row
from perdure.store.finish import Ending, finish
from perdure.store.rows import DispatchRow, Expired, Lane, Pause, Queued
from perdure.task.errors import ErrorCode
from perdure.task.states import Priority, Status

START_FAILURES = 3  # refused starts after which a row is FAILED

_PAUSE = sql(
    "INSERT INTO pauses (kind, name, reason, paused_by) VALUES (:kind, :name, :reason, :paused_by) "
    "ON CONFLICT (kind, name) DO UPDATE SET reason = EXCLUDED.reason, paused_by = EXCLUDED.paused_by"
)
_RESUME = sql("DELETE FROM pauses WHERE kind = :kind AND name = :name RETURNING 1")
_PAUSES = sql("SELECT kind, name, reason, paused_by, paused_at FROM pauses ORDER BY kind, name")


class DispatchRepository(Repository):
    """The dispatcher's view. Safe for any number of dispatchers at once. All clocks are the database's."""

    async def lanes(self, held: Collection[str] = ()) -> list[Lane]:
        """Pools and lanes that have rows to claim now, best lane of each pool first.

        First wakes rows whose `not_before`, lease or back-off has passed. Rows of a paused pool or model, and
        of a model in `held`, do not count.
        """

        async def work(unit: Unit) -> list[Lane]:
            await unit.run(INDEX_ORDER)
            await unit.run(q.WAKE)
            return [Lane(*row) for row in await unit.run(q.LANES, held=list(held))]

        return await self._unit(work)

    async def users(self, pool: str, lane: int) -> list[str]:
        """Users with a row of that lane that waits, claimable or in the window; in no order."""
        return [row[0] for row in await self._one(q.USERS, pool=pool, lane=lane)]

    async def claim(
        self,
        pool: str,
        lane: int,
        limit: int,
        lease_seconds: float,
        owner: str,
        max_running: Mapping[str, int] | None = None,
        default_max_running: int | None = None,
        held: Collection[str] = (),
        last_turn: int | None = None,
    ) -> list[DispatchRow]:
        """Leases up to `limit` rows: the user with the fewest rows in the window first, then age.

        `max_running` (per user, else the default) bounds a user's claimed, queued and running tasks together,
        exactly: then claims take turns. Rows of a model in `held` stay. `last_turn`: no
        user gets more than so many rows into the window by this claim.
        """
        limits = max_running or {}
        limited = bool(limits) or default_max_running is not None
        values: dict[str, Any] = {
            "pool": pool,
            "lane": lane,
            "limit": limit,
            "lease": float(lease_seconds),
            "owner": owner,
            "limited": limited,
            "default_most": default_max_running,
            "limit_users": list(limits),
            "limit_counts": list(limits.values()),
            "held": list(held),
            "last_turn": last_turn,
        }

        async def work(unit: Unit) -> Rows:
            await unit.run(INDEX_ORDER)
            if limited:
                await unit.run(q.SERIALIZE)
            return await unit.run(q.CLAIM, **values)

        rows = await self._unit(work)
        by_turn = sorted(rows, key=lambda row: (row[WIDTH + 1], row[0]))
        return [DispatchRow(task_row(row), row[WIDTH]) for row in by_turn]

    async def queued(
        self, started: Sequence[tuple[str, datetime]], priorities: Mapping[str, Priority] | None = None
    ) -> list[Queued]:
        """Transition 1 for a batch in one statement; rows that moved on by themselves are left as they are.

        `priorities` are the classes that they were started with. Returns only those that want a signal: to
        cancel, or to move to the class that they were given meanwhile.
        """
        if not started:
            return []
        ids, ats = zip(*started, strict=True)
        classes = [(priorities or {}).get(task_id) for task_id in ids]
        rows = await self._one(q.QUEUED, ids=list(ids), ats=list(ats), priorities=classes)
        return [Queued(row[0], row[1], row[2], Priority(row[3]) if row[3] else None) for row in rows]

    async def release(self, task_ids: Collection[str], retry_after: float = 0.0) -> None:
        """Ends the lease of rows that were surely not started. Claimable again in `retry_after` seconds."""
        await self._one(q.RELEASE, ids=list(task_ids), seconds=float(retry_after))

    async def refuse(self, task_id: str, message: str) -> int:
        """Counts a start that Temporal refused as invalid. Returns the count; 0 when the row is not PENDING.

        The row backs off for 5, then 10 s; the third time it is FAILED `internal`, with its callback.
        """

        async def work(unit: Unit) -> int:
            rows = await unit.run(q.REFUSE, id=task_id)
            if not rows:
                return 0
            task = task_row(rows[0])
            if task.start_failures >= START_FAILURES:
                ending = Ending(task, Status.FAILED, ErrorCode.INTERNAL.value, message)
                await finish(unit, [ending], rows[0][WIDTH])
            return task.start_failures

        return await self._unit(work)

    async def expire(self, limit: int = 200) -> list[Expired]:
        """Fails PENDING rows past their queue or total deadline, with their callbacks: those never claimed at
        once, the others 10 s later, since their workflow may be about to say so itself."""

        async def work(unit: Unit) -> list[Expired]:
            rows = await unit.run(q.EXPIRED, limit=limit)
            endings = [
                Ending(task_row(row), Status.FAILED, *_why(total=bool(row[WIDTH + 1]))) for row in rows
            ]
            ended = await finish(unit, endings, rows[0][WIDTH]) if rows else []
            return [Expired(end.task, end.delivery_id) for end in ended]

        return await self._unit(work)

    async def age(self, pool: str, max_wait: float, limit: int = 1000) -> int:
        """Moves PENDING rows that waited `max_wait` seconds in their lane one class up (5 → 4 → 2, 3 → 2).

        Returns how many; call again while that is `limit`.
        """

        async def work(unit: Unit) -> int:
            await unit.run(INDEX_ORDER)
            return len(await unit.run(q.AGE, pool=pool, wait=float(max_wait), limit=limit))

        return await self._unit(work)

    async def next_due(self) -> datetime | None:
        """When the next row becomes claimable or passes a deadline; None when nothing is planned."""
        due: datetime | None = (await self._one(q.NEXT_DUE))[0][0]
        return due

    async def pause(
        self, kind: Literal["pool", "model"], name: str, paused_by: str, reason: str | None = None
    ) -> None:
        """Pauses a pool or a model: what waits stays PENDING. Repeating it changes the reason."""
        await self._one(_PAUSE, kind=kind, name=name, paused_by=paused_by, reason=reason)

    async def resume(self, kind: Literal["pool", "model"], name: str) -> bool:
        """Ends a pause. False when there was none."""
        return bool(await self._one(_RESUME, kind=kind, name=name))

    async def pauses(self) -> list[Pause]:
        """All pauses."""
        return [Pause(*row) for row in await self._one(_PAUSES)]


def _why(*, total: bool) -> tuple[str, str]:
    if total:
        return ErrorCode.DEADLINE_EXCEEDED.value, "the task's deadline passed before an attempt could start"
    return ErrorCode.QUEUE_EXPIRED.value, "the task waited longer than its queue_timeout_seconds for a slot"
