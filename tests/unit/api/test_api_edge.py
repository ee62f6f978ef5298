"""The edge's small parts: request ids, client addresses, headers, limits, times, keys."""

from __future__ import annotations

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from starlette.requests import Request

from api.app import create_app
from api.auth import UnsafeAuth, check_host, is_loopback
from api.headers import idempotency, idempotency_key, prefer_wait
from api.limits import Buckets, Limits
from api.middleware import client_address, parse_networks
from api.problems import Problem
from api.render import matches, time_text
from api.schemas import parse_time
from perdure.keys import check_scopes, hash_secret, new_credential, parse_key, verify_secret
from perdure.settings import ApiSettings
from perdure.store.rows import Principal

ROOT = Path(__file__).parents[3]


def request(*headers: tuple[bytes, bytes], client: str | None = "10.0.0.9") -> Request:
    scope: dict[str, Any] = {"type": "http", "headers": list(headers), "method": "POST", "path": "/"}
    scope["client"] = (client, 5) if client else None
    return Request(scope)


# Keys ----------------------------------------------------------------------------------------------
def test_a_key_is_found_by_its_id_and_proved_by_its_secret() -> None:
    made = new_credential()
    parsed = parse_key(made.token.encode())
    assert parsed is not None
    key_id, secret = parsed
    assert key_id == made.key_id
    assert verify_secret(secret, made.digest)
    assert not verify_secret(secret[:-1] + b"!", made.digest)
    assert not verify_secret(secret, None)
    assert not verify_secret(secret, hash_secret(b"another"))
    assert secret.decode() not in repr(made.digest)


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"sk_",
        b"caf\xe9",
        b"sk_abcdefgh_short",
        b"pk_abcdefgh_" + b"x" * 43,
        b"sk_ABCDEFGH_" + b"x" * 43,
        b"sk_abcdefgh_" + b"x" * 44,
        b"sk_abcdefgh_" + b"x" * 43 + b"\n",
        b"x" * 100_000,
    ],
)
def test_what_is_no_key_is_not_looked_up(token: bytes) -> None:
    assert parse_key(token) is None


def test_scopes_are_known_and_ordered() -> None:
    assert check_scopes(["admin", "tasks:read", "admin"]) == ("tasks:read", "admin")
    with pytest.raises(ValueError, match="tasks:fly"):
        check_scopes(["tasks:fly"])


