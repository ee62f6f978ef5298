"""The server on a real port: bodies as they arrive on the wire, odd headers, and how it stops."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterable

import pytest

from api.server import PortTaken, listen
from perdure.settings import ApiSettings
from perdure.store import Store
from tests.integration.api.harness import LATER, SIMULATED, Api, serving_app

MIB = 1024 * 1024


async def raw(api: Api, *parts: bytes, pause: float = 0.0) -> tuple[int, dict[str, str], bytes]:
    """Sends bytes and reads one reply: (status, headers, body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.client.base_url.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        async with asyncio.timeout(20):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, *lines = head.rstrip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    finally:
        writer.close()
    return int(status.split(" ")[1]), headers, body


def head(api: Api, *lines: str, path: str = "/v1/tasks", key: bool = True) -> bytes:
    auth = [f"Authorization: {api.client.headers['Authorization']}"] if key else []
    text = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *auth, *lines])
    return text.encode("latin-1") + b"\r\n\r\n"


def chunks(data: bytes, size: int = 65_536) -> Iterable[bytes]:
    for start in range(0, len(data), size):
        part = data[start : start + size]
        yield b"%x\r\n%b\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


JSON = "Content-Type: application/json"
BODY = json.dumps(SIMULATED).encode()


async def test_a_chunked_body_is_read_and_bounded(served: Api) -> None:
    status, headers, body = await raw(
        served, head(served, JSON, "Transfer-Encoding: chunked"), *chunks(BODY, 7), pause=0.001
    )
    assert (status, json.loads(body)["status"]) == (202, "PENDING")
    assert headers["content-type"] == "application/json"
    big = b'{"model_id": "chat", "params": {"x": "' + b"y" * (2 * MIB) + b'"}}'
    status, headers, body = await raw(served, head(served, JSON, "Transfer-Encoding: chunked"), *chunks(big))
    assert (status, json.loads(body)["code"]) == (413, "body-too-large")
    assert headers["content-type"] == "application/problem+json"


async def test_a_large_content_length_is_refused_unread(served: Api) -> None:
    started = time.monotonic()
    status, headers, body = await raw(served, head(served, JSON, f"Content-Length: {100 * MIB}"))
    assert (status, json.loads(body)["code"]) == (413, "body-too-large")
    assert headers["content-type"] == "application/problem+json"
    assert time.monotonic() - started < 10
    status, _, body = await raw(
        served, head(served, JSON, f"Content-Length: {17 * MIB}", path="/v1/tasks/bulk")
    )
    assert (status, json.loads(body)["limit"]) == (413, 16 * MIB)


async def test_without_a_key_no_body_is_read(served: Api) -> None:
    for lines in ([f"Content-Length: {100 * MIB}"], ["Transfer-Encoding: chunked"]):
        status, headers, body = await raw(served, head(served, JSON, *lines, key=False))
        assert (status, json.loads(body)["code"]) == (401, "unauthorized")
        assert headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("length", ["-1", "abc", "1e3", "9" * 40, "5, 6"])
async def test_a_wrong_content_length_is_no_500(served: Api, length: str) -> None:
    try:
        status, _, _ = await raw(served, head(served, JSON, f"Content-Length: {length}"), BODY)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return  # the server hung up on what is no HTTP
    assert status in (400, 413)


async def test_encodings_and_types_that_are_not_taken(served: Api) -> None:
    bomb = gzip.compress(b"[" * (10 * MIB))
    cases = [
        ([JSON, "Content-Encoding: gzip"], bomb, "unsupported-encoding"),
        ([JSON, "Content-Encoding: br"], BODY, "unsupported-encoding"),
        (["Content-Type: text/plain"], BODY, "unsupported-media-type"),
        (["Content-Type: application/x-www-form-urlencoded"], b"a=b", "unsupported-media-type"),
        (["Content-Type: application/json; charset=utf-16"], BODY, "unsupported-media-type"),
        (["Content-Type: multipart/form-data; boundary=x"], BODY, "unsupported-media-type"),
        ([], BODY, "unsupported-media-type"),
    ]
    for lines, body, code in cases:
        length = f"Content-Length: {len(body)}"
        status, _, reply = await raw(served, head(served, *lines, length), body)
        assert (status, json.loads(reply)["code"]) == (415, code), lines
    for kind in ("application/json; charset=UTF-8", "application/vnd.x+json", "Application/JSON"):
        reply2 = await served.client.post("/v1/tasks", content=BODY, headers={"Content-Type": kind})
        assert reply2.status_code == 202, kind


