"""Reading tasks: one, several, a page."""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, Final

from perdure.store.base import Repository, Statement, sql
from perdure.store.columns import EVERYTHING, PLAIN, selection, task_row
from perdure.store.cursor import decode_cursor, encode_cursor
from perdure.store.rows import Include, Page, Principal, TaskFilter, TaskRow
from perdure.task.states import Status

_OWNED: Final = "(CAST(:admin AS boolean) OR t.user_id = :user)"
_SUMMARIES: Final = sql(f"SELECT {PLAIN} FROM tasks t WHERE t.task_id = ANY (:ids) AND {_OWNED}")
_OLDER: Final = sql(
    f"SELECT {PLAIN} FROM tasks t WHERE t.status = :status "
    "AND t.updated_at < now() - make_interval(secs => :seconds) ORDER BY t.created_at LIMIT :limit"
)
_COUNTS: Final = sql("SELECT status, count(*) FROM tasks GROUP BY status")


def owner(principal: Principal | None) -> dict[str, Any]:
    """The parameters of an ownership test. None and admins see all."""
    if principal is None:
        return {"admin": True, "user": ""}
    return {"admin": principal.admin, "user": principal.user_id}


@cache
def _by_id(include: frozenset[Include]) -> Statement:
    columns, joins = selection(include)
    return sql(f"SELECT {columns} FROM tasks t {joins} WHERE t.task_id = :id AND {_OWNED}")


class Reads(Repository):
    """Part of TaskRepository."""

    async def get(
        self, principal: Principal, task_id: str, include: Collection[Include] = EVERYTHING
    ) -> TaskRow | None:
        """One task of the principal's (any, for an admin), or None."""
        return await self._find(principal, task_id, include)

    async def by_id_any(self, task_id: str, include: Collection[Include] = EVERYTHING) -> TaskRow | None:
        """One task whoever owns it: for workers."""
        return await self._find(None, task_id, include)

    async def _find(
        self, principal: Principal | None, task_id: str, include: Collection[Include]
    ) -> TaskRow | None:
        if "\x00" in task_id or not task_id.isascii():
            return None  # no row has such an id, and Postgres would refuse the question
        rows = await self._one(_by_id(frozenset(include)), id=task_id, **owner(principal))
        return task_row(rows[0]) if rows else None

    async def summaries(self, principal: Principal | None, ids: Collection[str]) -> list[TaskRow]:
        """Those of `ids` that the principal may see (None: all), without payloads, in no order."""
        rows = await self._one(_SUMMARIES, ids=list(ids), **owner(principal))
        return [task_row(row) for row in rows]

    async def older_than(self, status: Status, seconds: float, limit: int = 100) -> list[TaskRow]:
        """Rows of a state whose last write is older than `seconds`, oldest created first."""
        rows = await self._one(_OLDER, status=status.value, seconds=float(seconds), limit=limit)
        return [task_row(row) for row in rows]

    async def count_by_state(self) -> dict[Status, int]:
        """Rows per state; every state is a key."""
        found = {Status(status): count for status, count in await self._one(_COUNTS)}
        return {status: found.get(status, 0) for status in Status}


class Lists(Repository):
    """Part of TaskRepository."""

    async def list(
        self,
        principal: Principal,
        filter: TaskFilter = TaskFilter(),
        *,
        cursor: str | None = None,
        limit: int = 50,
        include: Collection[Include] = (),
    ) -> Page:
        """A page, newest first by (created_at desc, task_id). Raises InvalidCursor.

        Rows that come or go between two pages move no other row to another page.
        """
        user = principal.user_id if not principal.admin else filter.user_id
        wheres, params = conditions(filter, user)
        if cursor is not None:
            params["at"], params["after"] = decode_cursor(cursor, filter, user)
            wheres.append("t.created_at <= :at AND (t.created_at < :at OR t.task_id > :after)")
        statement = _page(tuple(wheres), frozenset(include), by_status=user is None)
        if user is None:
            params["statuses"] = [status.value for status in filter.statuses or tuple(Status)]
        rows = await self._one(statement, limit=limit + 1, **params)
        tasks = [task_row(row) for row in rows[:limit]]
        return Page(tasks, encode_cursor(tasks[-1], filter, user) if len(rows) > limit else None)


@cache
def _page(wheres: tuple[str, ...], include: frozenset[Include], *, by_status: bool) -> Statement:
    """The statement of a list. Without a user a page of each state is read in index order, then merged."""
    columns, joins = selection(include)
    where = " AND ".join(("true", *wheres))
    order = "ORDER BY t.created_at DESC, t.task_id LIMIT :limit"
    if not by_status:
        return sql(f"SELECT {columns} FROM tasks t {joins} WHERE {where} {order}")
    return sql(
        f"SELECT {columns} FROM unnest(CAST(:statuses AS text[])) AS s (status) CROSS JOIN LATERAL "
        f"(SELECT * FROM tasks t WHERE t.status = s.status AND {where} {order}) t {joins} {order}"
    )


def conditions(filter: TaskFilter, user: str | None) -> tuple[list[str], dict[str, Any]]:
    """A filter's tests and parameters; the task is `t`."""
    wheres, params = [], dict[str, Any]()
    for column, value in (
        ("user_id", user),
        ("model_id", filter.model_id),
        ("task_type", filter.task_type),
        ("priority", filter.priority and filter.priority.value),
    ):
        if value is not None:
            wheres.append(f"t.{column} = :{column}")
            params[column] = value
    if filter.statuses and user is not None:
        wheres.append("t.status = ANY (:statuses)")
        params["statuses"] = [status.value for status in filter.statuses]
    for name, sign in (("created_after", ">"), ("created_before", "<")):
        if (at := getattr(filter, name)) is not None:
            wheres.append(f"t.created_at {sign} :{name}")
            params[name] = at
    for number, (key, value) in enumerate(filter.metadata):
        wheres.append(f"CAST(t.metadata AS jsonb) ->> CAST(:mk{number} AS text) = :mv{number}")
        params |= {f"mk{number}": key, f"mv{number}": value}
    return wheres, params
