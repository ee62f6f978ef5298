"""Tasks of every kind, submitted through outages, and watched to their ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.stack import Stack

FINAL = ("COMPLETED", "FAILED", "CANCELLED")


@dataclass
class Accepted:
    """A task that was answered 202, and what it must become. `words`: None where it has no one right text."""

    task_id: str
    model: str
    words: int
    callback: bool
    cancel: bool = False
    must_fail: bool = False


@dataclass
class Load:
    """Submits tasks at a pace that spreads them over the faults."""

    stack: Stack
    rng: random.Random
    count: int
    receiver_url: str
    pace: float = 12.0  # submits a second
    accepted: dict[str, Accepted] = field(default_factory=dict)
    refused_for_now: int = 0
    odd: list[str] = field(default_factory=list)  # answers that no caller should see

    async def run(self, enough: asyncio.Event) -> None:
        """`count` tasks, and more until there is `enough`."""
        async with self.client() as client:
            while len(self.accepted) < self.count or not enough.is_set():
                await self._submit(client)
                await asyncio.sleep(self.rng.expovariate(self.pace))
                if self.rng.random() < 0.08 and self.accepted:
                    await self._cancel(client, self.rng.choice(list(self.accepted.values())))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.stack.url("api"), timeout=20)

    async def _submit(self, client: httpx.AsyncClient) -> None:
        """The same key until it is answered: an unknown outcome tried again is one task all the same."""
        rng = self.rng
        words = rng.choice([0, 5, 20, 60, 120])
        model = rng.choice(["simulated", "scripted"])
        body: dict[str, Any] = {
            "model_id": model,
            "priority": rng.choice(["HIGH", "NORMAL", "LOW"]),
            "user_id": rng.choice(["ann", "bob", "cid"]),
            "max_retries": 20,
        }
        must_fail = False
        if model == "simulated":
            body["params"] = {"tokens": words, "tokens_per_second": 40}
            if rng.random() < 0.1:
                must_fail = True
                body["params"]["fault"] = {"code": "invalid_request", "after_tokens": 0}
        else:
            words = max(1, words)
            body["params"] = {
                "max_tokens": words,
                "messages": [{"role": "user", "content": "count for me please"}],
            }
        callback = rng.random() < 0.7
        if callback:
            body["callback_url"] = self.receiver_url
        key = str(uuid.UUID(int=rng.getrandbits(128)))
        while True:
            with contextlib.suppress(httpx.TransportError):
                reply = await client.post("/v1/tasks", json=body, headers={"Idempotency-Key": key})
                if reply.status_code == 202:
                    task_id = reply.json()["task_id"]
                    self.accepted[task_id] = Accepted(task_id, model, words, callback, must_fail=must_fail)
                    return
                self._note(reply, 503, 409)
                self.refused_for_now += 1
            await asyncio.sleep(0.2)

    def _note(self, reply: httpx.Response, *expected: int) -> None:
        if reply.status_code not in expected:
            self.odd.append(
                f"{reply.request.method} {reply.request.url.path} {reply.status_code} {reply.text}"
            )

    async def _cancel(self, client: httpx.AsyncClient, task: Accepted) -> None:
        with contextlib.suppress(httpx.TransportError):
            reply = await client.post(f"/v1/tasks/{task.task_id}/cancel", json={"reason": "chaos"})
            self._note(reply, 202, 409, 503)
            if reply.status_code == 202:
                task.cancel = True
