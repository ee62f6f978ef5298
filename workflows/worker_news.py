"""WorkerNews: a GPU worker, which has no database, tells the store what it serves. No task of a user."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure import names
    from perdure.contracts import WorkerNews as News


@workflow.defn(name=names.WF_WORKER_NEWS)
class WorkerNews:
    """One piece of news, noted once. Whoever starts it bounds its time."""

    @workflow.run
    async def run(self, news: News) -> bool:
        """True when it was noted, False when something newer is known."""
        noted: bool = await workflow.execute_activity(
            names.ACT_NOTE_WORKER,
            news,
            result_type=bool,
            start_to_close_timeout=timedelta(seconds=5),
            summary=f"{news.worker}, pool {news.pool}",
        )
        return noted
