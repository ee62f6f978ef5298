"""Redaction: canaries planted in every form that libraries and callers write, found nowhere after it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.observability.redact import HIDDEN, MAX_TEXT, is_secret_name, protect, redact, redact_value

CANARY = "C4n4ryXq7Zp2"


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CANARY}",
        f"authorization='Basic {CANARY}=='",
        f"headers={{'Authorization': 'Bearer {CANARY}', 'Accept': '*/*'}}",
        f"{{b'authorization': b'Bearer {CANARY}'}}",
        f"[(b'x-api-key', b'k'), ('x-api-key': '{CANARY}')]",
        f"key sk_live_{CANARY} is wrong",
        f"Incorrect API key provided: sk-proj-{CANARY}",
        f"secret whsec_{CANARY}+/=",
        f"webhook-signature: v1,{CANARY}{CANARY}=",
        f"X-Callback-Signature: {CANARY}=",
        f"POST https://hooks.example.com/in?token={CANARY}&a=1 failed",
        f"connect to https://user:{CANARY}@example.com/x",
        f"GET http://h.example/path#frag={CANARY}",
        f"postgresql+asyncpg://perdure:{CANARY}@db:5432/perdure?sslpassword={CANARY}",
        f'{{"api_key": "{CANARY}", "model": "m"}}',
        f"LOCAL_API_KEY={CANARY}",
        f"PERDURE_SECRET_KEY={CANARY}",
        f"password = {CANARY};",
        f"jwt eyJhbGciOiJIUzI1NiJ9.{CANARY}.{CANARY}",
        f"1 validation error\nparams\n  Input should be a list [type=list_type, "
        f"input_value='{CANARY} it, is', input_type=str]",
        f"(asyncpg.Error) boom\n[SQL: INSERT INTO t]\n[parameters: ('{CANARY}', 1)]\n(Background)",
        f"DETAIL:  Failing row contains (1, {CANARY}, null).",
        f"DETAIL:  Key (user_id, key)=(u, {CANARY}) already exists.",
    ],
)
def test_a_canary_in_any_form_is_gone(text: str) -> None:
    assert CANARY not in redact(text)


def test_what_an_operator_needs_stays() -> None:
    line = (
        "model server http://127.0.0.1:8080/v1/chat/completions answered 503, output_tokens: 12, "
        "token_timeout after 60 s, total_tokens=7, task_0190 retried; monkey=1 basic idea"
    )
    clean = redact(line)
    for part in (
        "http://127.0.0.1:8080/v1/chat/completions",
        "503",
        "output_tokens: 12",
        "token_timeout after 60 s",
    ):
        assert part in clean
    assert "total_tokens=7" in clean
    assert "monkey=1" in clean


def test_a_protected_value_is_gone_wherever_it_stands() -> None:
    protect("zq-plain-upstream-key", "", None, "abc")
    assert redact("got zq-plain-upstream-key back, abc") == f"got {HIDDEN} back, abc"


@given(st.text(max_size=300))
def test_redacting_twice_changes_nothing_more(text: str) -> None:
    assert redact(redact(text)) == redact(text)


@given(
    st.sampled_from(["Bearer ", "api_key=", "https://u:p@h/?", "whsec_", "v1,", "password: '", "sk_"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.text(max_size=60),
)
def test_redacting_text_near_secrets_twice_changes_nothing_more(head: str, body: str, tail: str) -> None:
    once = redact(head + body + tail)
    assert redact(once) == once


@pytest.mark.parametrize(
    "piece",
    [
        "Authorization: ",
        "https://a:b@c/?d ",
        "https://",
        "Key (a)=(",
        "[parameters: ",
        "Failing row contains (",
        "input_value=",
        "a_",
        "api_key",
        'api_key="',
        "bearer ",
        "v1,",
        "sk_",
        "eyJ" + "a" * 10 + ".",
    ],
)
def test_hostile_text_takes_linear_time(piece: str) -> None:
    begin = time.process_time()
    redact(piece * (200_000 // len(piece)))
    assert time.process_time() - begin < 5  # quadratic reading would take minutes


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key", True),
        ("LOCAL_API_KEY", True),
        ("Authorization", True),
        ("callback_secret", True),
        ("token", True),
        ("stream_token", True),
        ("output_tokens", False),
        ("token_timeout", False),
        ("task_id", False),
        ("key_id", False),
    ],
)
def test_names_that_hold_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_values_keep_their_shape_without_their_secrets() -> None:
    value = {
        "api_key": CANARY,
        "nested": [{"password": CANARY, "url": f"https://h/x?k={CANARY}"}],
        "body": CANARY.encode(),
        "n": 3,
        "rate": float("nan"),
        "none": None,
    }
    clean = redact_value(value)
    assert CANARY not in repr(clean)
    assert clean["n"] == 3
    assert clean["rate"] == "nan"
    assert clean["nested"][0]["url"] == "https://h/x"
    assert clean["body"] == f"<{len(CANARY)} bytes>"


def test_a_secret_on_the_cut_does_not_show_its_first_half() -> None:
    protect("cut-secret-0123456789")
    text = "x" * (MAX_TEXT - 10) + "cut-secret-0123456789"
    assert "cut-secret" not in redact_value(text)


def test_a_deep_or_hostile_object_ends() -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError(CANARY)

    loop: list[object] = []
    loop.append(loop)
    assert redact_value(loop)
    assert redact_value(Hostile()) == "<Hostile>"
