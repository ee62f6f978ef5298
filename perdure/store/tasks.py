"""Tasks: the read model of every workflow, and what callers ask of it."""

from __future__ import annotations

from builtins import list as List  # noqa: N812 - `list` is a method here
from collections.abc import Collection, Mapping, Sequence

from perdure.contracts import CommitReceipt, Outcome, Projection
from perdure.store.rows import (
    CancelResult,
    Changes,
    CreateManyResult,
    CreateResult,
    DeleteResult,
    Feed,
    FeedCursor,
    Idempotency,
    Include,
    NewTask,
    Page,
    Principal,
    PriorityResult,
    TaskFilter,
    TaskRow,
)
from perdure.task.states import Priority, Status


class TaskRepository:
    """Every write of a task row but the dispatcher's. Raises StoreUnavailable and StoreRefused only."""

    async def create(self, new: NewTask, idempotency: Idempotency | None = None) -> CreateResult:
        """Accepts one task: row, params and key in one statement. The row is PENDING when this returns.

        A created row has no `params_json` (the caller holds it); a replayed one has everything.
        """
        raise NotImplementedError

    async def create_many(
        self, new: Sequence[NewTask], idempotency: Idempotency | None = None
    ) -> CreateManyResult:
        """Accepts several tasks of any users in one transaction: all or none."""
        raise NotImplementedError

    async def get(
        self,
        principal: Principal,
        task_id: str,
        include: Collection[Include] = ("params", "result", "attempts"),
    ) -> TaskRow | None:
        """One task of the principal's (any, for an admin), or None."""
        raise NotImplementedError

    async def by_id_any(
        self, task_id: str, include: Collection[Include] = ("params", "result", "attempts")
    ) -> TaskRow | None:
        """One task whoever owns it: for workers."""
        raise NotImplementedError

    async def list(
        self,
        principal: Principal,
        filter: TaskFilter = TaskFilter(),
        *,
        cursor: str | None = None,
        limit: int = 50,
        include: Collection[Include] = (),
    ) -> Page:
        """A page, newest first by (created_at desc, task_id). Raises InvalidCursor."""
        raise NotImplementedError

    async def summaries(self, principal: Principal | None, ids: Collection[str]) -> List[TaskRow]:
        """Those of `ids` that the principal may see (None: all), without payloads, in no order."""
        raise NotImplementedError

    async def changes(self, known: Mapping[str, int]) -> Changes:
        """For the live hub: `known` maps task id to the `change_seq` last seen; one query answers all."""
        raise NotImplementedError

    async def feed(
        self, principals: Sequence[Principal], cursor: FeedCursor | None, limit: int = 1000
    ) -> Feed:
        """Everything of these owners that changed since `cursor` (None: nothing, but where the feed stands now)."""
        raise NotImplementedError

    async def changed_since(self, principal: Principal, change_seq: int, limit: int = 1000) -> List[TaskRow]:
        """For `Last-Event-ID`: tasks changed after an event's `change_seq`, oldest change first."""
        raise NotImplementedError

    async def older_than(self, status: Status, seconds: float, limit: int = 100) -> List[TaskRow]:
        """Rows of a state whose last write is older than `seconds`, oldest created first."""
        raise NotImplementedError

    async def count_by_state(self) -> dict[Status, int]:
        """Rows per state; every state is a key."""
        raise NotImplementedError

    async def project(self, projection: Projection) -> bool:
        """An intermediate write: taken iff the row is not final and its version is lower. True when taken."""
        raise NotImplementedError

    async def commit(self, outcome: Outcome) -> CommitReceipt:
        """The final write: state, result, usage and pending callback in one transaction, iff the row is not
        final. The same outcome committed again is `committed` again, with the same delivery. Raises
        StoreRefused for text that Postgres cannot hold."""
        raise NotImplementedError

    async def request_cancel(
        self, principal: Principal, task_id: str, reason: str | None = None
    ) -> CancelResult:
        """Cancels a never-claimed PENDING row in place, with its callback; sets the flag on any other."""
        raise NotImplementedError

    async def cancel_where(
        self, principal: Principal, filter: TaskFilter, reason: str | None = None, limit: int = 500
    ) -> List[CancelResult]:
        """`request_cancel` for up to `limit` unfinished tasks that match and were not asked to cancel yet."""
        raise NotImplementedError

    async def set_priority(self, principal: Principal, task_id: str, priority: Priority) -> PriorityResult:
        """Changes the class of a task that waits (PENDING or QUEUED)."""
        raise NotImplementedError

    async def delete(self, principal: Principal, task_id: str) -> DeleteResult:
        """Removes a final task with its params, result and callbacks; its usage stays in the ledger."""
        raise NotImplementedError
