"""What is installed, and what the repository promises about installing it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("perdure", "workflows", "activities", "api", "workers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


@pytest.mark.parametrize("package", OURS)
def test_no_other_distribution_owns_our_package_names(package: str) -> None:
    """`api` and `workers` are common words: a second owner would shadow ours, silently."""
    owners = set(importlib.metadata.packages_distributions().get(package, [])) - {"perdure"}
    assert not owners, f"{owners} also installs a package called {package}"
    for found in importlib.metadata.distributions():
        if found.name == "perdure":
            continue
        files = found.files or []
        assert not [str(file) for file in files if file.parts[0] in (package, f"{package}.py")], found.name


def test_lock_has_hashes_and_no_addresses() -> None:
    assert "http://" not in LOCK
    assert "https://" not in LOCK
    pins = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==", LOCK, re.MULTILINE)
    assert len(pins) > 50
    for entry in re.split(r"\n(?=[A-Za-z0-9])", LOCK.strip()):
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_lock_holds_every_direct_dependency() -> None:
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *project["optional-dependencies"]["embedded"],
        *PROJECT["dependency-groups"]["dev"],
    ]
    pinned = {
        name.lower().replace("_", "-") for name in re.findall(r"^([A-Za-z0-9._-]+)", LOCK, re.MULTILINE)
    }
    for requirement in wanted:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match is not None
        assert match[0].lower().replace("_", "-") in pinned


def test_every_dependency_says_why() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    entries = [line for line in lines if re.match(r'    "[a-z]', line) and (">=" in line or "==" in line)]
    assert len(entries) > 30
    assert not [line.strip() for line in entries if "#" not in line]


@pytest.mark.parametrize(
    "data", ["embedded/dynamicconfig.yaml", "embedded/models.toml", "demo_text.txt", "py.typed"]
)
def test_data_files_are_inside_the_package(data: str) -> None:
    """The wheel takes what lies in our packages and git keeps; two of these are links."""
    path = ROOT / "perdure" / data
    assert path.is_file()
    assert data == "py.typed" or path.read_text().strip()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(OURS)
    if (ROOT / ".git").exists():
        ignored = subprocess.run(["git", "check-ignore", "-q", str(path)], cwd=ROOT, check=False)
        assert ignored.returncode == 1
