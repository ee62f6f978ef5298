"""The code in docs/callbacks.md does what the page says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.callback.addresses import NEVER
from perdure.callback.schedule import RETRY_AFTER_CAP
from perdure.callback.secrets import MAX_ACTIVE, MAX_OVERLAP_HOURS, OVERLAP_HOURS, whsec
from perdure.callback.sender import CONNECT_SECONDS, TOTAL_SECONDS
from perdure.callback.sign import signed_headers
from perdure.callback.transport import MAX_ANSWER_BYTES
from perdure.task.policy import QUICK_TRIES, QUICK_TRY_DELAYS, SLOW_TRY_DELAYS

PAGE = (Path(__file__).parents[3] / "docs/callbacks.md").read_text(encoding="utf-8")
SECRET = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw-dEmo_0123"
VECTOR = b'{"task_id":"task_1","event":"COMPLETED"}'


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def signed(body: bytes, at: int, secret: str = SECRET) -> dict[str, str]:
    return signed_headers(
        delivery_id="msg_1", event="COMPLETED", body=body, keys=[secret.encode()], at=at, number=1
    )


def test_the_vectors_of_the_page_are_true() -> None:
    made = signed(VECTOR, 1_700_000_000)
    for name in ("X-Callback-Signature", "webhook-signature"):
        assert f"| `{name}` | `{made[name]}` |" in PAGE
    assert f"`{SECRET}` (its {len(SECRET)} ASCII bytes)" in PAGE
    assert f"`{VECTOR.decode()}`" in PAGE


def test_the_python_of_the_page() -> None:
    scope: dict[str, Any] = {"SECRET": whsec(SECRET.encode())}
    exec(compile(block("python"), "docs/callbacks.md", "exec"), scope)
    body = "é \u2028".encode()
    assert scope["receive"](body, signed(body, int(time.time()))) == 204
    assert scope["receive"](body + b"x", signed(body, int(time.time()))) == 401
    assert scope["receive"](body, signed(body, int(time.time()) - 301)) == 401


def test_the_javascript_of_the_page(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("NOT CHECKED: node is not installed, so the JavaScript in docs/callbacks.md did not run")
    body, now = "é \u2028 😀".encode(), int(time.time())
    cases = [
        (body, signed(body, now), True),
        (
            body,
            signed(body, now) | {"webhook-signature": "v1,AAAA " + signed(body, now)["webhook-signature"]},
            True,
        ),
        (body + b"x", signed(body, now), False),
        (body, signed(body, now - 400), False),
        (body, signed(body, now, "another-secret-of-some-length-here"), False),
        (body, signed(body, now) | {"webhook-signature": "v1,"}, False),
    ]
    given = [
        {"body": one.hex(), "headers": {k.lower(): v for k, v in headers.items()}}
        for one, headers, _ in cases
    ]
    program = (
        block("js")
        + f"\nfor (const c of {json.dumps(given)})"
        + f' console.log(verify(Buffer.from(c.body, "hex"), c.headers, {json.dumps(SECRET)}));'
    )
    (tmp_path / "verify.js").write_text(program, encoding="utf-8")
    done = subprocess.run([node, "verify.js"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(wanted).lower() for *_, wanted in cases]


def test_the_shell_lines_of_the_page(tmp_path: Path) -> None:
    """Each openssl line of the page, as it stands there."""
    if shutil.which("openssl") is None:
        pytest.skip("NOT CHECKED: openssl is not installed, so the commands in docs/callbacks.md did not run")
    body = "ünïcode \u2028 😀".encode()
    made = signed(body, 1_700_000_000)
    (tmp_path / "body").write_bytes(body)
    lines = [line for line in block("sh").splitlines() if "openssl" in line]
    environment = {
        "SECRET": SECRET,
        "ID": made["webhook-id"],
        "TS": made["webhook-timestamp"],
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }
    printed = [
        subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, check=True)
        for line in lines
    ]
    assert [one.stdout.decode() for one in printed] == [
        made["X-Callback-Signature"],
        made["webhook-signature"].removeprefix("v1,"),
    ]


def test_the_figures_of_the_page() -> None:
    assert f"You have {CONNECT_SECONDS:g} s to accept" in PAGE
    assert f"and {TOTAL_SECONDS:g} s in all" in PAGE
    assert f"At most {MAX_ANSWER_BYTES // 1024} KiB" in PAGE
    assert f"at most {RETRY_AFTER_CAP / 3600:g} h) is honoured" in PAGE
    assert f"`overlap_hours` ({OVERLAP_HOURS}; 0 to {MAX_OVERLAP_HOURS};" in PAGE
    assert MAX_ACTIVE == 5
    assert "At most five secrets" in PAGE
    assert (QUICK_TRIES, QUICK_TRY_DELAYS) == (5, (0, 1, 2, 4, 8))
    assert "1, 2, 4 and 8 s" in PAGE
    assert [d / 60 for d in SLOW_TRY_DELAYS] == [1, 5, 30, 120, 300, 600, 1440, 1800]
    assert "1 min, 5 min, 30 min, 2 h, 5 h, 10 h, 24 h and 30 h" in PAGE
    assert any(str(net).startswith("169.254") for net in NEVER)