# Where it may listen without keys ------------------------------------------------------------------
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_without_keys_it_starts_on_loopback(host: str) -> None:
    check_host(ApiSettings(database_url=SecretStr("postgresql://x/y"), auth="none", host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.evil.test", ""])
def test_without_keys_it_starts_nowhere_else(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UnsafeAuth, match="PERDURE_AUTH"):
        check_host(ApiSettings(database_url=SecretStr("postgresql://x/y"), auth="none", host=host))
    check_host(ApiSettings(database_url=SecretStr("postgresql://x/y"), auth="keys", host=host))


# Client addresses ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("trusted", "client", "forwarded", "expected"),
    [
        ([], "10.0.0.9", ["1.2.3.4"], "10.0.0.9"),  # nobody is believed
        (["10.0.0.0/8"], "8.8.8.8", ["1.2.3.4"], "8.8.8.8"),  # not from a proxy of ours
        (["10.0.0.0/8"], "10.0.0.9", [], "10.0.0.9"),
        (["10.0.0.0/8"], "10.0.0.9", ["1.2.3.4"], "1.2.3.4"),
        (
            ["10.0.0.0/8"],
            "10.0.0.9",
            ["6.6.6.6, 1.2.3.4, 10.1.1.1"],
            "1.2.3.4",
        ),  # the left is the client's to write
        (["10.0.0.0/8"], "10.0.0.9", ["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        (["10.0.0.0/8"], "10.0.0.9", ["1.2.3.4:5678"], "1.2.3.4"),
        (["10.0.0.0/8"], "10.0.0.9", ["[2001:db8::7]:443"], "2001:db8::7"),
        (["10.0.0.0/8"], "10.0.0.9", ["2001:db8::7"], "2001:db8::7"),
        (["10.0.0.0/8"], "10.0.0.9", ["1.2.3.4, junk"], "10.0.0.9"),
        (["10.0.0.0/8"], "10.0.0.9", [""], "10.0.0.9"),
        (["10.0.0.9"], "10.0.0.9", ["10.0.0.9"], "10.0.0.9"),
        (["::1"], "::1", ["1.2.3.4"], "1.2.3.4"),
    ],
)
def test_forwarded_addresses_are_read_from_the_right(
    trusted: list[str], client: str, forwarded: list[str], expected: str
) -> None:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    assert client_address(request(*headers, client=client).scope, parse_networks(trusted)) == expected


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_no_forwarded_header_breaks_the_reading(values: list[bytes]) -> None:
    headers = [(b"x-forwarded-for", value) for value in values]
    assert client_address(request(*headers).scope, parse_networks(["10.0.0.0/8"]))


def test_a_wrong_proxy_is_named() -> None:
    with pytest.raises(ValueError, match="PERDURE_TRUSTED_PROXIES"):
        parse_networks(["not-an-address"])


# Headers -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (b"wait=5", 5),
        (b"respond-async, wait=10", 10),
        (b"WAIT = 7", 7),
        (b'wait="3"', 3),
        (b"wait=99999", 60),
        (b"wait=0", 0),
        (b"wait=-1", None),
        (b"wait=1.5", None),
        (b"wait=nan", None),
        (b"wait=" + b"9" * 30, None),
        (b"return=minimal", None),
        (b"", None),
    ],
)
def test_prefer_wait(header: bytes, seconds: int | None) -> None:
    assert prefer_wait(request((b"prefer", header))) == seconds


@pytest.mark.parametrize("raw", [b"abc", b'"abc"', b"x" * 255, b"a-b_c:1/2", b"\t k \t"])
def test_good_idempotency_keys(raw: bytes) -> None:
    assert idempotency_key(request((b"idempotency-key", raw))) == raw.strip(b' \t"').decode()


@pytest.mark.parametrize(
    "raw", [b"", b'""', b"  ", b"x" * 256, b"x" * 1024, b"two words", b"caf\xc3\xa9", b"a\x01"]
)
def test_bad_idempotency_keys(raw: bytes) -> None:
    with pytest.raises(Problem) as caught:
        idempotency_key(request((b"idempotency-key", raw)))
    assert (caught.value.status, caught.value.code) == (400, "invalid-idempotency-key")


def test_two_idempotency_keys_are_none() -> None:
    with pytest.raises(Problem):
        idempotency_key(request((b"idempotency-key", b"a"), (b"idempotency-key", b"b")))
    assert idempotency_key(request()) is None


def test_equal_meaning_gives_an_equal_fingerprint() -> None:
    one = idempotency("k", "u", "submit", {"a": 1, "b": {"c": 2, "d": [1, 2]}})
    same = idempotency("k", "u", "submit", {"b": {"d": [1, 2], "c": 2}, "a": 1})
    other = idempotency("k", "u", "submit", {"b": {"d": [2, 1], "c": 2}, "a": 1})
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_if_none_match() -> None:
    assert matches('"1-2"', '"1-2"')
    assert matches('W/"1-2"', '"1-2"')
    assert matches('"x", "1-2"', '"1-2"')
    assert matches("*", '"1-2"')
    assert not matches(None, '"1-2"')
    assert not matches('"1-3"', '"1-2"')


# Limits --------------------------------------------------------------------------------------------
class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_lets_a_burst_through_and_stops_a_flood() -> None:
    clock = Clock()
    buckets = Buckets(60, clock)
    assert [buckets.take("a") for _ in range(60)] == [0.0] * 60
    assert buckets.take("a") == pytest.approx(1.0)
    assert buckets.take("b") == 0.0  # others have their own
    clock.now += 1.0
    assert buckets.take("a") == 0.0
    assert buckets.take("a") > 0
    clock.now += 3600
    assert [buckets.take("a") for _ in range(60)] == [0.0] * 60
    assert buckets.take("a") > 0  # an hour of silence saves up no more than one bucket


def test_more_than_a_bucket_passes_when_it_is_full_and_is_paid_back() -> None:
    clock = Clock()
    buckets = Buckets(60, clock)
    assert buckets.take("a", 120) == 0.0
    assert buckets.take("a") == pytest.approx(61.0)
    clock.now += 61
    assert buckets.take("a") == 0.0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 90)), max_size=60))
