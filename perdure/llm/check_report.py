"""The report of `perdure models check`: what was found out, and the lines of models.toml that fit."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Finding:
    """One answer. `ok` None: it could not be found out."""

    name: str
    ok: bool | None
    says: str


@dataclass(frozen=True)
class Report:
    """All answers on one model. `resume`: the dialect that fits, "none" where none does."""

    model: str
    findings: list[Finding]
    usable: bool
    resume: str = "none"
    tokens_per_second: float | None = None
    lines: list[str] = field(default_factory=list)  # of models.toml


def print_report(report: Report, console: Console | None = None) -> None:
    """The report as a table, and the lines for models.toml."""
    console = console or Console()
    table = Table(title=f"model {report.model}", title_justify="left", show_header=False)
    for finding in report.findings:
        mark = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]?[/]"}[finding.ok]
        table.add_row(finding.name, mark, finding.says)
    console.print(table)
    if report.lines:
        console.print("\nmodels.toml:\n")
        console.print("\n".join(report.lines), highlight=False, markup=False)
