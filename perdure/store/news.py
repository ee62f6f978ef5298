"""Changes of many tasks, each told exactly once: what a stream of all of a caller's tasks reads.

A snapshot of Postgres says which transactions are seen and which are not. "Not visible in the one told last,
visible in this one" is therefore exact: nothing is left out when transactions commit out of order, nothing
comes twice, and no long transaction holds anything back.
"""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from perdure.store.base import ACTIVE, Repository, sql
from perdure.store.columns import HOT, WIDTH, task_row
from perdure.store.rows import Principal, TaskRow

_STORY: Final = f"{HOT}, NULL AS params, NULL AS result, t.attempts"
_OWNED: Final = "(CAST(:everyone AS boolean) OR t.user_id = ANY (:users))"
_XID: Final = "CAST(CAST(t.change_xid AS text) AS xid8)"
_BATCH: Final = (
    f"{_OWNED} AND t.change_seq > :after AND (CAST(:upto AS text) IS NULL "
    f"OR pg_visible_in_snapshot({_XID}, CAST(CAST(:upto AS text) AS pg_snapshot)))"
)


def _statement(which: str) -> str:
    return f"""
SELECT {_STORY}, t.change_xid, s.now
FROM (SELECT CAST(pg_current_snapshot() AS text) AS now) s
LEFT JOIN LATERAL (
    SELECT * FROM tasks t WHERE {_BATCH} AND {which} ORDER BY t.change_seq LIMIT :limit
) t ON true
"""


# `|| ''` keeps the planner from the owner's index, which would read all that the owner has: the block index
# (`ix_tasks_changed`) finds what changed lately.
_SINCE: Final = sql(
    _statement(
        "t.change_xid >= :floor "
        f"AND NOT pg_visible_in_snapshot({_XID}, CAST(CAST(:told AS text) AS pg_snapshot))"
    ).replace("t.user_id = ANY", "t.user_id || '' = ANY")
)
_ACTIVE: Final = sql(_statement(f"t.status IN {ACTIVE}"))
_TEXT: Final = re.compile(r"([0-9]{1,19}):([0-9]{1,19}):((?:[0-9]{1,19}(?:,[0-9]{1,19})*)?)\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a moment sees: transactions below `xmin`, and those below `xmax` that were not `running`."""

    xmin: int
    xmax: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of Postgres' own text. Raises ValueError for any other."""
        match = _TEXT.match(text)
        if match is None:
            raise ValueError("no snapshot")
        return cls(int(match[1]), int(match[2]), frozenset(int(part) for part in match[3].split(",") if part))

    def sees(self, xid: int) -> bool:
        """Whether this transaction's rows are visible."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def later(self, other: Snapshot) -> bool:
        """Whether this moment came after the other: it sees more."""
        mine, theirs = (self.xmax, self.xmin), (other.xmax, other.xmin)
        return mine > theirs or (mine == theirs and len(self.running) < len(other.running))

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.running)))}"


@dataclass(frozen=True, slots=True)
class NewsRow:
    """A task as its change `xid` left it, or a later one."""

    row: TaskRow
    xid: int


@dataclass(frozen=True, slots=True)
class News:
    """One answer, by `change_seq`. `now` is the moment it shows. `more`: the next page follows `rows[-1]`."""

    rows: list[NewsRow]
    now: Snapshot
    more: bool


class NewsRepository(Repository):
    """Changes since a snapshot."""

    async def since(
        self,
        principals: Sequence[Principal],
        told: Snapshot | None,
        *,
        upto: Snapshot | None = None,
        after: int = 0,
        limit: int = 500,
    ) -> News:
        """What these owners' tasks became since `told` (an admin's: everybody's); with None, all that are not
        final. Rows carry their attempts.

        For the next page of an answer `upto` is the first page's `now`, `after` the last `change_seq` so far.
        A row that changed meanwhile belongs to the next answer. Raises StoreRefused for what is no snapshot.
        """
        rows = await self._one(
            _ACTIVE if told is None else _SINCE,
            everyone=any(principal.admin for principal in principals),
            users=[principal.user_id for principal in principals],
            after=after,
            upto=None if upto is None else str(upto),
            limit=limit + 1,
            **({} if told is None else {"told": str(told), "floor": told.xmin}),
        )
        found = [NewsRow(task_row(row), int(row[WIDTH])) for row in rows if row[0] is not None]
        return News(found[:limit], Snapshot.parse(rows[0][WIDTH + 1]), len(found) > limit)
