"""Whether the parts of a local stack answer: each function waits until one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client

from perdure import names

_PAUSE = 0.1
WORKFLOWS = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
ACTIVITIES = TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Waits until `check` is true; an error of the network counts as not yet."""
    while True:
        try:
            if await asyncio.wait_for(check(), 5):
                return
        except (OSError, httpx.HTTPError, TimeoutError, RuntimeError):
            pass
        await asyncio.sleep(_PAUSE)


async def page(http: httpx.AsyncClient, url: str) -> None:
    """Waits until a page answers 200."""

    async def check() -> bool:
        return (await http.get(url)).status_code == httpx.codes.OK

    await until(check)


async def workers(client: Client, queue: str, kind: TaskQueueType.ValueType, count: int) -> None:
    """Waits until so many workers poll a task queue."""

    async def check() -> bool:
        return len(await pollers(client, queue, kind)) >= count

    await until(check)


async def pollers(client: Client, queue: str, kind: TaskQueueType.ValueType) -> set[str]:
    """The identities of the workers that poll a queue."""
    answer = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind
        )
    )
    return {poller.identity for poller in answer.pollers}


async def everything(client: Client, http: httpx.AsyncClient, api: str, pools: dict[str, int]) -> None:
    """Waits until the API is ready and every worker polls. `pools`: workers by pool."""
    await asyncio.gather(
        page(http, f"{api}/readyz"),
        workers(client, names.CONTROL_QUEUE, WORKFLOWS, 1),
        workers(client, names.CONTROL_QUEUE, ACTIVITIES, 1),
        workers(client, names.CALLBACKS_QUEUE, ACTIVITIES, 1),
        *(workers(client, names.pool_queue(pool), ACTIVITIES, count) for pool, count in pools.items()),
    )
