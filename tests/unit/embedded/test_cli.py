"""The command line: mistakes are one line and exit code 2, with no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "TEMPORAL_"))}


def perdure(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", "-m", "perdure", *words]
    return subprocess.run(line, env=ENV | env, capture_output=True, text=True, check=False, timeout=100)


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("perdure: ")
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("command", [("api",), ("worker", "control"), ("worker", "callbacks"), ("migrate",)])
def test_missing_database_is_one_line(command: tuple[str, ...]) -> None:
    assert_one_line(perdure(*command), 2, "PERDURE_DATABASE_URL", "is not set")


def test_setting_out_of_range_is_named() -> None:
    done = perdure("worker", "gpu", "--pool", "local", PERDURE_DRAIN_SECONDS="-1")
    assert_one_line(done, 2, "PERDURE_DRAIN_SECONDS")


def test_missing_models_file_says_how_to_name_it(tmp_path: Path) -> None:
    done = perdure("worker", "gpu", "--pool", "local", PERDURE_MODELS=str(tmp_path / "none.toml"))
    assert_one_line(done, 2, "none.toml", "PERDURE_MODELS")


def test_unknown_pool_names_those_there_are(tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text("[pools.big]\n")
    done = perdure("worker", "gpu", "--pool", "small", PERDURE_MODELS=str(models))
    assert_one_line(done, 2, "'small'", "big", "[pools.small]")


def test_database_that_is_away_is_one_line() -> None:
    url = "postgresql://a:secret-word@127.0.0.1:1/a"
    done = perdure("migrate", PERDURE_DATABASE_URL=url)
    assert_one_line(done, 1)
    assert "secret-word" not in done.stderr


def test_taken_port_is_named_with_its_holder_and_the_way_out(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        base = server.getsockname()[1] - 1
        done = perdure("dev", "--data-dir", str(tmp_path / "d"), "--port-base", str(base))
    assert_one_line(done, 1, f"port {base + 1} (Temporal) is taken", f"pid {os.getpid()}", "--port-base")


def test_models_file_of_the_stack_is_checked_first(tmp_path: Path) -> None:
    models = tmp_path / "m.toml"
    models.write_text("[models.a]\npool = 'none'\nexecutor = 'simulated'\n")
    done = perdure("dev", "--data-dir", str(tmp_path / "d"), "--models", str(models))
    assert_one_line(done, 2, "models.a.pool", "[pools.none]")
    assert_one_line(
        perdure("dev", "--data-dir", str(tmp_path / "d"), "--port-base", "70000"), 2, "--port-base"
    )
    done = perdure("dev", "--data-dir", str(tmp_path / "d"), PERDURE_MODEL_URL="gpu:8000")
    assert_one_line(done, 2, "PERDURE_MODEL_URL")


def test_data_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = perdure("dev", "--data-dir", str(tmp_path / "file" / "d"))
    assert_one_line(done, 1, "--data-dir")


def test_doctor_ends_cleanly_without_a_server() -> None:
    """A connect that failed must not abort the interpreter on its way out."""
    done = perdure("doctor", TEMPORAL_ADDRESS="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "no Temporal server at 127.0.0.1:1" in done.stdout
    assert done.stderr == ""


def test_every_command_has_help() -> None:
    listed = perdure("--help").stdout
    for command in ("dev", "demo", "doctor", "migrate", "api", "worker", "keys", "models", "submit", "watch"):
        assert f"  {command} " in listed


def test_errors_a_user_can_mend_have_codes_and_bugs_have_none() -> None:
    from api.auth import UnsafeAuth
    from perdure.endings import exit_code
    from perdure.models import CatalogueError
    from perdure.store.errors import StoreUnavailable
    from perdure.temporal import EngineUnavailable

    assert exit_code(CatalogueError("x")) == exit_code(UnsafeAuth("x")) == 2
    assert exit_code(ExceptionGroup("g", [ExceptionGroup("h", [CatalogueError("x")])])) == 2
    assert exit_code(StoreUnavailable("x")) == exit_code(EngineUnavailable("x")) == 1
    assert exit_code(ValueError("x")) is None
    assert exit_code(KeyError("x")) is None


def test_api_without_keys_stays_on_loopback() -> None:
    done = perdure(
        "api",
        PERDURE_DATABASE_URL="postgresql://a@127.0.0.1:1/a",
        PERDURE_AUTH="none",
        PERDURE_HOST="0.0.0.0",
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("perdure: ")
    assert "Traceback" not in done.stderr
