"""Who waits for what: how the places of waiting tasks are estimated."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perdure.store.base import Repository, sql

_WAITS: Final = "status IN ('PENDING', 'QUEUED') AND (o.not_before IS NULL OR o.not_before <= now())"
_LINES: Final = sql(
    f"SELECT o.pool, o.lane, o.user_id, count(*) FROM tasks o WHERE o.{_WAITS} GROUP BY 1, 2, 3"
)
_BEFORE: Final = sql(
    f"""
SELECT (
    SELECT count(*) FROM (
        SELECT 1 FROM tasks o WHERE o.user_id = t.user_id AND o.{_WAITS}
            AND o.pool = t.pool AND o.lane = t.lane AND o.task_id < t.task_id LIMIT :most
    ) capped
) FROM tasks t WHERE t.task_id = :id AND t.status IN ('PENDING', 'QUEUED')
"""
)


@dataclass(frozen=True, slots=True)
class Line:
    """How many tasks of one user wait on one lane of one pool. Those with a `not_before` to come do not."""

    pool: str
    lane: int
    user_id: str
    waiting: int


class LineRepository(Repository):
    """Read-only. Counts what is PENDING or QUEUED."""

    async def lines(self) -> list[Line]:
        """All lines in which something waits."""
        return [Line(*row) for row in await self._one(_LINES)]

    async def before(self, task_id: str, at_most: int = 10_000) -> int | None:
        """How many older tasks of the same user wait on the same lane, counted up to `at_most`. None when the
        task does not wait."""
        rows = await self._one(_BEFORE, id=task_id, most=at_most)
        return int(rows[0][0]) if rows else None
