"""The reconciler's questions and repairs, and retention."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from perdure.contracts import CommitReceipt
from perdure.store.base import ACTIVE, TOUCH, Repository, Unit, sql
from perdure.store.columns import FULL, FULL_JOINS, PLAIN, WIDTH, task_row
from perdure.store.finish import Ending, finish
from perdure.store.ledger import FOLD
from perdure.store.rows import MissingMark, Purged, TaskRow
from perdure.task.states import Status

_SILENT: Final = sql(
    f"""
WITH silent AS (
    SELECT task_id, GREATEST(updated_at, checked_at) AS since FROM tasks
    WHERE status IN ('QUEUED', 'PROCESSING')
        AND GREATEST(updated_at, checked_at) < now() - make_interval(secs => :seconds)
    ORDER BY since LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE tasks t SET checked_at = now() FROM silent WHERE t.task_id = silent.task_id
RETURNING {PLAIN}, silent.since
"""
)
# The longer a row has not moved, the rarer its signals: each is an event in a history that nobody reads.
_CANCELS: Final = sql(
    f"""
WITH due AS (
    SELECT task_id FROM tasks
    WHERE cancel_requested AND status IN {ACTIVE} AND claimed_at IS NOT NULL
        AND (cancel_signalled_at IS NULL OR cancel_signalled_at < now() - GREATEST(
            make_interval(secs => :seconds), (cancel_signalled_at - updated_at) / 2))
    ORDER BY cancel_signalled_at NULLS FIRST LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE tasks t SET cancel_signalled_at = now() FROM due WHERE t.task_id = due.task_id RETURNING {PLAIN}
"""
)
_MISSING: Final = sql(
    f"""
UPDATE tasks t SET missing_since = COALESCE(t.missing_since, now())
WHERE t.task_id = :id AND t.version = :version AND t.status IN {ACTIVE}
RETURNING CAST(EXTRACT(EPOCH FROM now() - t.missing_since) AS double precision), t.restarts
"""
)
_RESTART: Final = sql(
    f"""
WITH t AS (
    UPDATE tasks t SET restarts = t.restarts + 1, missing_since = NULL, {TOUCH}
    WHERE t.task_id = :id AND t.version = :version AND t.status IN {ACTIVE} AND t.restarts = 0
    RETURNING t.*
)
SELECT {FULL} FROM t {FULL_JOINS}
"""
)
_NOT_RESTARTED: Final = sql(
    f"""
UPDATE tasks t SET restarts = t.restarts - 1, missing_since = now()
WHERE t.task_id = :id AND t.version = :version AND t.status IN {ACTIVE} AND t.restarts > 0 RETURNING 1
"""
)
_OPEN: Final = sql(
    f"SELECT {PLAIN} FROM tasks t WHERE t.task_id = ANY (CAST(:ids AS text[])) AND t.status IN {ACTIVE}"
)
_LOCK: Final = sql(
    f"SELECT {PLAIN}, now() FROM tasks t WHERE t.task_id = :id FOR NO KEY UPDATE",
)
_MARK: Final = sql("SELECT at FROM marks WHERE name = :name")
_SET_MARK: Final = sql(
    "INSERT INTO marks AS old (name, at) VALUES (:name, :at) "
    "ON CONFLICT (name) DO UPDATE SET at = GREATEST(old.at, EXCLUDED.at)"
)
_PURGE_TASKS: Final = sql(
    f"""
WITH old AS (
    SELECT task_id FROM tasks t
    WHERE t.completed_at IS NOT NULL AND t.completed_at < now() - make_interval(secs => :seconds)
        AND NOT EXISTS (SELECT 1 FROM callback_deliveries d
                        WHERE d.task_id = t.task_id AND d.state IN ('PENDING', 'RETRYING'))
    ORDER BY t.completed_at LIMIT :limit FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM tasks t USING old WHERE t.task_id = old.task_id RETURNING t.*
), {FOLD}
SELECT count(*) FROM gone
"""
)
_PURGE_KEYS: Final = sql(
    """
DELETE FROM idempotency_keys k USING (
    SELECT user_id, route, key FROM idempotency_keys WHERE expires_at <= now()
    ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
) old WHERE k.user_id = old.user_id AND k.route = old.route AND k.key = old.key RETURNING 1
"""
)
_PURGE_WORKERS: Final = sql("DELETE FROM workers_seen WHERE seen_at < now() - interval '1 day' RETURNING 1")
_PURGE_SECRETS: Final = sql("DELETE FROM callback_secrets WHERE retires_at <= now() RETURNING 1")


class MaintenanceRepository(Repository):
    """Repairs are compare-and-set on the version that was looked at."""

    async def silent(self, seconds: float = 60, limit: int = 100) -> list[TaskRow]:
        """QUEUED and PROCESSING rows not written and not checked for `seconds`, longest first.

        Marks them checked, so that two reconcilers share the work and one pass does not repeat the last.
        """
        rows = await self._one(_SILENT, seconds=float(seconds), limit=limit)
        return [task_row(row) for row in sorted(rows, key=lambda row: (row[WIDTH], row[0]))]

    async def cancels_due(self, seconds: float = 5, limit: int = 100) -> list[TaskRow]:
        """Unfinished claimed rows whose cancel was asked for, and last signalled, `seconds` ago or longer.

        A row that does not move is signalled ever more rarely. Marks them signalled now.
        """
        rows = await self._one(_CANCELS, seconds=float(seconds), limit=limit)
        return [task_row(row) for row in rows]

    async def note_missing(self, task_id: str, version: int) -> MissingMark | None:
        """Notes that the engine does not know the task's workflow. None when the row moved on meanwhile.

        Any write of the workflow clears the note.
        """
        rows = await self._one(_MISSING, id=task_id, version=version)
        return MissingMark(*rows[0]) if rows else None

    async def restart(self, task_id: str, version: int) -> TaskRow | None:
        """Takes the one restart of a lost workflow.

        The row with params and attempts to restart from, or None when it moved on or was restarted before.
        """
        rows = await self._one(_RESTART, id=task_id, version=version)
        return task_row(rows[0]) if rows else None

    async def not_restarted(self, task_id: str, version: int) -> None:
        """Gives the restart back: Temporal did not take it, or did not say so. The row counts as missing."""
        await self._one(_NOT_RESTARTED, id=task_id, version=version)

    async def open_of(self, task_ids: Sequence[str]) -> list[TaskRow]:
        """Those of these tasks that are not final."""
        return [task_row(row) for row in await self._one(_OPEN, ids=list(task_ids))]

    async def fail(self, task_id: str, version: int, code: str, message: str) -> CommitReceipt:
        """Settles a row as FAILED with its callback (due at once), if it still stands at `version`."""

        async def work(unit: Unit) -> CommitReceipt:
            rows = await unit.run(_LOCK, id=task_id)
            if not rows:
                return CommitReceipt(kind="missing")
            task = task_row(rows[0])
            if task.version != version or task.status.final:
                return CommitReceipt(kind="superseded")
            ended = await finish(unit, [Ending(task, Status.FAILED, code, message)], rows[0][WIDTH])
            return CommitReceipt(kind="committed", delivery_id=ended[0].delivery_id)

        return await self._unit(work)

    async def mark(self, name: str) -> datetime | None:
        """A stored time, such as how far visibility was read."""
        rows = await self._one(_MARK, name=name)
        return rows[0][0] if rows else None

    async def set_mark(self, name: str, at: datetime) -> None:
        """Stores a time; it never goes back."""
        await self._one(_SET_MARK, name=name, at=at)

    async def purge(self, retention_days: float, limit: int = 500) -> Purged:
        """One batch: final tasks older than `retention_days` whose callbacks wait for nothing, expired keys,
        workers not seen for a day, retired secrets. Call again until `total` is 0."""
        tasks = (await self._one(_PURGE_TASKS, seconds=retention_days * 86_400.0, limit=limit))[0][0]
        keys = len(await self._one(_PURGE_KEYS, limit=limit))
        workers = len(await self._one(_PURGE_WORKERS))
        secrets = len(await self._one(_PURGE_SECRETS))
        return Purged(tasks=tasks, keys=keys, workers=workers, secrets=secrets)
