"""Model functions for the tests of the python executor inside the activity."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any


async def breaks(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    """Raises with the prompt in its message."""
    yield "a"
    raise RuntimeError(f"could not handle {params}")


async def ignores_cancel(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    """Swallows a cancel for some seconds."""
    end = time.monotonic() + params["seconds"]
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            pass
    yield "done"
