"""A model function that takes its worker down, as a driver fault or the kernel's memory killer does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any


async def kill(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    """Says a word, lives long enough to be announced, and dies."""
    yield "dying "
    await asyncio.sleep(0.4)
    os.kill(os.getpid(), signal.SIGKILL)
