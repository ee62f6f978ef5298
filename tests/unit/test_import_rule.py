"""Who may import whom. A change that breaks this is a change of design (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOORS = ("workflows", "activities", "api", "workers")
PACKAGES = ("perdure", *DOORS)

# package -> what of ours it may import, by prefix
MAY: dict[str, tuple[str, ...]] = {
    "perdure": ("perdure",),
    "workflows": ("workflows", "perdure.contracts", "perdure.names", "perdure.task", "activities"),
    "activities": ("activities", "perdure"),
    "api": ("api", "perdure", "workflows"),
    "workers": PACKAGES,
}
# what only one part may import: SQL, HTTP to models and receivers
ONLY_IN: dict[str, tuple[str, ...]] = {
    "sqlalchemy": ("perdure.store", "perdure.observability"),
    "asyncpg": ("perdure.store",),
    "alembic": ("perdure.store",),
    "httpx": (
        "perdure.llm",
        "perdure.callback",
        "perdure.embedded",
        "perdure.demo",
        "perdure.client",
        "workers",
    ),
    "httpcore": ("perdure.callback",),
    "xllamacpp": ("perdure.embedded",),
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield dotted.removesuffix(".__init__"), path


def imports(name: str, path: Path) -> Iterator[tuple[str, int, bool]]:
    """Every import of a module: full name, line, and whether it stands inside a function."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    inside = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node in inside
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, node in inside


def is_under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


ALL = [(package, name, path) for package in PACKAGES for name, path in modules(package)]


@pytest.mark.parametrize(("package", "name", "path"), ALL, ids=[name for _, name, _ in ALL])
def test_module_imports_only_what_its_package_may(package: str, name: str, path: Path) -> None:
    wrong = []
    for imported, line, inside in imports(name, path):
        if not is_under(imported, PACKAGES) or is_under(imported, MAY[package]):
            continue
        if name == "perdure.cli" and inside:
            continue  # a command imports the process that it runs
        wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong


@pytest.mark.parametrize(("package", "name", "path"), ALL, ids=[name for _, name, _ in ALL])
def test_sql_and_http_stay_in_their_place(package: str, name: str, path: Path) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for imported, line, _ in imports(name, path)
        for library, places in ONLY_IN.items()
        if is_under(imported, (library,)) and not is_under(name, places)
    ]
    assert not wrong


def test_command_line_loads_none_of_the_doors() -> None:
    """`perdure --help` and the parent of the local stack stay small."""
    import subprocess
    import sys

    program = "import sys, perdure.cli; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    assert not loaded & {*DOORS, "sqlalchemy", "fastapi", "temporalio", "httpx", "pydantic"}


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "import api.app\nfrom workers import run\nfrom . import sibling\nfrom ..store import tasks as t\n"
        "def f():\n    import workflows\n"
    )
    assert list(imports("perdure.llm.x", path)) == [
        ("api.app", 1, False),
        ("workers.run", 2, False),
        ("perdure.llm.sibling", 3, False),
        ("perdure.store.tasks", 4, False),
        ("workflows", 6, True),
    ]
