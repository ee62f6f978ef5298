"""What callers change: cancel, priority, delete."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from perdure.store.base import ACTIVE, TOUCH, Repository, Unit, sql
from perdure.store.columns import PLAIN, WIDTH, task_row
from perdure.store.finish import Ending, finish
from perdure.store.ledger import FOLD
from perdure.store.reads import conditions, owner
from perdure.store.rows import CancelResult, DeleteResult, Principal, PriorityResult, TaskFilter, TaskRow
from perdure.task.policy import priority_key
from perdure.task.states import Priority, Status

_LOCK: Final = sql(
    f"SELECT {PLAIN}, now() FROM tasks t WHERE t.task_id = :id "
    "AND (CAST(:admin AS boolean) OR t.user_id = :user) FOR NO KEY UPDATE"
)
_FLAG: Final = sql(
    f"UPDATE tasks t SET cancel_requested = true, cancel_reason = COALESCE(t.cancel_reason, :reason), "
    f"cancel_signalled_at = now(), {TOUCH} WHERE t.task_id = ANY (:ids) RETURNING {PLAIN}"
)
_PRIORITY: Final = sql(
    f"UPDATE tasks t SET priority = :priority, lane = :lane, {TOUCH} WHERE t.task_id = :id RETURNING {PLAIN}"
)
_DELETE: Final = sql(
    f"""
WITH gone AS (
    DELETE FROM tasks t WHERE t.task_id = :id AND (CAST(:admin AS boolean) OR t.user_id = :user)
        AND t.status NOT IN {ACTIVE}
    RETURNING t.*
), {FOLD}
SELECT EXISTS (SELECT 1 FROM gone), EXISTS (
    SELECT 1 FROM tasks t WHERE t.task_id = :id AND (CAST(:admin AS boolean) OR t.user_id = :user)
        AND t.status IN {ACTIVE})
"""
)


class Changes(Repository):
    """Part of TaskRepository."""

    async def request_cancel(
        self, principal: Principal, task_id: str, reason: str | None = None
    ) -> CancelResult:
        """Cancels a never-claimed PENDING row in place, with its callback; sets the flag on any other.

        Repeating it is harmless; the first reason stays.
        """

        async def work(unit: Unit) -> CancelResult:
            rows = await unit.run(_LOCK, id=task_id, **owner(principal))
            if not rows:
                return CancelResult("unknown")
            task, now = task_row(rows[0]), rows[0][WIDTH]
            if task.status is Status.CANCELLED:
                return CancelResult("already_cancelled", task)
            if task.status.final:
                return CancelResult("finished", task)
            return (await _cancel(unit, [task], reason, now))[0]

        return await self._unit(work)

    async def cancel_where(
        self, principal: Principal, filter: TaskFilter, reason: str | None = None, limit: int = 500
    ) -> list[CancelResult]:
        """`request_cancel` for up to `limit` unfinished tasks that match and were not asked to cancel yet.

        Call again until it returns nothing. Rows that another transaction holds are left for the next call.
        """
        user = principal.user_id if not principal.admin else filter.user_id
        wheres, params = conditions(filter, user)
        if filter.statuses and user is None:
            wheres.append("t.status = ANY (:statuses)")
            params["statuses"] = [status.value for status in filter.statuses]
        where = " AND ".join((f"t.status IN {ACTIVE}", "NOT t.cancel_requested", *wheres))
        lock = sql(
            f"SELECT {PLAIN}, now() FROM tasks t WHERE {where} "
            "ORDER BY t.task_id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED"
        )

        async def work(unit: Unit) -> list[CancelResult]:
            rows = await unit.run(lock, limit=limit, **params)
            if not rows:
                return []
            return await _cancel(unit, [task_row(row) for row in rows], reason, rows[0][WIDTH])

        return await self._unit(work)

    async def set_priority(self, principal: Principal, task_id: str, priority: Priority) -> PriorityResult:
        """Changes the class of a task that waits (PENDING or QUEUED). What it has aged is forgotten."""

        async def work(unit: Unit) -> PriorityResult:
            rows = await unit.run(_LOCK, id=task_id, **owner(principal))
            if not rows:
                return PriorityResult("unknown")
            task = task_row(rows[0])
            if task.status not in (Status.PENDING, Status.QUEUED):
                return PriorityResult("not_waiting", task)
            if task.priority is not priority:
                values = {"id": task_id, "priority": priority.value, "lane": priority_key(priority)}
                task = task_row((await unit.run(_PRIORITY, **values))[0])
            return PriorityResult("changed", task, signal=task.claimed_at is not None)

        return await self._unit(work)

    async def delete(self, principal: Principal, task_id: str) -> DeleteResult:
        """Removes a final task with its params, result and callbacks; its usage stays in the ledger."""
        deleted, active = (await self._one(_DELETE, id=task_id, **owner(principal)))[0]
        return "deleted" if deleted else "active" if active else "unknown"


async def _cancel(unit: Unit, tasks: list[TaskRow], reason: str | None, now: datetime) -> list[CancelResult]:
    """Cancels locked, unfinished rows."""
    fresh = [task for task in tasks if task.status is Status.PENDING and task.claimed_at is None]
    ended = await finish(unit, [Ending(task, Status.CANCELLED, reason=reason) for task in fresh], now)
    results = [CancelResult("cancelled", end.task) for end in ended]
    known = {task.task_id for task in fresh}
    others = [task for task in tasks if task.task_id not in known]
    results += [CancelResult("requested", task, signal=True) for task in others if task.cancel_requested]
    flagged = [task.task_id for task in others if not task.cancel_requested]
    if flagged:
        values: dict[str, Any] = {"ids": flagged, "reason": reason}
        rows = await unit.run(_FLAG, **values)
        results += [CancelResult("requested", task_row(row), signal=True) for row in rows]
    return results
