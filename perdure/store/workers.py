"""Workers seen: noted by those who ask the engine and by the workers' own news, since GPU workers have no
database.

What the engine says (that a worker lives, and how many slots it uses) comes every few seconds; what a worker
says of its models comes at its start and whenever it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import orjson

from perdure.contracts import ModelNews, WorkerNews
from perdure.store.base import Repository, sql
from perdure.store.jsontext import to_json
from perdure.store.rows import WorkerReport, WorkerRow

LIVE_SECONDS: Final = 20.0  # a worker silent for so long serves nothing: four heartbeats

# `seen_at` is the time of the last heartbeat by the database's clock; it never goes back.
_REPORT: Final = sql(
    """
INSERT INTO workers_seen AS old (worker, pool, models, slots, in_use, draining, seen_at)
SELECT DISTINCT ON (worker) worker, pool, models, slots, in_use, draining,
    now() - make_interval(secs => silent)
FROM json_to_recordset(CAST(:reports AS json)) AS x (worker text, pool text, models text[], slots integer,
    in_use integer, draining boolean, silent double precision)
ORDER BY worker, silent
ON CONFLICT (worker) DO UPDATE SET
    pool = EXCLUDED.pool, slots = EXCLUDED.slots, in_use = EXCLUDED.in_use, draining = EXCLUDED.draining,
    models = CASE WHEN old.told IS NULL THEN EXCLUDED.models ELSE old.models END,
    seen_at = GREATEST(old.seen_at, EXCLUDED.seen_at)
"""
)
# News of a run that was overtaken, and of an earlier life of the same worker, is older and changes nothing.
_NOTE: Final = sql(
    """
INSERT INTO workers_seen AS old (worker, pool, models, slots, in_use, draining, told, told_at)
VALUES (:worker, :pool, :models, :slots, 0, false, :told, :at)
ON CONFLICT (worker) DO UPDATE SET
    pool = EXCLUDED.pool, models = EXCLUDED.models, slots = EXCLUDED.slots, told = EXCLUDED.told,
    told_at = EXCLUDED.told_at
WHERE old.told_at IS NULL OR old.told_at < EXCLUDED.told_at
RETURNING 1
"""
)
_LIVE: Final = sql(
    "SELECT worker, pool, models, slots, in_use, draining, seen_at, told FROM workers_seen "
    "WHERE seen_at > now() - make_interval(secs => :seconds) ORDER BY pool, worker"
)


class WorkerRepository(Repository):
    """The table `workers_seen`."""

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        """Notes that these workers live, with what they hold."""
        if reports:
            await self._one(_REPORT, reports=to_json(list(reports)))

    async def note(self, news: WorkerNews) -> bool:
        """Notes what a worker says of itself. False when something newer is known."""
        rows = await self._one(
            _NOTE,
            worker=news.worker,
            pool=news.pool,
            models=[model.model_id for model in news.models if model.error_code is None],
            slots=news.slots,
            told=to_json([model.model_dump(mode="json") for model in news.models]),
            at=news.at,
        )
        return bool(rows)

    async def live(self, seconds: float = LIVE_SECONDS) -> list[WorkerRow]:
        """Workers whose last heartbeat is less than `seconds` old, by pool and name."""
        rows = await self._one(_LIVE, seconds=float(seconds))
        return [_row(*row) for row in rows]


def _row(
    worker: str,
    pool: str,
    models: list[str],
    slots: int,
    in_use: int,
    draining: bool,
    seen_at: datetime,
    told: str | None,
) -> WorkerRow:
    return WorkerRow(worker, pool, tuple(models), slots, in_use, draining, seen_at, _told(told))


def _told(text: str | None) -> tuple[ModelNews, ...] | None:
    return None if text is None else tuple(ModelNews.model_validate(one) for one in orjson.loads(text))
