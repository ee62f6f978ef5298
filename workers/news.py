"""A GPU worker's news: what it serves and how its breakers stand, told by a tiny workflow on the control
queue.

    teller = Teller(client, gpu.news)
    await teller.run()          until cancelled

Best effort, beside the attempts: a look a second costs nothing, and news that cannot be told are told later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from perdure import names
from perdure.contracts import WorkerNews
from perdure.temporal import EngineRefused, EngineUnavailable, bounded

log = logging.getLogger(__name__)

_LOOK: Final = 1.0  # seconds between looks at the breakers
_BETWEEN: Final = 2.0  # seconds between two pieces of news at least
_AGAIN: Final = 300.0  # seconds after which unchanged news are told again: the store may have lost them
_MOST_WAIT: Final = 30.0  # seconds between tries while Temporal does not take them
_VALID: Final = timedelta(seconds=30)  # news that nobody has noted by then are old


class Teller:
    """Tells at the start, at each change, and now and then. `news` makes the state as it is now."""

    def __init__(self, client: Client, news: Callable[[], WorkerNews]) -> None:
        self._client, self._news = client, news

    async def run(self) -> None:
        """Until cancelled. Never raises for an engine that does not answer."""
        told: list[object] | None = None
        told_at = 0.0
        wait = _LOOK
        while True:
            news = self._news()
            now = time.monotonic()
            if _essence(news) != told or now - told_at >= _AGAIN:
                if await self._tell(news):
                    told, told_at, wait = _essence(news), now, _BETWEEN
                else:
                    wait = min(_MOST_WAIT, max(_BETWEEN, wait * 2))
            else:
                wait = _LOOK
            await asyncio.sleep(wait)

    async def _tell(self, news: WorkerNews) -> bool:
        try:
            await bounded(
                self._client.start_workflow(
                    names.WF_WORKER_NEWS,
                    news,
                    id=names.worker_news_id(news.worker),
                    task_queue=names.CONTROL_QUEUE,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.TERMINATE_EXISTING,
                    execution_timeout=_VALID,
                )
            )
        except (EngineUnavailable, EngineRefused, RPCError, WorkflowAlreadyStartedError) as error:
            log.debug("news could not be told", extra={"reason": type(error).__name__})
            return False
        return True


def _essence(news: WorkerNews) -> list[object]:
    """What of the news is worth telling: how often a server has refused by now is not."""
    return [(model.model_id, model.error_code, model.breaker, model.since) for model in news.models]
