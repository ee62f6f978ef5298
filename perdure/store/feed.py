"""What changed: for live streams, by polling. No notification carries data, none can be lost.

Two numbers order changes. `change_seq` (a sequence) is small, lives as long as the data and names an event
to the outside. But a transaction may commit after one with a higher number, so "all above the highest seen"
would miss rows. `change_xid` (the writing transaction) mends that: a snapshot knows below which transaction
nothing can appear any more (its xmin), and a feed goes on from there. It may see a row twice, never not at
all; a reader drops what has the `change_seq` that it knows.
"""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from perdure.store.base import Repository, sql
from perdure.store.columns import HOT, WIDTH, task_row
from perdure.store.rows import Changes, Feed, FeedCursor, Principal, TaskRow

_STORY: Final = f"{HOT}, NULL AS params, NULL AS result, t.attempts"  # watchers tell moves from attempts
_CHANGES: Final = sql(
    f"""
SELECT {_STORY}, k.task_id FROM unnest(CAST(:ids AS text[]), CAST(:seqs AS bigint[])) AS k (task_id, seq)
LEFT JOIN tasks t ON t.task_id = k.task_id
WHERE t.task_id IS NULL OR t.change_seq <> k.seq
"""
)
# `|| ''` keeps the planner from the owner's index, which would read all that the owner has: the block index
# (`ix_tasks_changed`) finds what changed lately.
_FEED: Final = sql(
    f"""
SELECT {_STORY}, t.change_xid, s.xmin
FROM (SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS xmin) s
LEFT JOIN LATERAL (
    SELECT * FROM tasks t
    WHERE t.change_xid >= :xmin AND (CAST(:everyone AS boolean) OR t.user_id || '' = ANY (:users))
        AND (t.change_xid, t.change_seq) > (:page_xid, :page_seq)
    ORDER BY t.change_xid, t.change_seq LIMIT :limit
) t ON true
"""
)
_SINCE: Final = sql(
    f"""
SELECT {_STORY} FROM tasks t
WHERE t.change_seq > :seq AND (CAST(:admin AS boolean) OR t.user_id || '' = :user)
ORDER BY t.change_seq LIMIT :limit
"""
)
_NOW: Final = sql("SELECT CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint)")


class Feeds(Repository):
    """Part of TaskRepository."""

    async def changes(self, known: Mapping[str, int]) -> Changes:
        """For the live hub: `known` maps task id to the `change_seq` last seen; one query answers all."""
        if not known:
            return Changes([], [])
        rows = await self._one(_CHANGES, ids=list(known), seqs=list(known.values()))
        return Changes(
            [task_row(row) for row in rows if row[0] is not None],
            [row[WIDTH] for row in rows if row[0] is None],
        )

    async def feed(
        self, principals: Sequence[Principal], cursor: FeedCursor | None, limit: int = 1000
    ) -> Feed:
        """Everything of these owners that changed since `cursor`; an admin among them sees all.

        Cursor None: no rows, but where the feed stands now (take it before reading a first state). Read on at
        once while `more`. A row can come again with the same `change_seq`; none is left out.
        """
        if cursor is None:
            return Feed([], FeedCursor((await self._one(_NOW))[0][0]), more=False)
        page = cursor.page or (0, 0)
        rows = await self._one(
            _FEED,
            xmin=cursor.xmin,
            everyone=any(principal.admin for principal in principals),
            users=[principal.user_id for principal in principals],
            page_xid=page[0],
            page_seq=page[1],
            limit=limit + 1,
        )
        # Pages of one answer keep the first page's end: what commits meanwhile belongs to the next answer.
        end = cursor.next_xmin if cursor.next_xmin is not None else int(rows[0][WIDTH + 1])
        found = [row for row in rows if row[0] is not None]
        tasks = [task_row(row) for row in found[:limit]]
        if len(found) <= limit:
            return Feed(tasks, FeedCursor(end), more=False)
        last = (int(found[limit - 1][WIDTH]), tasks[-1].change_seq)
        return Feed(tasks, FeedCursor(cursor.xmin, last, end), more=True)

    async def changed_since(self, principal: Principal, change_seq: int, limit: int = 1000) -> list[TaskRow]:
        """For `Last-Event-ID`: tasks changed after an event's `change_seq`, oldest change first.

        Give a number a little below the event's (100 at most): neighbours may have committed out of order.
        """
        rows = await self._one(
            _SINCE, seq=change_seq, admin=principal.admin, user=principal.user_id, limit=limit
        )
        return [task_row(row) for row in rows]