def test_no_more_passes_than_time_and_size_allow(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    buckets = Buckets(60, clock)
    passed = 0
    for pause, amount in steps:
        clock.now += pause
        if buckets.take("a", amount) == 0.0:
            passed += amount
    assert passed <= 60 + (clock.now - 1000.0) + 90


def test_limits_name_the_wait_and_are_off_without_keys() -> None:
    settings = ApiSettings(
        database_url=SecretStr("postgresql://x/y"), auth="keys", submits_per_minute=2, max_streams_per_user=1
    )
    limits, who = Limits(settings, Clock()), Principal("ann", key_id="k1")
    limits.take_submits(who, 2)
    with pytest.raises(Problem) as caught:
        limits.take_submits(who)
    assert caught.value.status == 429
    assert int(caught.value.headers["Retry-After"]) == 30
    with limits.take_stream(who), pytest.raises(Problem), limits.take_stream(who):
        pass
    with limits.take_stream(who):
        pass
    free = Limits(settings.model_copy(update={"auth": "none"}), Clock())
    for _ in range(100):
        free.take_submits(who)


# Times ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-12-01T14:00:00Z", "2026-12-01T14:00:00.000000Z"),
        ("2026-12-01T14:00:00.123456789Z", "2026-12-01T14:00:00.123456Z"),
        ("2026-12-01T14:00:00.5+05:30", "2026-12-01T08:30:00.500000Z"),
        ("2026-12-01 14:00-01:00", "2026-12-01T15:00:00.000000Z"),
        ("2026-11-01T01:30:00-0400", "2026-11-01T05:30:00.000000Z"),
    ],
)
def test_times_with_an_offset_become_utc(text: str, expected: str) -> None:
    assert time_text(parse_time(text)) == expected


@pytest.mark.parametrize(
    "value",
    [
        "2026-11-01T01:30:00",
        "2026-13-01T00:00:00Z",
        "9999-12-31T23:59:59-05:00",
        "yesterday",
        "",
        5,
        None,
        True,
        "2026-12-01",
        "0001-01-01T00:00:00+05:00",
        "2026-12-01T14:00:00Z\n",
        "２０２６-12-01T14:00:00Z",
    ],
)
def test_other_times_are_refused(value: object) -> None:
    with pytest.raises(ValueError):
        parse_time(value)


@given(st.datetimes(datetime(1970, 1, 2), datetime(2999, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_a_time_survives_the_way_out_and_in(moment: datetime) -> None:
    text = time_text(moment)
    assert text is not None
    assert len(text) == len("2026-12-01T14:00:00.123456Z")
    assert parse_time(text) == moment
    assert parse_time(text) - moment == timedelta(0)


# Codes ---------------------------------------------------------------------------------------------
def _codes() -> set[str]:
    """Every problem code that stands in the source of `api`."""
    places = {"Problem": 1, "too_many": 0, "invalid": 1}
    found = set()
    for path in (ROOT / "api").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None)
                at = places.get(str(name))
                if at is not None and len(node.args) > at and isinstance(node.args[at], ast.Constant):
                    found.add(str(node.args[at].value))  # type: ignore[attr-defined]
    return found


def test_every_problem_code_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    codes = _codes()
    assert len(codes) > 25
    assert not {code for code in codes if f"`{code}`" not in text}


# Mistakes in settings ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"auth": "none", "host": "0.0.0.0"}, "PERDURE_AUTH"),
        ({"secret_key": SecretStr("not base64!")}, "PERDURE_SECRET_KEY"),
        ({"payload_key": SecretStr("short")}, "PERDURE_PAYLOAD_KEY"),
        ({"trusted_proxies": ["nowhere"]}, "PERDURE_TRUSTED_PROXIES"),
        ({"callback_allow_cidrs": ["nowhere"]}, "PERDURE_CALLBACK_ALLOW_CIDRS"),
        ({"models": Path("/nowhere/models.toml")}, "PERDURE_MODELS"),
    ],
)
def test_a_mistake_in_the_settings_is_said_before_anything_starts(wrong: dict[str, Any], named: str) -> None:
    good = ApiSettings(database_url=SecretStr("postgresql://x/y"), models=ROOT / "models.toml")
    create_app(good)
    with pytest.raises(ValueError, match=named):
        create_app(good.model_copy(update=wrong))
