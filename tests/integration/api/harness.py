"""A running API for tests: through ASGI without a socket, or behind uvicorn on a real port."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
from fastapi import FastAPI

from api.app import create_app
from api.deps import Resources
from api.server import listen, serve_until_stopped
from perdure.contracts import AttemptRecord, Outcome, Projection, TaskResult, Usage
from perdure.keys import DEFAULT_SCOPES, create_key
from perdure.settings import ApiSettings
from perdure.store import Store
from perdure.task.states import Status

MODELS = """
[pools.local]
slots = 2

[pools.narrow]
max_waiting = { LOW = 2, NORMAL = 4 }

[models.chat]
pool = "local"
base_url = "http://127.0.0.1:9/v1"
max_input_bytes = 1000000
deadline_seconds = 86400

[models.small]
pool = "local"
base_url = "http://127.0.0.1:9/v1"
max_input_bytes = 200
max_tokens = 100

[models.simulated]
pool = "local"
executor = "simulated"

[models."narrow:1"]
pool = "narrow"
executor = "simulated"
"""
CHAT = {"model_id": "chat", "params": {"messages": [{"role": "user", "content": "hi"}]}}
SIMULATED: dict[str, Any] = {"model_id": "simulated", "params": {}}
LATER = "2027-06-01T00:00:00Z"  # a task that no dispatcher looks at


@dataclass
class Api:
    """A running app. `client` sends as the first key, or as dev."""

    client: httpx.AsyncClient
    settings: ApiSettings
    store: Store
    app: FastAPI | None = None
    server: asyncio.Task[None] | None = None
    told: bool = False

    def stop(self) -> None:
        """Sends SIGTERM once, as an operator does: a second one would hurry it."""
        assert self.server is not None
        if not self.server.done() and not self.told:
            os.kill(os.getpid(), signal.SIGTERM)
        self.told = True

    async def stopped(self) -> None:
        """Waits for the server's end."""
        assert self.server is not None
        await self.server

    @property
    def resources(self) -> Resources:
        assert self.app is not None
        found: Resources = self.app.state.resources
        return found

    async def key(
        self, user: str, scopes: Sequence[str] = DEFAULT_SCOPES, *, act_as: bool = False
    ) -> dict[str, str]:
        """The headers of a fresh key."""
        _, token = await create_key(self.store, user, scopes, act_as=act_as)
        return {"Authorization": f"Bearer {token}"}

    async def submit(self, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        """A task that is kept."""
        reply = await self.client.post("/v1/tasks", json={**SIMULATED, **more}, headers=headers or {})
        assert reply.status_code == 202, reply.text
        task: dict[str, Any] = reply.json()
        return task


@asynccontextmanager
async def running_app(settings: ApiSettings, store: Store) -> AsyncIterator[Api]:
    """The app with its lifespan, without a socket."""
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            yield Api(client, settings, store, app)


@asynccontextmanager
async def serving_app(settings: ApiSettings, store: Store) -> AsyncIterator[Api]:
    """The app behind uvicorn; ends by SIGTERM, as an operator ends it."""
    started = asyncio.Event()
    socket = listen(settings.host, 0)
    base_url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    server = asyncio.create_task(serve_until_stopped(settings, listening=socket, started=started))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait({server, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
        one = Api(client, settings, store, server=server)
        try:
            yield one
        finally:
            one.stop()
            await one.stopped()


async def move(store: Store, task_id: str, status: Status, version: int, **more: Any) -> None:
    """Writes a transition as the task's workflow would."""
    assert await store.tasks.project(Projection(task_id=task_id, version=version, status=status, **more))


async def finish(store: Store, task_id: str, status: Status = Status.COMPLETED, **more: Any) -> None:
    """Writes an outcome as the task's workflow would: one attempt that made `text`."""
    now = datetime.now(UTC)
    attempt = AttemptRecord(
        number=1, worker="gpu@test", started_at=now, ended_at=now, outcome="completed", output_tokens=2
    )
    projection = Projection(
        task_id=task_id,
        version=3,
        status=status,
        progress=100 if status is Status.COMPLETED else 0,
        attempts=[attempt],
        usage=Usage(prompt_tokens=10, completion_tokens=2, discarded_tokens=1),
        queued_at=now,
        started_at=now,
        **more,
    )
    result = TaskResult(text="done", finish_reason="stop", model="m") if status is Status.COMPLETED else None
    receipt = await store.tasks.commit(Outcome(projection=projection, result=result, completed_at=now))
    assert receipt.kind == "committed"
