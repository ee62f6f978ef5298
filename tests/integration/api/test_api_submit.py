"""Submitting: what is kept, what is refused, what a repeat gives."""

from __future__ import annotations

from typing import Any


async def test_a_submit_is_kept(api: Any) -> None:
    reply = await api.client.post("/v1/tasks", json={"model_id": "simulated", "params": {"tokens": 5}})
    assert reply.status_code == 202, reply.text
    print(reply.text, reply.headers)
    got = await api.client.get(reply.headers["Location"])
    print(got.text, got.headers)
