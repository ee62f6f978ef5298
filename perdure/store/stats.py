"""Figures from rows: what gauges, queue pages and limits are made of."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from perdure.store.base import ACTIVE, Repository, sql
from perdure.store.ledger import DAY, SUMS
from perdure.store.rows import Principal, QueueStat, ServiceTimes, UsageRow
from perdure.task.states import CLASSES, Priority, Status

_COUNTS: Final = sql("SELECT status, count(*) FROM tasks GROUP BY status")
_QUEUES: Final = sql(
    f"""
SELECT pool, priority,
    count(*) FILTER (WHERE status = 'PENDING' AND due <= now()),
    count(*) FILTER (WHERE status = 'QUEUED'),
    count(*) FILTER (WHERE status = 'PROCESSING'),
    count(*) FILTER (WHERE status = 'PENDING' AND due > now()),
    CAST(COALESCE(GREATEST(0, EXTRACT(EPOCH FROM
        now() - min(due) FILTER (WHERE status <> 'PROCESSING' AND started_at IS NULL)
    )), 0) AS double precision)
FROM (
    SELECT pool, priority, status, started_at, GREATEST(created_at, not_before) AS due
    FROM tasks WHERE status IN {ACTIVE}
) t
GROUP BY pool, priority
"""
)
_BY_MODEL: Final = sql(
    """
SELECT model_id, count(*) FROM tasks
WHERE status = 'QUEUED' OR (status = 'PENDING' AND (not_before IS NULL OR not_before <= now()))
GROUP BY model_id
"""
)
_WAITING: Final = sql(
    """
SELECT priority, LEAST(count(*), :most) FROM tasks
WHERE pool = :pool AND status IN ('PENDING', 'QUEUED') GROUP BY priority
"""
)
_WAITING_OF: Final = sql(
    "SELECT count(*) FROM (SELECT 1 FROM tasks WHERE user_id = :user AND status IN ('PENDING', 'QUEUED') "
    "LIMIT :most) capped"
)
_AHEAD: Final = sql(
    """
SELECT (
    SELECT count(*) FROM (
        SELECT 1 FROM tasks o WHERE o.pool = t.pool AND o.status IN ('PENDING', 'QUEUED')
            AND (o.lane, o.task_id) < (t.lane, t.task_id) AND (o.not_before IS NULL OR o.not_before <= now())
        LIMIT :most
    ) capped
) FROM tasks t
WHERE t.task_id = :id AND t.status IN ('PENDING', 'QUEUED') AND (CAST(:admin AS boolean) OR t.user_id = :user)
"""
)
_SERVICE: Final = sql(
    """
SELECT count(*), CAST(COALESCE(avg(s), 0) AS double precision),
    COALESCE(percentile_cont(0.5) WITHIN GROUP (ORDER BY s), 0),
    COALESCE(percentile_cont(0.95) WITHIN GROUP (ORDER BY s), 0)
FROM (
    SELECT CAST(EXTRACT(EPOCH FROM completed_at - started_at) AS double precision) AS s FROM tasks
    WHERE completed_at > now() - interval '1 day' AND pool = :pool AND status = 'COMPLETED'
        AND started_at IS NOT NULL
    ORDER BY completed_at DESC LIMIT :last
) t
"""
)
_USAGE: Final = sql(
    f"""
SELECT user_id, model_id, day, CAST(sum(tasks) AS bigint), CAST(sum(attempts) AS bigint),
    CAST(sum(prompt_tokens) AS bigint), CAST(sum(completion_tokens) AS bigint),
    CAST(sum(discarded_tokens) AS bigint), CAST(sum(queue_seconds) AS double precision),
    CAST(sum(run_seconds) AS double precision)
FROM (
    SELECT user_id, model_id, {DAY} AS day, {SUMS} FROM tasks
    WHERE completed_at >= :since AND completed_at < :until GROUP BY 1, 2, 3
    UNION ALL
    SELECT user_id, model_id, day, tasks, attempts, prompt_tokens, completion_tokens, discarded_tokens,
        queue_seconds, run_seconds
    FROM usage_daily WHERE day >= CAST(CAST(:since AS timestamptz) AT TIME ZONE 'UTC' AS date)
        AND day < CAST(CAST(:until AS timestamptz) AT TIME ZONE 'UTC' AS date)
) u
WHERE (CAST(:user AS text) IS NULL OR user_id = :user) AND (CAST(:model AS text) IS NULL OR model_id = :model)
GROUP BY user_id, model_id, day ORDER BY day, user_id, model_id
"""
)
_CALLBACKS: Final = sql("SELECT count(*) FROM callback_deliveries WHERE state IN ('PENDING', 'RETRYING')")


class StatsRepository(Repository):
    """Read-only figures."""

    async def by_state(self) -> dict[Status, int]:
        """Tasks per state; every state is a key."""
        found = {Status(status): count for status, count in await self._one(_COUNTS)}
        return {status: found.get(status, 0) for status in Status}

    async def queues(self) -> list[QueueStat]:
        """Per pool and class: waiting, running, oldest wait. Classes with nothing are left out."""
        return [QueueStat(row[0], Priority(row[1]), *row[2:]) for row in await self._one(_QUEUES)]

    async def waiting_by_model(self) -> dict[str, int]:
        """PENDING tasks that are due, and QUEUED ones, by model; models with none are left out."""
        return {row[0]: row[1] for row in await self._one(_BY_MODEL)}

    async def waiting(self, pool: str, at_most: int = 100_000) -> dict[Priority, int]:
        """PENDING and QUEUED tasks of a pool per class, each at most `at_most`: for `max_waiting`.

        Reads every row that waits: about 25 ms for 50,000.
        """
        found = {Priority(name): count for name, count in await self._one(_WAITING, pool=pool, most=at_most)}
        return {priority: found.get(priority, 0) for priority in CLASSES}

    async def waiting_of(self, user_id: str, at_most: int = 10_000) -> int:
        """A user's PENDING and QUEUED tasks, counted up to `at_most`."""
        return int((await self._one(_WAITING_OF, user=user_id, most=at_most))[0][0])

    async def ahead(self, principal: Principal, task_id: str, at_most: int = 10_000) -> int | None:
        """Estimate of how many tasks of its pool start before this one: better lanes, then older ones of its
        lane (fairness between users is left out). None when it does not wait or is not the principal's."""
        rows = await self._one(
            _AHEAD, id=task_id, most=at_most, admin=principal.admin, user=principal.user_id
        )
        return int(rows[0][0]) if rows else None

    async def service_times(self, pool: str, last: int = 200) -> ServiceTimes:
        """Run times in seconds of the last tasks that a pool completed in the past day."""
        return ServiceTimes(*(await self._one(_SERVICE, pool=pool, last=last))[0])

    async def usage(
        self,
        principal: Principal,
        since: datetime,
        until: datetime,
        user_id: str | None = None,
        model_id: str | None = None,
    ) -> list[UsageRow]:
        """The ledger by user, model and UTC day of the end, within [since, until).

        Deleted tasks count by whole days: those of `since`'s day do, those of `until`'s do not. A caller
        without `admin` sees their own.
        """
        user = user_id if principal.admin else principal.user_id
        rows = await self._one(_USAGE, since=since, until=until, user=user, model=model_id)
        return [
            UsageRow(row[0], row[1], datetime(row[2].year, row[2].month, row[2].day, tzinfo=UTC), *row[3:])
            for row in rows
        ]

    async def callbacks_waiting(self) -> int:
        """Deliveries that a try is planned for."""
        return int((await self._one(_CALLBACKS))[0][0])
