"""`perdure keys` from a shell, against the service's own database."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from perdure.keys import time_left
from tests.integration.api.harness import Api

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


async def perdure_keys(database_url: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-P", "-m", "perdure", "keys", *words],
        env=env | {"PERDURE_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


async def test_a_key_from_the_shell_does_what_it_was_made_for(keyed: Api, database_url: str) -> None:
    scopes = "tasks:read,tasks:write"
    made = await perdure_keys(
        database_url, "create", "--user", "gate", "--scopes", scopes, "--act-as", "--expires", "90d"
    )
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    assert re.fullmatch(r"sk_[a-z0-9]{8}_[A-Za-z0-9_-]{43}", token), made.stdout
    headers = {"Authorization": f"Bearer {token}"}
    body = {"model_id": "simulated", "params": {}, "user_id": "somebody"}
    reply = await keyed.client.post("/v1/tasks", json=body, headers=headers)
    assert (reply.status_code, reply.json()["user_id"]) == (202, "somebody")
    assert (await keyed.client.post("/v1/callback-secret/rotate", headers=headers)).status_code == 403

    listed = await perdure_keys(database_url, "list", "--user", "gate")
    key_id = token.split("_")[1]
    assert f"{key_id}  live" in listed.stdout
    assert "tasks:read,tasks:write,act-as" in listed.stdout
    assert token not in listed.stdout
    assert (await perdure_keys(database_url, "revoke", key_id)).returncode == 0
    listed = await perdure_keys(database_url, "list")
    assert f"{key_id}  revoked" in listed.stdout
    again = await perdure_keys(database_url, "revoke", key_id)
    assert (again.returncode, again.stdout) == (1, "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--user", "a", "--scopes", "tasks:read,everything"), "'everything'"),
        (("--user", "a", "--expires", "soon"), "90d"),
        (("--user", "a", "--expires", "2001-01-01"), "future"),
        (("--user", ""), "1 to 64"),
    ],
)
async def test_a_wrong_word_is_one_line(database_url: str, words: tuple[str, ...], told: str) -> None:
    done = await perdure_keys(database_url, "create", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert told in done.stderr


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("90d", timedelta(days=90)),
        ("1.5h", timedelta(minutes=90)),
        ("30m", timedelta(minutes=30)),
        ("45s", timedelta(seconds=45)),
        ("2026-12-02", timedelta(hours=12)),
        ("2026-12-01T13:00:00Z", timedelta(hours=1)),
        ("2026-12-01T14:00:00+01:00", timedelta(hours=1)),
    ],
)
def test_how_long_a_key_lives(text: str, left: timedelta) -> None:
    assert time_left(text, NOW) == left


@pytest.mark.parametrize("text", ["", "90", "-1d", "0d", "1y", "d", "2026-12-01", "x" * 500, "٣d"])
def test_what_is_no_life_of_a_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"no time|future"):
        time_left(text, NOW)
