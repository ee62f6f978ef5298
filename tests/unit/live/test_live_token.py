"""Stream tokens: a minute, one user, any process with the deployment's secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.live.token import LIFETIME, StreamTokens

SECRET = b"s" * 32


@given(st.text(min_size=1, max_size=64, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_process_takes_a_users_token(user_id: str) -> None:
    token = StreamTokens(SECRET, clock=lambda: 1000.0).issue(user_id)
    assert StreamTokens(SECRET, clock=lambda: 1000.0 + LIFETIME - 1).user_of(token) == user_id
    assert token.isascii()
    assert len(token) <= 512


def test_a_token_ends_with_its_minute() -> None:
    token = StreamTokens(SECRET, clock=lambda: 1000.0).issue("u")
    assert StreamTokens(SECRET, clock=lambda: 1000.0 + LIFETIME).user_of(token) is None


def test_another_deployment_takes_none() -> None:
    token = StreamTokens(SECRET).issue("u")
    assert StreamTokens(b"t" * 32).user_of(token) is None
    assert StreamTokens(None).user_of(StreamTokens(None).issue("u")) is None
    alone = StreamTokens(None)
    assert alone.user_of(alone.issue("u")) == "u"


@given(st.text(max_size=200))
def test_junk_is_nobodys(junk: str) -> None:
    assert StreamTokens(SECRET).user_of(junk) is None


@given(st.data())
def test_a_changed_token_is_nobodys(data: st.DataObject) -> None:
    tokens = StreamTokens(SECRET)
    token = tokens.issue("user")
    at = data.draw(st.integers(0, len(token) - 2))  # the last letter has spare bits
    letter = data.draw(st.sampled_from("ABCxyz019-_"))
    changed = token[:at] + letter + token[at + 1 :]
    assert changed == token or tokens.user_of(changed) is None


@pytest.mark.parametrize("junk", ["", "=", "A" * 600, "caf\u00e9", "\x00", "a.b.c"])
def test_known_junk(junk: str) -> None:
    assert StreamTokens(SECRET).user_of(junk) is None
