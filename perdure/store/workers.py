"""Workers seen: reported by those who ask the engine, since GPU workers have no database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.store.base import Repository, sql
from perdure.store.jsontext import to_json
from perdure.store.rows import WorkerReport, WorkerRow

_REPORT: Final = sql(
    """
INSERT INTO workers_seen (worker, pool, models, slots, in_use, draining)
SELECT DISTINCT ON (worker) worker, pool, models, slots, in_use, draining
FROM json_to_recordset(CAST(:reports AS json)) AS x (
    worker text, pool text, models text[], slots integer, in_use integer, draining boolean)
ORDER BY worker
ON CONFLICT (worker) DO UPDATE SET
    pool = EXCLUDED.pool, models = EXCLUDED.models, slots = EXCLUDED.slots, in_use = EXCLUDED.in_use,
    draining = EXCLUDED.draining, seen_at = now()
"""
)
_LIVE: Final = sql(
    "SELECT worker, pool, models, slots, in_use, draining, seen_at FROM workers_seen "
    "WHERE seen_at > now() - make_interval(secs => :seconds) ORDER BY pool, worker"
)


class WorkerRepository(Repository):
    """The table `workers_seen`."""

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        """Notes that these workers live, with what they serve and hold."""
        if reports:
            await self._one(_REPORT, reports=to_json(list(reports)))

    async def live(self, seconds: float = 30) -> list[WorkerRow]:
        """Workers seen in the last `seconds`, by pool and name."""
        rows = await self._one(_LIVE, seconds=float(seconds))
        return [WorkerRow(row[0], row[1], tuple(row[2]), *row[3:]) for row in rows]
