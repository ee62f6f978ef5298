"""`perdure models check NAME`: what a model server can do, found out by asking it.

    report = await check_model(catalogue, "smollm2-135m", os.environ)
    print_report(report)

It makes a handful of short requests at temperature 0: does the server stream, report usage, continue a text
(continued = uninterrupted), stop when the client goes away, and how fast is it. The report ends with the
lines of models.toml that fit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from perdure.llm.check_report import Finding, Report, print_report
from perdure.llm.executors import SetupError, build_executor
from perdure.llm.openai import OpenAIExecutor
from perdure.llm.server_check import ServerCheck
from perdure.models import Catalogue, CatalogueError, load_catalogue


async def check_model(catalogue: Catalogue, name: str, env: Mapping[str, str]) -> Report:
    """Asks a model of the catalogue. Raises CatalogueError for a name that is not in it."""
    model = catalogue.models.get(name)
    if model is None:
        known = ", ".join(sorted(catalogue.models)) or "none"
        raise CatalogueError(f"there is no [models.{name}] in models.toml; its models are: {known}")
    try:
        executor = build_executor(name, model, env)
    except SetupError as error:
        return Report(name, [Finding("set up", False, error.message)], usable=False)
    if not isinstance(executor, OpenAIExecutor):
        await executor.aclose()
        return Report(name, [Finding("set up", True, f"executor '{model.executor}' is ready")], usable=True)
    try:
        return await ServerCheck(name, model, env).run()
    finally:
        await executor.aclose()


def main(name: str | None = None, file: Path | None = None) -> int:
    """The command: checks one model, or all. 0 when each is usable."""
    catalogue = load_catalogue(file or Path(os.environ.get("PERDURE_MODELS", "models.toml")))
    reports = [
        asyncio.run(check_model(catalogue, each, os.environ))
        for each in ([name] if name else catalogue.models)
    ]
    for report in reports:
        print_report(report)
    return 0 if all(report.usable for report in reports) else 1
