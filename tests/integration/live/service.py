"""One API on a real port and a real Postgres, with Temporal down: rows move as a test writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import httpx
import httpx2
import uvicorn

from api.app import create_app
from api.deps import Resources
from api.server import Server, listen
from perdure.contracts import Outcome, Projection, TaskResult
from perdure.keys import DEFAULT_SCOPES, create_key
from perdure.settings import ApiSettings
from perdure.store import Store
from perdure.task.states import Status
from tests.support.tasks import submit


@dataclass(frozen=True)
class Seen:
    """One event as an independent parser read it."""

    name: str
    id: str
    data: dict[str, Any]


@dataclass
class Service:
    """A running API. `client` sends as ann."""

    url: str
    client: httpx.AsyncClient
    store: Store
    server: Server
    serving: asyncio.Task[None]
    resources: Resources

    async def task(self, **changes: Any) -> str:
        """A task of ann's that no dispatcher touches for a day."""
        return await submit(self.store, not_before=datetime.now(UTC) + timedelta(days=1), **changes)

    async def queue(self, task_id: str, **more: Any) -> None:
        """Transition 1."""
        await self.store.tasks.project(
            Projection(task_id=task_id, version=1, status=Status.QUEUED, queued_at=datetime.now(UTC), **more)
        )

    async def finish(
        self, task_id: str, text: str = "done", status: Status = Status.COMPLETED, **more: Any
    ) -> None:
        """The outcome, as its workflow commits it."""
        projection = Projection(task_id=task_id, version=9, status=status, progress=100, **more)
        result = TaskResult(text=text)
        await self.store.tasks.commit(
            Outcome(projection=projection, result=result, completed_at=datetime.now(UTC))
        )

    @property
    def open_streams(self) -> float:
        """What the gauge says."""
        value: float = self.resources.metrics.sse_streams._value.get()
        return value

    @property
    def in_use(self) -> int:
        """Database connections that are out of the pool."""
        count: int = self.resources.store.engine.pool.checkedout()  # type: ignore[attr-defined]
        return count

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def request(self, path: str) -> bytes:
        """A GET of ann's as it goes over the wire."""
        key = self.client.headers["authorization"]
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\n\r\n".encode()

    async def key(self, user: str) -> dict[str, str]:
        _, token = await create_key(self.store, user, DEFAULT_SCOPES)
        return {"Authorization": f"Bearer {token}"}

    @asynccontextmanager
    async def stream(
        self, path: str, headers: dict[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[Seen]]:
        """A stream read by httpx2's parser, which shares nothing with ours."""
        sent = {**dict(self.client.headers), "accept": "text/event-stream", **(headers or {})}
        async with (
            httpx2.AsyncClient(trust_env=False, verify=False, timeout=60) as client,
            client.stream("GET", self.url + path, headers=sent) as response,
        ):
            assert response.status_code == 200, (await response.aread()).decode()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            yield self._events(response)

    async def _events(self, response: Any) -> AsyncIterator[Seen]:
        async for event in httpx2.EventSource(response):
            if event.data:
                yield Seen(event.event, event.id, event.json())

    async def read(
        self, path: str, headers: dict[str, str] | None = None, at_most: int = 10**6
    ) -> list[Seen]:
        """A stream's events up to its end, or so many."""
        found: list[Seen] = []
        async with self.stream(path, headers) as events:
            async for event in events:
                found.append(event)
                if len(found) >= at_most:
                    break
        return found


@asynccontextmanager
async def serving(
    settings: ApiSettings, store: Store, *, send_buffer: int | None = None
) -> AsyncIterator[Service]:
    """The app behind uvicorn, set up as in `api.server`, in this process. `send_buffer`: bytes which the OS
    takes of a connection before a write waits; by itself it takes megabytes."""
    app = create_app(settings)
    socket = listen(settings.host, 0)
    if send_buffer is not None:
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, send_buffer)  # connections inherit it
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="none",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, int(settings.grace_seconds - 3)),
    )
    started = asyncio.Event()
    server = Server(config, app, started)
    task = asyncio.create_task(server.serve(sockets=[socket]))
    await started.wait()
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=False) as client:
            service = Service(url, client, store, server, task, app.state.resources)
            client.headers.update(await service.key("ann"))
            yield service
    finally:
        server.should_exit = True
        await task
        socket.close()
