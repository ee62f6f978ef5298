"""What GPU workers tell, brought into the store by the control worker."""

from __future__ import annotations

from temporalio import activity
from temporalio.exceptions import ApplicationError

from perdure import names
from perdure.contracts import WorkerNews
from perdure.store.engine import Store
from perdure.store.errors import StoreUnavailable


class WorkerActivities:
    """The table of workers seen."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @activity.defn(name=names.ACT_NOTE_WORKER)
    async def note_worker(self, news: WorkerNews) -> bool:
        """Notes what a worker says of itself. False when something newer is known."""
        try:
            return await self._store.workers.note(news)
        except StoreUnavailable as error:
            raise ApplicationError("Postgres is not available", type="StoreUnavailable") from error
