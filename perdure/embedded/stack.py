"""The whole service on one machine: Postgres, Temporal, model server, API and workers under one parent.

    stack = Stack(options, say)
    await stack.up()          everything serves; raises StackError with what to do
    await stack.down()        everything stopped, in reverse

`perdure.embedded.dev` is what people start.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from perdure.embedded import catalogue, model_server, plan, ports, process, ready
from perdure.embedded.datadir import DataDir, InUseError
from perdure.embedded.plan import Options, PlanError, Ports, Secrets, command
from perdure.embedded.postgres import EmbeddedPostgres, PostgresStartError
from perdure.embedded.supervisor import ChildFailedError, Program, Supervisor
from perdure.embedded.temporal import RETENTION, EmbeddedTemporal, keep_for, wait_until_serving
from perdure.models import Catalogue, CatalogueError, load_catalogue

START_SECONDS = 180.0  # to ready; a first start on a loaded machine takes about 15
STOP_SECONDS = 14.0  # everything together
LEFTOVER_SECONDS = 8.0
_POSTGRES, _TEMPORAL, _MODEL, _API, _CONTROL, _GPU = range(6)  # stopped from the last to the first
_LOG_PAUSE = 10.0  # seconds between looks at the size of the logs


class StackError(RuntimeError):
    """The stack cannot run; the message says why and what to do. `code` is the exit code that fits."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Stack:
    """One local stack. `say` gets lines for people."""

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None],
        environ: Mapping[str, str] | None = None,
        up_within: float = START_SECONDS,
    ) -> None:
        self.options = options
        self.data = DataDir(options.data_dir)
        self.urls: dict[str, str] = {}
        self.catalogue = Catalogue()
        self._say = say
        self._environ = dict(os.environ if environ is None else environ)
        self._up_within = up_within
        self._ready = False
        self._supervisor = Supervisor(say, self._changed, self.data.log_size, self.data.log_tail)
        self._postgres: EmbeddedPostgres | None = None
        self._secrets = Secrets("", "")
        self._chores: set[asyncio.Task[None]] = set()

    # Up -----------------------------------------------------------------------------------------------
    async def up(self) -> None:
        """Starts everything and waits until it serves. Raises StackError; call `down` in any case."""
        try:
            self._ports = Ports.of(self.options.port_base)
            self._model_url = plan.model_url(self.options, self._ports)
            self._take_data_dir()
            self._clear_leftovers()
            await self._choose_models()
        except (PlanError, CatalogueError) as error:
            raise StackError(str(error), code=2) from error
        self._check_ports()
        started = asyncio.create_task(self._start_all())
        failure = asyncio.create_task(self._supervisor.failure())
        try:
            done, _ = await asyncio.wait(
                {started, failure}, timeout=self._up_within, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise StackError(self._not_ready())
            for task in done:
                task.result()
        except ChildFailedError as error:
            raise StackError(self._with_tail(str(error), error.name), code=2) from error
        except (PostgresStartError, OSError, TimeoutError) as error:
            raise StackError(str(error)) from error
        finally:
            for task in (started, failure):
                task.cancel()
            await asyncio.gather(started, failure, return_exceptions=True)
        self._ready = True
        self._changed()
        self._chores.add(asyncio.create_task(self._bound_logs()))

    def _take_data_dir(self) -> None:
        try:
            self.data.open()
            self.data.lock()
            self._secrets = Secrets(
                self._environ.get("PERDURE_SECRET_KEY") or self.data.secret("secret_key", _key),
                self._environ.get("PERDURE_CALLBACK_SECRET")
                or self.data.secret("callback_secret", partial(secrets.token_urlsafe, 32)),
            )
        except InUseError as error:
            raise StackError(str(error)) from error
        except OSError as error:
            raise StackError(
                f"{self.data.root} cannot be used: {error.strerror}; choose another --data-dir"
            ) from error
        self.data.dev_json.unlink(missing_ok=True)

    def _clear_leftovers(self) -> None:
        found = process.stop_leftovers(
            self.data.recorded_children(), {"postgres": signal.SIGINT}, LEFTOVER_SECONDS
        )
        if found:
            self._say(f"stopped what an earlier start left running: {', '.join(found)}")

    async def _choose_models(self) -> None:
        if self.options.models is not None:
            self._models = self.options.models.resolve()
        else:
            self._models = self.data.root / "models.toml"
            served = await self._served_model()
            content = catalogue.builtin_models(
                base_url=self._model_url,
                served_model=served,
                foreign=not self.options.embedded_model,
                key=catalogue.API_KEY_ENV in self._environ,
            )
            head = "Written by `perdure dev` at each start. To change it, give a copy of it with --models."
            self._models.write_text(catalogue.to_toml(content, head), encoding="utf-8")
        self.catalogue = load_catalogue(self._models)

    async def _served_model(self) -> str | None:
        """The name that a foreign model server wants: PERDURE_MODEL_NAME, else the first it lists."""
        if self.options.embedded_model or self._model_url is None:
            return None
        key = self._environ.get(catalogue.API_KEY_ENV)
        name = self._environ.get("PERDURE_MODEL_NAME") or await catalogue.first_model(self._model_url, key)
        if name is None:
            self._say(
                f"{self._model_url} does not say which models it has; tasks will ask it for "
                f"{catalogue.EMBEDDED_MODEL!r} (set PERDURE_MODEL_NAME to its own name)"
            )
        return name

    def _check_ports(self) -> None:
        used = self._ports.used(model=self.options.embedded_model, workers=len(self._workers()))
        taken = []
        for what, port in used.items():
            if not ports.is_free(port):
                by = ports.holder(port)
                taken.append(f"port {port} ({what}) is taken" + (f" by {by}" if by else ""))
        if taken:
            raise StackError(f"{'; '.join(taken)}. Stop that, or move all ports: --port-base N (say 18000)")

    def _workers(self) -> list[str]:
        """Names of the worker children, in the order of their metrics ports."""
        each = range(self.options.gpu_workers)
        return ["control", "callbacks", *(f"gpu:{pool}:{n}" for pool in self.catalogue.pools for n in each)]

    async def _start_all(self) -> None:
        names = self._workers()
        self.urls = plan.urls(self._ports, model_url=self._model_url, workers=names)
        base = plan.base_environment(self._environ, self._ports, self._models, self._model_url)
        start = self._supervisor.start
        self._postgres = EmbeddedPostgres(self.data.root / "postgres", self._ports.postgres)
        self.data.link_log("postgres", self._postgres.log)
        postgres = asyncio.create_task(
            start(
                Program(
                    "postgres",
                    self._launch_postgres,
                    _POSTGRES,
                    slow=True,
                    stop_signal=signal.SIGINT,
                    patience=3,
                )
            )
        )
        await asyncio.sleep(0)  # it begins first
        temporal = EmbeddedTemporal(
            self.data.root / "temporal", self._ports.temporal, self._ports.temporal_ui
        )
        temporal.root.mkdir(mode=0o700, exist_ok=True)  # payloads of tasks
        await start(self._program("temporal", temporal.command(), base, _TEMPORAL, patience=5))
        if self.options.embedded_model:
            await start(
                self._program("model", model_server.command(self._ports.model), base, _MODEL, patience=1)
            )
        await postgres
        keys = [model.api_key_env for model in self.catalogue.models.values() if model.api_key_env]
        full = plan.database_environment(
            base, database_url=self._postgres.dsn, secrets=self._secrets, ports=self._ports, model_keys=keys
        )
        client = await wait_until_serving(temporal.address, self._up_within)
        await keep_for(client, RETENTION)
        await self._migrate(full)
        await start(self._program("api", command("api"), full, _API))
        pools: dict[str, int] = {}
        for n, name in enumerate(names):
            port = self._ports.metrics + n
            if name.startswith("gpu:"):
                pool = name.split(":")[1]
                pools[pool] = pools.get(pool, 0) + 1
                line, env = command("worker", "gpu", "--pool", pool), plan.gpu_environment(base, port)
                await start(self._program(name, line, env, _GPU, patience=4.5))
            else:
                env = full | {"PERDURE_METRICS_PORT": str(port)}
                await start(self._program(name, command("worker", name), env, _CONTROL, patience=3))
        async with httpx.AsyncClient(trust_env=False) as http:
            await ready.everything(client, http, self.urls["api"], pools)

    def _program(
        self, name: str, line: list[str], env: Mapping[str, str], group: int, patience: float = 2.0
    ) -> Program:
        launch = partial(process.spawn, line, env, self.data.new_log(name), Path.cwd())
        return Program(name, launch, group, patience=patience)

    def _launch_postgres(self) -> subprocess.Popen[bytes]:
        assert self._postgres is not None
        self._postgres.start()
        assert self._postgres.proc is not None
        return self._postgres.proc

    async def _migrate(self, env: Mapping[str, str]) -> None:
        """The schema, in a process of its own: the parent stays small."""
        migration = process.spawn(command("migrate"), env, self.data.new_log("migrate"), Path.cwd())
        try:
            while (code := migration.poll()) is None:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.05)
        finally:
            process.kill_group(migration.pid)
        if code != 0:
            raise StackError(self._with_tail(f"the migration {process.how_it_ended(code)}", "migrate"))

    # While it runs ------------------------------------------------------------------------------------
    def _changed(self) -> None:
        """A process id changed: what others read is brought up to date."""
        found = self._supervisor.identities()
        self.data.record_children(found)
        if self._ready:
            self.data.write_dev(self._description({name: who.pid for name, who in found.items()}))

    def _description(self, children: Mapping[str, int]) -> dict[str, Any]:
        assert self._postgres is not None
        return {
            "urls": self.urls,
            "database_url": self._postgres.dsn,
            "children": dict(children),
            "pid": os.getpid(),
            "callback_secret": self._secrets.callback_secret,
            "data_dir": str(self.data.root),
            "models": str(self._models),
        }

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_PAUSE)
            for name in self._supervisor.identities():
                self.data.bound_log(name)

    def _with_tail(self, message: str, name: str) -> str:
        tail = self.data.log_tail(name)
        return "\n".join([f"{message}; {self.data.log(name)} ends:", *(f"  {line}" for line in tail)])

    def _not_ready(self) -> str:
        down = [name for name in self._supervisor.identities() if not self._supervisor.running(name)]
        what = f"not running: {', '.join(down)}" if down else "every process runs, but not all of them answer"
        return f"not ready after {self._up_within:.0f} s ({what}); the logs are in {self.data.logs}"

    # Down ---------------------------------------------------------------------------------------------
    async def down(self) -> None:
        """Stops everything in reverse within 15 s. Leaves no process."""
        self._ready = False
        for chore in self._chores:
            chore.cancel()
        if self.data.locked:
            self.data.dev_json.unlink(missing_ok=True)
            await self._supervisor.stop(STOP_SECONDS)
            self.data.unlock()

    def kill(self) -> None:
        """Stops everything at once."""
        self._supervisor.kill()


def _key() -> str:
    """32 random bytes in base64, as PERDURE_SECRET_KEY wants them."""
    return base64.b64encode(secrets.token_bytes(32)).decode()
