"""Waiting for a condition that no event announces."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], *, seconds: float = 60, every: float = 0.02
) -> None:
    """Looks until the condition holds. Raises AssertionError after `seconds`, a generous bound."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        met = condition()
        if inspect.isawaitable(met):
            met = await met
        if met:
            return
        assert asyncio.get_running_loop().time() < end, (
            f"not within {seconds} s: {inspect.getsource(condition)}"
        )
        await asyncio.sleep(every)
