"""One try against receivers of every temper. Time and bytes are bounded by the clock."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.callback.answer import Answer
from perdure.callback.guard import GuardPolicy
from perdure.callback.sender import Sender
from perdure.callback.sign import signed_headers
from tests.support.certificates import make_certificate, server_context, trusting_context
from tests.support.receiver import HANG, RESET, Names, Receiver, Reply, answer, drip, head

POLICY = GuardPolicy(nets=(ipaddress.ip_network("127.0.0.0/8"),), http=True, ports=frozenset())
BODY = '{"text":"é\u2028😀"}'.encode()
SECRET_HEADERS = signed_headers(
    delivery_id="msg_1", event="COMPLETED", body=BODY, keys=[b"k" * 32], at=1_700_000_000, number=1
)


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    made = Sender(POLICY)
    yield made
    await made.aclose()


@pytest.fixture
async def hasty() -> AsyncIterator[Sender]:
    """One with a total time of a second, so that waiting for it is short."""
    made = Sender(POLICY, total_seconds=1.0, connect_seconds=0.5)
    yield made
    await made.aclose()


async def one(sender: Sender, reply: Reply) -> Answer:
    async with Receiver([reply]) as receiver:
        return await sender.send(receiver.url(), BODY, SECRET_HEADERS)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (200, "delivered"), (201, "delivered"), (202, "delivered"), (204, "delivered"), (299, "delivered"),
        (300, "failed"), (301, "failed"), (302, "failed"), (307, "failed"), (308, "failed"),
        (400, "failed"), (401, "failed"), (404, "failed"), (408, "failed"), (409, "failed"), (410, "dead"),
        (422, "failed"), (429, "failed"), (500, "failed"), (502, "failed"), (503, "failed"), (599, "failed"),
    ],
)  # fmt: skip
async def test_the_table_of_statuses(sender: Sender, status: int, verdict: str) -> None:
    got = await one(sender, answer(status, b"" if status == 204 else b"said"))
    assert (got.verdict, got.status) == (verdict, status)
    assert got.outcome == ("success" if verdict == "delivered" else "http_error")
    assert (got.error is None) == (verdict == "delivered")
    assert got.sample == (None if status == 204 else "said")
    assert got.address == "127.0.0.1"
    assert got.error is None or str(status) in got.error


async def test_what_arrives_is_what_was_given(sender: Sender) -> None:
    async with Receiver() as receiver:
        await sender.send(receiver.url("/hook?tenant=é&x=1"), BODY, SECRET_HEADERS)
        (request,) = receiver.requests
    assert request.method == "POST"
    assert request.target == "/hook?tenant=%C3%A9&x=1"
    assert request.body == BODY
    assert {name: request[name] for name in SECRET_HEADERS} == SECRET_HEADERS
    assert request["content-length"] == str(len(BODY))
    names = [name.lower() for name, _ in request.headers]
    assert len(names) == len(set(names)) == len(SECRET_HEADERS) + 2  # and Host and Content-Length


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_refused_and_says_what_to_do(sender: Sender, status: int) -> None:
    async with Receiver() as target:
        got = await one(sender, answer(status, headers={"Location": target.url()}))
        assert target.connections == 0
    assert got.error is not None
    assert "final URL" in got.error


@pytest.mark.parametrize(
    ("value", "expected"), [("7", 7.0), ("soon", None), ("-1", None), ("999999", 86_400.0)]
)
@pytest.mark.parametrize("status", [429, 503, 404])
async def test_retry_after_is_read(sender: Sender, status: int, value: str, expected: float | None) -> None:
    got = await one(sender, answer(status, headers={"Retry-After": value}))
    assert got.retry_after == expected


async def test_a_receiver_may_ask_for_no_more(sender: Sender) -> None:
    got = await one(sender, answer(500, headers={"webhook-delivery": "abort-message"}))
    assert got.verdict == "dead"
    got = await one(sender, answer(200, headers={"webhook-delivery": "abort-message"}))
    assert got.verdict == "delivered"


# Time ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "reply",
    [
        [HANG],
        drip(head(200), 0.2),
        [b"HTTP/1.1 100 Continue\r\n\r\n", HANG],
        [b"HTTP/1.1 200 OK\r\nX-A: b\r\n", HANG],
    ],
    ids=["silent", "headers dribble", "only 100 Continue", "headers never end"],
)
async def test_the_clock_bounds_the_whole_try(hasty: Sender, reply: Reply) -> None:
    begun = time.monotonic()
    got = await one(hasty, reply)
    assert (got.verdict, got.outcome, got.status) == ("failed", "timeout", None)
    assert 0.9 < time.monotonic() - begun < 8
    assert got.address == "127.0.0.1"
    assert got.duration_ms >= 900


async def test_a_known_status_stands_while_the_body_dribbles(hasty: Sender) -> None:
    got = await one(hasty, [head(200, length=1000), *drip(b"x" * 50, 0.2)])
    assert (got.verdict, got.status) == ("delivered", 200)
    assert got.sample is not None
    assert set(got.sample) == {"x"}
    got = await one(hasty, [head(503, {"Retry-After": "9"}, length=9), HANG])
    assert (got.verdict, got.status, got.retry_after) == ("failed", 503, 9.0)


async def test_a_connection_that_is_never_accepted_times_out() -> None:
    """A full backlog: the kernel drops the handshake."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port = listener.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
        fillers.append(filler)
    sender = Sender(POLICY, total_seconds=20, connect_seconds=0.5)
    begun = time.monotonic()
    got = await sender.send(f"http://127.0.0.1:{port}/", BODY, SECRET_HEADERS)
    await sender.aclose()
    for one_socket in (*fillers, listener):
        one_socket.close()
    assert (got.outcome, got.error) == ("timeout", "no connection in time")
    assert time.monotonic() - begun < 10


