"""What every row stands on: a stack, its API, rows, a receiver and a model server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

import asyncpg  # type: ignore[import-untyped]
import orjson

from bench.client import Api
from bench.servers import ModelServer, Receiver
from bench.stack import Stack

_BULK = 500
OPEN = ("PENDING", "QUEUED", "PROCESSING")
_COLUMNS = (
    "task_id, status, priority, metadata, extract(epoch FROM created_at)::float8 AS created,"
    " extract(epoch FROM started_at)::float8 AS started,"
    " extract(epoch FROM completed_at)::float8 AS completed,"
    " extract(epoch FROM updated_at)::float8 AS updated"
)

SINGLE = """
[pools.zero]
slots = 8
[pools.four]
slots = 4
[pools.shared]
slots = 4
scheduling = "weighted"
[pools.ageing]
slots = 4
max_wait = 3
[pools.wide]
slots = 1
window = 2000
[models.zero]
pool = "zero"
executor = "simulated"
[models.four]
pool = "four"
executor = "simulated"
[models.shared]
pool = "shared"
executor = "simulated"
[models.ageing]
pool = "ageing"
executor = "simulated"
[models.wide]
pool = "wide"
executor = "simulated"
[models.stream]
pool = "four"
base_url = "{model_url}"
"""
DOUBLE = """
[pools.two]
slots = 2
[models.two]
pool = "two"
executor = "simulated"
[models.stream]
pool = "two"
base_url = "{model_url}"
resume = "trailing"
"""


@dataclass(frozen=True)
class Kind:
    """What stack a row needs: models.toml (with {model_url}), GPU workers of each pool, drain time."""

    name: str
    models: str
    gpu_workers: int = 1
    drain_seconds: float = 2.0


ONE_WORKER = Kind("one GPU worker per pool", SINGLE)
TWO_WORKERS = Kind("two GPU workers per pool", DOUBLE, 2)


class Ground:
    """Everything a row needs. Users are labels: each part of a row submits as a user of its own."""

    def __init__(self, kind: Kind, *, quick: bool, say: Callable[[str], None]) -> None:
        self.kind, self.quick, self.say = kind, quick, say
        self._stack = AsyncExitStack()
        self._labels = 0

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        try:
            self.receiver = await enter(Receiver())
            self.models = await enter(ModelServer())
            text = self.kind.models.replace("{model_url}", self.models.base_url)
            drain = {"PERDURE_DRAIN_SECONDS": str(self.kind.drain_seconds)}
            self.stack = await enter(Stack(text, gpu_workers=self.kind.gpu_workers, env=drain))
            self.api = Api(self.stack.url("api"), connections=32)
            self._stack.push_async_callback(self.api.aclose)
            rows = asyncpg.create_pool(self.stack.database_url, min_size=1, max_size=4)
            self.rows = await enter(rows)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def label(self, what: str) -> str:
        """A name that no other part uses."""
        self._labels += 1
        return f"{what}-{self._labels}"

    def often(self, full: int, quick: int) -> int:
        """How often, by --quick."""
        return quick if self.quick else full

    # Tasks ----------------------------------------------------------------------------------------------
    async def submit(self, body: dict[str, Any]) -> str:
        """Submits one task; its id."""
        return str((await self.api.expect(202, "POST", "/v1/tasks", body))["task_id"])

    async def submit_all(self, bodies: Sequence[dict[str, Any]]) -> list[str]:
        """Submits many by bulk, in order; their ids."""
        ids: list[str] = []
        for first in range(0, len(bodies), _BULK):
            part = {"tasks": bodies[first : first + _BULK]}
            answer = await self.api.expect(202, "POST", "/v1/tasks/bulk", part)
            entries = answer["tasks"] if "tasks" in answer else answer["data"]
            ids += [str(entry["task_id"]) for entry in entries]
        return ids

    async def cancel_all(self, *users: str) -> None:
        """Cancels what is left of these users and waits until it is final."""
        for user in users:
            body = {"user_id": user, "reason": "the row is measured"}
            while (await self.api.expect(202, "POST", "/v1/tasks/cancel", body))["has_more"]:
                pass
            await self.ended(user, seconds=600)

    async def count(self, user: str, *states: str) -> int:
        sql = "SELECT count(*) FROM tasks WHERE user_id = $1 AND status = ANY($2)"
        return int(await self.rows.fetchval(sql, user, list(states)))

    async def ended(self, user: str, *, seconds: float, every: float = 0.05) -> float:
        """Waits until none of a user's tasks is open; the time (perf_counter) when that was seen."""
        end = time.perf_counter() + seconds
        while left := await self.count(user, *OPEN):
            if time.perf_counter() > end:
                raise TimeoutError(f"{left} tasks of {user} are not final after {seconds:.0f} s")
            await asyncio.sleep(every)
        return time.perf_counter()

    async def reached(self, user: str, state: str, count: int, *, seconds: float) -> None:
        """Waits until so many of a user's tasks are in a state."""
        end = time.perf_counter() + seconds
        while await self.count(user, state) < count:
            if time.perf_counter() > end:
                raise TimeoutError(f"{user}: fewer than {count} tasks {state} after {seconds:.0f} s")
            await asyncio.sleep(0.02)

    async def tasks(self, user: str) -> list[dict[str, Any]]:
        """A user's rows with times in seconds (None where not yet), in the order of their start."""
        found = await self.rows.fetch(f"SELECT {_COLUMNS} FROM tasks WHERE user_id = $1", user)
        rows = [dict(row) | {"metadata": orjson.loads(row["metadata"])} for row in found]
        return sorted(rows, key=lambda row: row["started"] or time.time())


def lasting(model: str, user: str, seconds: float, priority: str = "NORMAL") -> dict[str, Any]:
    """The body of a task that takes so long on a simulated model; 0 is no work at all."""
    tokens = max(1, int(seconds)) if seconds else 0
    params = {"tokens": tokens, "tokens_per_second": tokens / seconds} if seconds else {"tokens": 0}
    return {"model_id": model, "params": params, "user_id": user, "priority": priority}


def streaming(label: str, user: str, tokens: int, rate: float, *, silent: bool = False) -> dict[str, Any]:
    """The body of a task on the bench's model server."""
    order = orjson.dumps({"label": label, "tokens": tokens, "rate": rate, "silent": silent}).decode()
    params = {"messages": [{"role": "user", "content": order}], "max_tokens": max(1, tokens)}
    return {"model_id": "stream", "params": params, "user_id": user}
