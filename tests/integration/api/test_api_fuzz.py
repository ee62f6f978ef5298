"""Malformed and odd requests of every kind: always a problem or a kept task, never a 500."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.api.harness import CHAT, Api

PLAIN: dict[str, Any] = {
    **CHAT,
    "task_type": "chat",
    "priority": "LOW",
    "max_retries": 1,
    "callback_url": "https://example.com/",
    "callback_events": ["FAILED"],
    "metadata": {"a": "b"},
    "user_id": "dev",
    "queue_timeout_seconds": 5,
    "timeout_seconds": 5,
    "deadline_seconds": 5,
    "not_before": "2027-06-01T00:00:00Z",
}
ODD = [
    None, True, False, 0, -1, 1.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), "", " ", "x" * 70_000,
    "\u0001", "\u007f", "\u0085", "\u2028", "\ufeff", "\ufffe", "🙂" * 300, "e\u0301", "../../etc/passwd",
    "%00", "${jndi:ldap://x}", "'; DROP TABLE tasks; --", "<script>", "a\r\nb", "\x1b[31m", [], {}, [None],
    [[]], {"": ""}, {"$ne": None}, {"__proto__": {}}, ["HIGH"], {"a": {"b": {}}}, [1] * 5000, "NaN", "null",
    "2026-12-01",
]  # fmt: skip
RAW = [
    b"", b" ", b"null", b"[]", b"{}", b"{", b"}", b'"', b"\x00", b"\xff", b"\xef\xbb\xbf{}", b"{}\x00",
    b"{} {}", b'{"a":1,"a":2}', b"NaN", b"[NaN]", b"-", b"1e999", b"[" * 70, b"[" * 100_000,
    b'{"a":' * 70 + b"1" + b"}" * 70, b'{"\\u0000":1}', b'{"a":"\\ud800"}', b'{"a":' + b"9" * 5000 + b"}",
    b'{"model_id":"chat","params":{"a":1e400}}',
    b"\x1f\x8b\x08\x00", b"a=b&c=d", b"<xml/>", b"--x\r\n", "{“a”: 1}".encode(), '{"a": 1}'.encode("utf-32"),
]  # fmt: skip
ROUTES = ["/v1/tasks", "/v1/tasks/bulk", "/v1/tasks/cancel", "/v1/callbacks/redeliver", "/codec/decode"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body, the body itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def put(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(body)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return changed


async def check(api: Api, method: str, path: str, **request: Any) -> int:
    reply = await api.client.request(method, path, **request)
    assert reply.status_code < 500, (method, path, request, reply.text)
    if reply.status_code >= 400:
        problem = reply.json()
        assert reply.headers["Content-Type"] == "application/problem+json"
        assert problem["status"] == reply.status_code
        assert problem["code"]
        assert len(reply.content) < 20_000  # no echo of what came in
    return reply.status_code


async def test_every_field_with_every_odd_value(api: Api) -> None:
    statuses = set()
    for path in places(PLAIN):
        for odd in ODD:
            statuses.add(await check(api, "POST", "/v1/tasks", json=put(PLAIN, path, odd)))
    assert statuses <= {202, 413, 422}
    assert {202, 422} <= statuses


async def test_every_key_replaced_by_odd_text(api: Api) -> None:
    for path in places(PLAIN):
        if isinstance(path[-1], int):
            continue
        for odd in ODD:
            if isinstance(odd, str):
                await check(api, "POST", "/v1/tasks", json=put(PLAIN, (*path[:-1], odd), "x"))


@pytest.mark.parametrize("route", ROUTES)
async def test_raw_bodies(api: Api, route: str) -> None:
    for kind in ("application/json", "text/plain", "", "application/json; charset=latin-1", "x" * 5000):
        for body in RAW:
            status = await check(api, "POST", route, content=body, headers={"Content-Type": kind})
            assert status in (400, 415, 422)


async def test_odd_queries_and_headers(api: Api) -> None:
    names = [
        "limit",
        "cursor",
        "status",
        "priority",
        "created_after",
        "metadata.a",
        "include",
        "user_id",
        "x",
    ]
    headers = [
        "Prefer",
        "If-None-Match",
        "Idempotency-Key",
        "Last-Event-ID",
        "X-Forwarded-For",
        "Perdure-User",
    ]
    texts = [odd[:5000] for odd in ODD if isinstance(odd, str)]
    for text in texts:
        for name in names:
            await check(api, "GET", "/v1/tasks", params={name: text})
        for header in headers:
            value = text.encode()[:2000].replace(b"\r", b"").replace(b"\n", b"")
            await check(api, "GET", "/v1/tasks", headers=[(header.encode(), value)])
            await check(api, "POST", "/v1/tasks", json=CHAT, headers=[(header.encode(), value)])


async def test_damaged_bodies(api: Api) -> None:
    """A sound body with bytes flipped, cut out and doubled; seeded."""
    dice = random.Random(7)
    sound = json.dumps(PLAIN).encode()
    for _ in range(400):
        body = bytearray(sound)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(body))
            kind = dice.randrange(3)
            if kind == 0:
                body[at] = dice.randrange(256)
            elif kind == 1:
                del body[at : at + dice.randint(1, 20)]
            else:
                body[at:at] = body[at : at + dice.randint(1, 20)]
        await check(
            api, "POST", "/v1/tasks", content=bytes(body), headers={"Content-Type": "application/json"}
        )
