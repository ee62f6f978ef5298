"""The reconciler's questions and repairs, and retention."""

from __future__ import annotations

from datetime import datetime

from perdure.contracts import CommitReceipt
from perdure.store.rows import MissingMark, Purged, TaskRow


class MaintenanceRepository:
    """Repairs are compare-and-set on the version that was looked at."""

    async def silent(self, seconds: float = 60, limit: int = 100) -> list[TaskRow]:
        """QUEUED and PROCESSING rows not written and not checked for `seconds`, longest first; marks them
        checked, so that two reconcilers share the work."""
        raise NotImplementedError

    async def cancels_due(self, seconds: float = 5, limit: int = 100) -> list[TaskRow]:
        """Unfinished claimed rows whose cancel was asked for, and last signalled, `seconds` ago or longer;
        marks them signalled now."""
        raise NotImplementedError

    async def note_missing(self, task_id: str, version: int) -> MissingMark | None:
        """Notes that the engine does not know the task's workflow. None when the row moved on meanwhile. Any
        write of the workflow clears the note."""
        raise NotImplementedError

    async def restart(self, task_id: str, version: int) -> TaskRow | None:
        """Takes the one restart of a lost workflow. The row with params and attempts to restart from, or None
        when it moved on or was restarted before."""
        raise NotImplementedError

    async def fail(self, task_id: str, version: int, code: str, message: str) -> CommitReceipt:
        """Settles a row as FAILED with its callback, if it still stands at `version`."""
        raise NotImplementedError

    async def mark(self, name: str) -> datetime | None:
        """A stored time, such as how far visibility was read."""
        raise NotImplementedError

    async def set_mark(self, name: str, at: datetime) -> None:
        """Stores a time; it never goes back."""
        raise NotImplementedError

    async def purge(self, retention_days: float, limit: int = 500) -> Purged:
        """One batch: final tasks older than `retention_days` whose callbacks wait for nothing, expired keys,
        workers not seen for a day, retired secrets. Call again until `total` is 0."""
        raise NotImplementedError