async def test_a_client_that_leaves_in_the_middle_of_its_body(served: Api) -> None:
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", served.client.base_url.port)
        writer.write(head(served, JSON, "Content-Length: 1000") + b'{"model_id"')
        await writer.drain()
        writer.close()
    assert (await served.client.get("/v1/tasks")).json()["data"] == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-DEF_1.2", True),
        (b"x" * 128, True),
        (b"", False),
        (b"x" * 129, False),
        (b"x" * 50_000, False),
        (b"a b", False),
        (b"a%0d%0aERROR", False),
        (b"a\xc2\x85b", False),
        (b"caf\xe9", False),
        (b"red;31m", False),
    ],
)
async def test_request_ids_are_echoed_or_replaced(served: Api, given: bytes, kept: bool) -> None:
    line = b"\r\nX-Request-Id: " + given
    request = head(served, JSON, "Content-Length: 2").replace(b"\r\n\r\n", line + b"\r\n\r\n")
    status, headers, body = await raw(served, request, b"{}")
    assert status == 422
    answered = headers["x-request-id"]
    assert json.loads(body)["request_id"] == answered
    assert (answered == given.decode("latin-1")) is kept
    assert answered.isascii()
    assert 1 <= len(answered) <= 128


async def test_every_reply_is_marked(served: Api) -> None:
    for path in ("/v1/tasks", "/v1/tasks/x", "/nowhere", "/healthz"):
        reply = await served.client.get(path)
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["X-Request-Id"]
        assert "Server" not in reply.headers


async def test_it_stops_while_streams_are_open(settings: ApiSettings, store: Store) -> None:
    async with serving_app(settings.model_copy(update={"grace_seconds": 8}), store) as one:
        task = await one.submit(not_before=LATER)
        streams = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", one.client.base_url.port)
            writer.write(f"GET {task['links']['events']} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await reader.readuntil(b"event: task-update")
            streams.append((reader, writer))
        waiting = asyncio.create_task(one.client.get(task["links"]["self"], headers={"Prefer": "wait=60"}))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        one.stop()
        reply = await waiting
        assert (reply.status_code, reply.json()["status"]) == (200, "PENDING")
        for reader, writer in streams:
            rest = await asyncio.wait_for(reader.read(), 8)
            assert rest.endswith(b"0\r\n\r\n")  # a clean end: the client knows that it saw everything sent
            writer.close()
        await one.stopped()
        assert time.monotonic() - started < 8


async def test_an_open_service_answers_to_this_machine_only(settings: ApiSettings, store: Store) -> None:
    async with serving_app(settings, store) as one:
        for host, status in (
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("[::1]:80", 200),
            ("perdure:8000", 200),  # a bare word: no page on the web has such a name
            ("evil.test", 403),
            ("evil.test.", 403),
            ("192.0.2.7", 403),
            ("[2001:db8::7]", 403),
        ):
            reply = await one.client.get("/v1/tasks", headers={"Host": host})
            assert reply.status_code == status, host
        problem = reply.json()
        assert (problem["code"], problem["request_id"]) == ("foreign-host", reply.headers["x-request-id"])


def test_a_taken_port_is_said_in_words() -> None:
    with listen("127.0.0.1", 0) as held, pytest.raises(PortTaken, match="PERDURE_PORT"):
        listen("127.0.0.1", held.getsockname()[1])
