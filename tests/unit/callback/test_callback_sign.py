"""Both header families, checked by verifiers that are not ours."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import standardwebhooks

from perdure.callback import InvalidSignature, verify
from perdure.callback.body import build_body
from perdure.callback.secrets import new_secret, whsec
from perdure.callback.sign import signatures_in, signed_headers
from perdure.callback.verify import key_of
from perdure.task.states import Status

PAYLOADS = [
    "é", "😀", "</script>", "\u2028", "a/b", "x" * 100_000, "line\r\nline", '"quoted\\"', "\U0010ffff",
]  # fmt: skip
SECRET = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw-dEmo_0123"


def body(text: str = "hello", **more: object) -> bytes:
    return build_body(
        task_id="task_" + "1" * 32,
        status=Status.COMPLETED,
        result={"text": text, **more},
        error_code=None,
        error_message=None,
        at=datetime.now(UTC),
    )


def headers(sent: bytes, *secrets: str, at: int | None = None, delivery_id: str = "msg_1") -> dict[str, str]:
    return signed_headers(
        delivery_id=delivery_id,
        event="COMPLETED",
        body=sent,
        keys=[key_of(secret) for secret in secrets],
        at=int(time.time()) if at is None else at,
        number=1,
    )


def standard_webhooks_accepts(sent: bytes, given: dict[str, str], secret: str) -> bool:
    try:
        standardwebhooks.Webhook(whsec(key_of(secret))).verify(sent, given)
    except standardwebhooks.WebhookVerificationError:
        return False
    return True


def openai_accepts(sent: bytes, given: dict[str, str], secret: str) -> bool:
    client = openai.OpenAI(api_key="none")
    try:
        client.webhooks.verify_signature(sent.decode(), given, secret=secret)
    except openai.InvalidWebhookSignatureError:
        return False
    finally:
        client.close()
    return True


def test_published_vectors() -> None:
    """These stand in docs/callbacks.md; a receiver in any language can check itself against them."""
    sent = b'{"task_id":"task_1","event":"COMPLETED"}'
    made = headers(sent, SECRET, at=1_700_000_000)
    assert made["X-Callback-Signature"] == "vMxk/Bb9ERO0uxzbEGyA2thkc1TLZtmnVK3G0O3oVlc="
    assert made["webhook-signature"] == "v1,IN28PV9JcNJQuDsKio9Myq4dxZxrG1G9D65kZXd+45k="


def test_headers_are_complete() -> None:
    made = headers(body(), SECRET, at=1_700_000_000)
    assert made["Content-Type"] == "application/json"
    assert made["X-Callback-Event"] == "COMPLETED"
    assert made["webhook-id"] == "msg_1"
    assert made["webhook-timestamp"] == "1700000000"
    assert made["User-Agent"].startswith("perdure-webhook/")


@pytest.mark.parametrize("text", PAYLOADS)
@pytest.mark.parametrize("rendering", ["plain", "whsec"])
def test_independent_verifiers_accept_every_payload(text: str, rendering: str) -> None:
    secret = new_secret()
    shown = secret if rendering == "plain" else whsec(secret.encode())
    sent = body(text, number=1.0, big=2**53 + 1, exponent=1e21, empty={})
    made = headers(sent, secret)
    assert standard_webhooks_accepts(sent, made, shown)
    assert openai_accepts(sent, made, shown)
    verify(sent, made, shown)
    plain = base64.b64encode(hmac.new(secret.encode(), sent, hashlib.sha256).digest()).decode()
    assert made["X-Callback-Signature"] == plain


def test_independent_verifiers_refuse_another_secret_and_another_body() -> None:
    sent = body()
    made = headers(sent, new_secret())
    other = new_secret()
    assert not standard_webhooks_accepts(sent, made, other)
    assert not openai_accepts(sent, made, other)
    assert not standard_webhooks_accepts(sent + b" ", made, SECRET)


def test_rotation_lets_old_and_new_secrets_verify() -> None:
    old, middle, new = new_secret(), new_secret(), new_secret()
    sent = body()
    made = headers(sent, new, middle, old)
    for secret in (old, middle, new):
        assert standard_webhooks_accepts(sent, made, secret)
        assert openai_accepts(sent, made, secret)
        verify(sent, made, secret)
    plain = base64.b64encode(hmac.new(old.encode(), sent, hashlib.sha256).digest()).decode()
    assert made["X-Callback-Signature"] == plain
    after = headers(sent, new)
    assert not standard_webhooks_accepts(sent, after, old)


def test_signatures_are_named_so_that_they_can_be_hidden() -> None:
    made = headers(body(), SECRET, new_secret())
    values = signatures_in(made)
    assert len(values) == 3
    assert all(value in made["webhook-signature"] + made["X-Callback-Signature"] for value in values)


def test_signing_needs_a_key() -> None:
    with pytest.raises(ValueError, match="key"):
        headers(body())


# perdure.callback.verify ---------------------------------------------------------------------------
def refusal(sent: bytes, given: Any, secrets: Any = SECRET, **options: Any) -> str:
    with pytest.raises(InvalidSignature) as caught:
        verify(sent, given, secrets, **options)
    return str(caught.value)


def test_verify_takes_any_case_of_header_names_and_several_secrets() -> None:
    sent = body()
    made = {name.upper(): value for name, value in headers(sent, SECRET).items()}
    verify(sent, made, [new_secret(), whsec(SECRET.encode())])
    verify(sent, made, SECRET.encode())


def test_verify_holds_the_clock() -> None:
    sent = body()
    made = headers(sent, SECRET, at=1_000_000)
    verify(sent, made, SECRET, now=1_000_300)
    verify(sent, made, SECRET, now=999_700)
    verify(sent, made, SECRET, now=1_009_999, tolerance=10_000)
    assert "timestamp" in refusal(sent, made, now=1_000_301)
    assert "timestamp" in refusal(sent, made, now=999_699)
    assert "timestamp" in refusal(sent, made, tolerance=float("nan"), now=1_000_000)


@pytest.mark.parametrize("stamp", ["", "abc", "-1", "1e9", "٣", "1" * 13, "1700000000.0", " 1"])
def test_verify_refuses_a_timestamp_that_is_no_number(stamp: str) -> None:
    sent = body()
    assert "webhook-timestamp" in refusal(sent, headers(sent, SECRET) | {"webhook-timestamp": stamp})


@pytest.mark.parametrize(
    "signatures", ["", "v1", "v1,", "v2,abc", "v1a,abc", "v1,\ud800", "v1,é", "v1,====", "junk", "v1, v1,"]
)
def test_verify_refuses_junk_signatures_and_raises_nothing_else(signatures: str) -> None:
    sent = body()
    assert refusal(sent, headers(sent, SECRET) | {"webhook-signature": signatures})


def test_verify_finds_the_right_one_among_ten_and_looks_no_further() -> None:
    sent = body()
    right = headers(sent, SECRET)["webhook-signature"]
    made = headers(sent, SECRET)
    verify(sent, made | {"webhook-signature": "v1,wrong " * 9 + right}, SECRET)
    refusal(sent, made | {"webhook-signature": "v1,wrong " * 10 + right})


@pytest.mark.parametrize("changed", ["webhook-id", "webhook-timestamp"])
def test_verify_covers_id_and_time(changed: str) -> None:
    sent = body()
    made = headers(sent, SECRET)
    value = "msg_2" if changed == "webhook-id" else str(int(made[changed]) + 1)
    assert "no signature matches" in refusal(sent, made | {changed: value})


def test_verify_needs_the_standard_headers_unless_told_otherwise() -> None:
    sent = body()
    only = {"X-Callback-Signature": headers(sent, SECRET)["X-Callback-Signature"]}
    assert "missing" in refusal(sent, only)
    verify(sent, only, SECRET, allow_legacy=True)
    assert "no signature matches" in refusal(sent + b"x", only, allow_legacy=True)
    assert "missing" in refusal(sent, {}, allow_legacy=True)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_*", [], ["whsec_é"], b""])
def test_verify_refuses_a_secret_that_is_none(secret: Any) -> None:
    sent = body()
    assert refusal(sent, headers(sent, SECRET), secret)


def test_whsec_is_decoded_with_and_without_padding() -> None:
    key = bytes(range(32))
    assert key_of(whsec(key)) == key
    assert key_of(whsec(key).rstrip("=")) == key
    assert key_of("plain-é") == "plain-é".encode()
    assert json.loads(json.dumps(SimpleNamespace(secret=whsec(key)).secret)).startswith("whsec_")
