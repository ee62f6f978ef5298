"""Figures from rows: what gauges, queue pages and limits are made of."""

from __future__ import annotations

from datetime import datetime

from perdure.store.rows import Principal, QueueStat, ServiceTimes, UsageRow
from perdure.task.states import Priority, Status


class StatsRepository:
    """Read-only figures."""

    async def by_state(self) -> dict[Status, int]:
        """Tasks per state; every state is a key."""
        raise NotImplementedError

    async def queues(self) -> list[QueueStat]:
        """Per pool and class: waiting, running, oldest wait. Classes with nothing are left out."""
        raise NotImplementedError

    async def waiting(self, pool: str, at_most: int = 100_000) -> dict[Priority, int]:
        """PENDING and QUEUED tasks of a pool per class, each counted up to `at_most`: for `max_waiting`."""
        raise NotImplementedError

    async def waiting_of(self, user_id: str, at_most: int = 10_000) -> int:
        """A user's PENDING and QUEUED tasks, counted up to `at_most`."""
        raise NotImplementedError

    async def ahead(self, principal: Principal, task_id: str, at_most: int = 10_000) -> int | None:
        """Estimate of how many tasks of its pool start before this one: better lanes, then older ones of its
        lane (fairness between users is left out). None when it does not wait or is not the principal's."""
        raise NotImplementedError

    async def service_times(self, pool: str, last: int = 200) -> ServiceTimes:
        """Run times of the last tasks that a pool completed in the past day."""
        raise NotImplementedError

    async def usage(
        self,
        principal: Principal,
        since: datetime,
        until: datetime,
        user_id: str | None = None,
        model_id: str | None = None,
    ) -> list[UsageRow]:
        """The ledger by user, model and UTC day of the end, within [since, until). Deleted tasks count by whole
        days. A caller without `admin` sees their own."""
        raise NotImplementedError

    async def callbacks_waiting(self) -> int:
        """Deliveries that a try is planned for."""
        raise NotImplementedError
