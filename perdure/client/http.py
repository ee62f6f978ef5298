"""The client's calls and streams over HTTP."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self

import httpx

from perdure.client.errors import ApiRefused, ClientError, Unreachable
from perdure.client.frames import FINAL_STATES, Event, Frames, Task

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_SILENCE: Final = 45.0  # seconds without even a comment line: the stream is dead
_MAX_PAUSE: Final = 10.0


class Client:
    """Speaks to one API. `patience` is how many seconds a call goes on trying while nobody answers."""

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 30.0,
        patience: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = (url or os.environ.get("PERDURE_URL") or DEFAULT_URL).rstrip("/")
        key = api_key if api_key is not None else os.environ.get("PERDURE_API_KEY")
        self.patience = patience
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=timeout,
                transport=transport,
                trust_env=False,
                verify=self.url.startswith("https:"),  # reading the system's certificates takes 0.1 s
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise Unreachable(f"{self.url} is no address of an API ({error}); set PERDURE_URL") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    # Calls ---------------------------------------------------------------------------------------

    async def submit(
        self, body: Mapping[str, Any], *, wait: int | None = None, idempotency_key: str | None = None
    ) -> Task:
        """Submits a task; with `wait` (seconds, at most 60) the answer is held until it is final."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex, **_prefer(wait)}
        return await self._call("POST", "/v1/tasks", wait=wait, json=dict(body), headers=headers)

    async def get(self, task_id: str, *, include: Sequence[str] = (), wait: int | None = None) -> Task:
        """The task as it is; with `wait` (seconds, at most 60) once it is final."""
        params = {"include": ",".join(include)} if include else {}
        path = f"/v1/tasks/{_segment(task_id)}"
        return await self._call("GET", path, wait=wait, params=params, headers=_prefer(wait))

    async def list(self, **filters: Any) -> Task:
        """One page, newest first: `data`, `next_cursor`, `has_more`. Filters as in `GET /v1/tasks`."""
        return await self._call(
            "GET", "/v1/tasks", params={k: v for k, v in filters.items() if v is not None}
        )

    async def cancel(self, task_id: str, reason: str | None = None) -> Task:
        """Asks for a cancel and returns the task. ApiRefused `task-already-finished` when it is too late."""
        body = {"reason": reason} if reason else {}
        return await self._call("POST", f"/v1/tasks/{_segment(task_id)}/cancel", json=body)

    async def models(self) -> Task:
        """`GET /v1/models`."""
        return await self._call("GET", "/v1/models")

    async def finished(self, task_id: str, *, include: Sequence[str] = ()) -> Task:
        """The task once it is final, however long that takes."""
        while True:
            task = await self.get(task_id, include=include, wait=55)
            if task["status"] in FINAL_STATES:
                return task

    async def _call(self, method: str, path: str, *, wait: int | None = None, **options: Any) -> Task:
        """One call, made again while the API is away or busy. All calls of this client may be repeated."""
        end = time.monotonic() + self.patience
        timeout = httpx.Timeout(30.0 + (wait or 0), connect=5.0)
        pause = 0.25
        while True:
            try:
                answer = await self._http.request(method, path, timeout=timeout, **options)
                if answer.is_success:
                    return _task(answer)
                failure: ClientError = _problem(answer)
                again = answer.status_code in (429, 502, 503, 504)
            except (httpx.TransportError, httpx.InvalidURL, ValueError) as error:
                failure = Unreachable(f"{self.url} does not answer ({_reason(error)})")
                again = isinstance(error, httpx.TransportError)
            asked = failure.retry_after if isinstance(failure, ApiRefused) else None
            pause = max(pause, asked or 0.0)
            if not again or time.monotonic() + pause > end:
                raise failure
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    # Streams -------------------------------------------------------------------------------------

    async def watch(
        self, task_id: str, *, partial: bool = False, last_event_id: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """The task's events up to its final one, over as many connections as it takes. Ends at once when
        `last_event_id` is the final event's. Raises ClientError."""
        path = f"/v1/tasks/{_segment(task_id)}/events"
        params = {"include": "partial"} if partial else {}
        async with aclosing(self._stream(path, params, last_event_id)) as events:
            async for event in events:
                yield event
                if event.final:
                    return

    async def watch_all(
        self, *, last_event_id: str | None = None, **filters: Any
    ) -> AsyncGenerator[Event, None]:
        """Events of all the caller's tasks, without end. Filters: `status`, `model_id`."""
        params = {name: value for name, value in filters.items() if value is not None}
        async with aclosing(self._stream("/v1/events", params, last_event_id)) as events:
            async for event in events:
                yield event

    async def _stream(
        self, path: str, params: Mapping[str, Any], last: str | None
    ) -> AsyncGenerator[Event, None]:
        pause = 0.25
        away_since: float | None = None
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last else {})}
            failure: ClientError
            asked = 0.0
            try:
                async with self._http.stream(
                    "GET", path, params=params, headers=headers, timeout=httpx.Timeout(_SILENCE, connect=5.0)
                ) as answer:
                    if answer.status_code == httpx.codes.NO_CONTENT:
                        return
                    if not answer.is_success:
                        await answer.aread()
                        refused = _problem(answer)
                        if answer.status_code not in (429, 502, 503, 504):
                            raise refused
                        failure, asked = refused, refused.retry_after or 0.0
                    else:
                        frames = Frames()
                        async for chunk in answer.aiter_bytes():
                            away_since, pause = None, 0.25
                            for event in frames.feed(chunk):
                                last = event.id or last
                                yield event
                        failure = Unreachable(f"{self.url} ended the stream")
                        asked = frames.retry
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure = Unreachable(f"{self.url} does not answer ({_reason(error)})")
            now = time.monotonic()
            away_since = away_since or now
            pause = min(_MAX_PAUSE, max(pause, asked))
            if now + pause - away_since > self.patience:
                raise failure
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)


def _prefer(wait: int | None) -> dict[str, str]:
    return {"Prefer": f"wait={wait}"} if wait else {}


def _segment(task_id: str) -> str:
    """A task id as one path segment; what cannot be an id belongs to nobody."""
    if not task_id.isascii() or not task_id.replace("_", "").isalnum():
        raise ApiRefused(404, "task-not-found", "There is no such task.")
    return task_id


def _task(answer: httpx.Response) -> Task:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unreachable(f"{answer.url.host} answers, but not as a Perdure API; check PERDURE_URL")
    return value


def _problem(answer: httpx.Response) -> ApiRefused:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {}
    code = str(body.get("code") or f"http-{answer.status_code}")
    return ApiRefused(answer.status_code, code, str(body.get("detail") or ""), _retry_after(answer))


def _retry_after(answer: httpx.Response) -> float | None:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