# Bytes ---------------------------------------------------------------------------------------------
async def test_an_endless_body_is_read_to_the_limit_and_no_further(sender: Sender) -> None:
    begun = time.monotonic()
    got = await one(sender, [head(200), *([b"y" * 8_192] * 2_000)])
    assert (got.verdict, got.status) == ("delivered", 200)
    assert got.sample == "y" * 1000
    assert time.monotonic() - begun < 4  # the limit ended it, not the clock


@pytest.mark.parametrize(
    "reply",
    [
        [b"HTTP/1.1 200 OK\r\n", *([b"X-Filler: " + b"f" * 1_000 + b"\r\n"] * 300), HANG],
        [*([b"HTTP/1.1 103 Early Hints\r\nLink: " + b"l" * 1_000 + b"\r\n\r\n"] * 300), HANG],
    ],
    ids=["headers", "informational answers"],
)
async def test_endless_headers_are_bounded_too(sender: Sender, reply: Reply) -> None:
    begun = time.monotonic()
    got = await one(sender, reply)
    assert (got.verdict, got.outcome, got.error) == (
        "failed", "error", "the answer's headers are too large",
    )  # fmt: skip
    assert time.monotonic() - begun < 10


# Faults --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([], "ended before"),
        ([RESET], "broke before"),
        ([b"SMTP ready\r\n\r\n"], "no HTTP"),
        ([b"HTTP/1.1 200"], "ended before"),
    ],
    ids=["closed", "reset", "another protocol", "cut"],
)
async def test_broken_answers_are_failed_tries(sender: Sender, reply: Reply, error: str) -> None:
    got = await one(sender, reply)
    assert (got.verdict, got.status) == ("failed", None)
    assert got.error is not None
    assert error in got.error


async def test_reset_after_the_status_is_a_success(sender: Sender) -> None:
    got = await one(sender, [head(200, length=100) + b"half", RESET])
    assert (got.verdict, got.status) == ("delivered", 200)


async def test_nobody_listens(sender: Sender) -> None:
    async with Receiver() as receiver:
        url = receiver.url()
    got = await sender.send(url, BODY, SECRET_HEADERS)
    assert (got.verdict, got.outcome, got.error) == ("failed", "connect_error", "connection refused")


async def test_a_name_that_nobody_knows(sender: Sender) -> None:
    got = await sender.send("http://no-such-name.invalid/", BODY, SECRET_HEADERS)
    assert (got.verdict, got.outcome, got.error) == (
        "failed", "connect_error", "the host's name has no address",
    )  # fmt: skip


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1/", "http://169.254.169.254/", "file:///etc/passwd", "http://user:pw@127.0.0.1/"]
)
async def test_a_blocked_url_is_dead_without_a_socket(sender: Sender, url: str) -> None:
    got = await sender.send(url, BODY, SECRET_HEADERS)
    assert (got.verdict, got.outcome, got.address) == ("dead", "blocked", None)


