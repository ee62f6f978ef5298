"""Whether the server orders tasks exactly, looked at once beside the start of a process and said in words.

    asyncio.create_task(say_what_order_lacks(client, EngineProbe, catalogue.pools))

The server accepts unknown settings without a word, so the order is measured, on a queue of its own. Nothing
waits for it, and the product works without: the named loss is all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from temporalio.client import Client
from temporalio.service import RPCError

from perdure import names
from perdure.probe import Order, measure_order, partitions
from perdure.temporal import EngineUnavailable

log = logging.getLogger(__name__)

_DELAY: Final = 5.0  # seconds: the start itself comes first
_AGAIN: Final = 5.0  # seconds between tries while Temporal does not answer
_TIME: Final = 60.0  # seconds for the measurement
REMEDY: Final = (
    "set it in the server's dynamic configuration as deploy/temporal/dynamicconfig.yaml does "
    "(docs/architecture.md says how on a live cluster)"
)


async def say_what_order_lacks(
    client: Client | Callable[[], Awaitable[Client]],
    workflow: type[Any],
    pools: Iterable[str],
    *,
    delay: float = _DELAY,
) -> None:
    """Waits for Temporal, looks once, and logs what is missing. Never raises but for its own cancel.

    `client`: one that is not lazy, or what gives one, or raises EngineUnavailable and is asked again.
    `workflow` is workflows.probe.EngineProbe.
    """
    await asyncio.sleep(delay)
    while not isinstance(client, Client):
        try:
            client = await client()
        except EngineUnavailable:
            log.debug("the engine's order is looked at when it answers")
            await asyncio.sleep(_AGAIN)
    try:
        async with asyncio.timeout(_TIME):
            missing = await order_lacks(client, workflow, pools)
    except (RPCError, TimeoutError, RuntimeError) as error:
        log.info("the engine's order could not be measured", extra={"reason": type(error).__name__})
        return
    for words in missing:
        log.warning(words)
    if not missing:
        log.info("the engine orders tasks exactly by class, and shares among users")


async def order_lacks(client: Client, workflow: type[Any], pools: Iterable[str]) -> list[str]:
    """What keeps the order of tasks from being exact, in words with the remedy. Raises RPCError."""
    counts = {pool: await partitions(client, names.pool_queue(pool)) for pool in pools}
    return in_words(counts, await measure_order(client, workflow))


def in_words(counts: dict[str, int], order: Order) -> list[str]:
    """`counts`: partitions of each pool's queue; `order`: as measured on a queue that is no pool's. Pure."""
    split = [pool for pool, count in counts.items() if count != 1]
    if not split and counts and order.partitions != 1:
        return [
            "the server's matching settings are held to the pool queues, so only their partitions (1) can be "
            "seen from outside: see that matching.enableFairness is set for them too"
        ]
    found = [f"{loss.what}; set {', '.join(loss.keys)}: {REMEDY}" for loss in order.losses()]
    if split and order.partitions == 1:
        keys = "matching.numTaskqueueReadPartitions and matching.numTaskqueueWritePartitions"
        found.append(
            f"priority is only approximate in pools {', '.join(split)}: their queues have several "
            f"partitions; set {keys} to 1 for them: {REMEDY}"
        )
    return found
