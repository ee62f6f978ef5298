"""Secrets at rest, and what the settings make of them."""

from __future__ import annotations

import base64
import logging

import pytest

from perdure.callback.secrets import CallbackSecrets, SecretBox, SecretsUnavailable, new_secret, whsec
from perdure.settings import DatabaseSettings
from perdure.store.engine import Store, make_engine

ONE, TWO = (base64.b64encode(bytes([n]) * 32).decode() for n in (1, 2))


def settings(**more: str) -> DatabaseSettings:
    return DatabaseSettings.model_validate({"database_url": "postgresql://nobody@127.0.0.1:1/none", **more})


def secrets_of(**more: str) -> CallbackSecrets:
    """Secrets over a database that is not there: what answers does so without asking it."""
    engine = make_engine("postgresql://nobody@127.0.0.1:1/none", pool_size=1, application_name="t")
    return CallbackSecrets.from_settings(settings(**more), Store(engine).secrets)


def test_new_secrets_are_long_and_differ() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert {len(one) for one in made} == {43}


def test_what_is_sealed_opens_and_says_nothing() -> None:
    box = SecretBox.from_text(ONE)
    sealed = box.seal("hush-hush", "alice", "csec_1")
    assert box.open(sealed, "alice", "csec_1") == "hush-hush"
    assert b"hush" not in sealed
    assert box.seal("hush-hush", "alice", "csec_1") != sealed


@pytest.mark.parametrize(("user", "secret_id"), [("bob", "csec_1"), ("alice", "csec_2")])
def test_a_sealed_secret_is_bound_to_its_row(user: str, secret_id: str) -> None:
    box = SecretBox.from_text(ONE)
    with pytest.raises(SecretsUnavailable, match="PERDURE_SECRET_KEY"):
        box.open(box.seal("hush", "alice", "csec_1"), user, secret_id)


@pytest.mark.parametrize("sealed", [b"", b"\x01", b"\x01short", b"\x02" + bytes(60), b"\x01" + bytes(60)])
def test_damaged_bytes_do_not_open(sealed: bytes) -> None:
    with pytest.raises(SecretsUnavailable):
        SecretBox.from_text(ONE).open(sealed, "alice", "csec_1")


def test_a_retired_key_still_opens_and_the_first_seals() -> None:
    sealed = SecretBox.from_text(ONE).seal("hush", "alice", "csec_1")
    both = SecretBox.from_text(f"{TWO}, {ONE}")
    assert both.open(sealed, "alice", "csec_1") == "hush"
    assert SecretBox.from_text(TWO).open(both.seal("x", "a", "b"), "a", "b") == "x"


@pytest.mark.parametrize("text", ["short", base64.b64encode(b"k" * 16).decode(), "*" * 44, f"{ONE},"])
def test_a_wrong_key_is_named_with_its_remedy(text: str) -> None:
    with pytest.raises(SecretsUnavailable, match="openssl rand -base64 32") as caught:
        secrets_of(secret_key=text)
    assert text not in str(caught.value)


def test_without_any_setting_there_are_no_secrets() -> None:
    with pytest.raises(SecretsUnavailable, match="PERDURE_CALLBACK_SECRET"):
        secrets_of()
    with pytest.raises(SecretsUnavailable, match="PERDURE_CALLBACK_SECRET"):
        secrets_of(secret_key="", callback_secret="")


async def test_one_secret_for_all_needs_no_database() -> None:
    made = secrets_of(callback_secret="an-operators-secret-of-decent-length")
    assert made.fixed
    assert await made.keys("alice") == await made.keys("bob") == [b"an-operators-secret-of-decent-length"]
    assert await made.describe("alice") == []


async def test_a_prefixed_secret_is_decoded() -> None:
    key = bytes(range(32))
    assert await secrets_of(callback_secret=whsec(key)).keys("alice") == [key]
    with pytest.raises(SecretsUnavailable, match="base64"):
        secrets_of(callback_secret="whsec_***")


async def test_the_operators_previous_secret_is_signed_with_too() -> None:
    made = secrets_of(callback_secret="n" * 30, callback_secret_previous="o" * 30)
    assert await made.keys("alice") == [b"n" * 30, b"o" * 30]
    with pytest.raises(SecretsUnavailable):
        secrets_of(callback_secret_previous="o" * 30)


def test_a_short_secret_is_warned_of_but_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        secrets_of(callback_secret="too-short-one")
    assert "24 bytes" in caplog.text
    assert "too-short-one" not in caplog.text


def test_a_user_who_never_rotated_has_a_key_of_their_own() -> None:
    box, other = SecretBox.from_text(ONE), SecretBox.from_text(TWO)
    assert box.derive("alice") == box.derive("alice")
    assert len({box.derive("alice"), box.derive("bob"), other.derive("alice")}) == 3