async def test_a_blocked_answer_of_the_resolver_is_dead_and_names_no_address() -> None:
    sender = Sender(POLICY, resolver=Names(["10.11.12.13"]))
    got = await sender.send("http://receiver.example/", BODY, SECRET_HEADERS)
    await sender.aclose()
    assert (got.verdict, got.outcome, got.address) == ("dead", "blocked", None)
    assert got.error is not None
    assert "10.11.12.13" not in got.error
    assert got.error.startswith("address-not-allowed")


# TLS -----------------------------------------------------------------------------------------------
async def over_tls(certificate: Path, trusted: Path, host: str) -> Answer:
    async with Receiver(tls=server_context(certificate)) as receiver:
        sender = Sender(POLICY, resolver=Names(["127.0.0.1"]), ssl_context=trusting_context(trusted))
        got = await sender.send(receiver.url(host=host), BODY, SECRET_HEADERS)
        await sender.aclose()
        assert len(receiver.requests) == (1 if got.status else 0)
        return got


async def test_tls_is_verified_against_the_name(tmp_path: Path) -> None:
    good = make_certificate(tmp_path, "receiver.example")
    assert (await over_tls(good, good, "receiver.example")).verdict == "delivered"
    wrong = await over_tls(good, good, "other.example")
    assert (wrong.verdict, wrong.outcome) == ("failed", "connect_error")
    assert wrong.error is not None
    assert "Hostname mismatch" in wrong.error


async def test_expired_and_untrusted_certificates_fail(tmp_path: Path) -> None:
    good = make_certificate(tmp_path, "receiver.example")
    expired = make_certificate(tmp_path, "receiver.example", age_days=20)
    late = await over_tls(expired, expired, "receiver.example")
    assert late.error == "TLS: certificate has expired"
    other = make_certificate(tmp_path, "other.example")
    unknown = await over_tls(good, other, "receiver.example")
    assert unknown.error is not None
    assert unknown.error.startswith("TLS: self")


async def test_plain_http_on_a_tls_url_and_silence_in_the_handshake(tmp_path: Path) -> None:
    async with Receiver([[b"HTTP/1.1 400 Bad\r\n\r\n"]]) as plain:
        sender = Sender(POLICY, connect_seconds=0.5, total_seconds=10)
        begun = time.monotonic()
        got = await sender.send(plain.url().replace("http://", "https://"), BODY, SECRET_HEADERS)
        await sender.aclose()
    assert (got.verdict, got.status) == ("failed", None)
    assert time.monotonic() - begun < 5  # the connect time holds for TLS too


# What is kept and said -----------------------------------------------------------------------------
async def test_the_sample_is_escaped_bounded_and_free_of_our_signatures(sender: Sender) -> None:
    echo = (
        "\x1b[31m\n" + SECRET_HEADERS["webhook-signature"] + SECRET_HEADERS["X-Callback-Signature"]
    ).encode()
    got = await one(sender, answer(400, echo + b"\xff" + b"z" * 5_000))
    assert got.sample is not None
    assert got.sample.startswith("\\x1b[31m\\nv1,[signature][signature]\ufffdzzz")
    assert len(got.sample) == 1000
    assert got.sample.isprintable()


async def test_nothing_secret_is_logged(sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    """Not even at DEBUG: neither query, nor signature, nor body, by us or by the HTTP client."""
    caplog.set_level(logging.DEBUG)
    async with Receiver([answer(500, b"q")]) as receiver:
        await sender.send(receiver.url("/hook?token=hush-hush"), BODY, SECRET_HEADERS)
    await sender.send("http://127.0.0.1:1/?token=hush-hush", BODY, SECRET_HEADERS)
    told = "\n".join(record.getMessage() + str(record.__dict__) for record in caplog.records)
    for secret in ("hush-hush", SECRET_HEADERS["X-Callback-Signature"], SECRET_HEADERS["webhook-signature"]):
        assert secret not in told
