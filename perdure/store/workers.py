"""Workers seen: reported by those who ask the engine, since GPU workers have no database."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.store.rows import WorkerReport, WorkerRow


class WorkerRepository:
    """The table `workers_seen`."""

    async def report(self, reports: Sequence[WorkerReport]) -> None:
        """Notes that these workers live, with what they serve and hold."""
        raise NotImplementedError

    async def live(self, seconds: float = 30) -> list[WorkerRow]:
        """Workers seen in the last `seconds`, by pool and name."""
        raise NotImplementedError
