"""Prints the part of requirements.lock that the service needs at run time, with its hashes.

    python deploy/runtime_lock.py requirements.lock pyproject.toml > runtime.lock

The lock also holds the embedded servers and the tests' packages, half a gigabyte that no image needs.
Its `# via` notes say who needs what; followed from the project's own dependencies they give the rest.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def normal(name: str) -> str:
    """A package name in the form in which names compare equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def blocks(lock: str) -> dict[str, str]:
    """The text of each package in the lock, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in lock.splitlines():
        if line and not line[0].isspace() and line[0] != "#":
            start = _NAME.match(line)
            if start is None:
                raise ValueError(f"requirements.lock: not a requirement: {line}")
            name = normal(start[0])
        if name:
            found[name] = found.get(name, "") + line + "\n"
    return found


def needed_by(block: str) -> set[str]:
    """Who needs the package of this block, from its `# via` notes."""
    notes = [line.strip("# ").removeprefix("via").strip() for line in block.splitlines() if "#" in line]
    return {normal(note) for note in notes if note}


def runtime(lock: str, project: str) -> str:
    """The blocks of every package that the project's dependencies lead to. Raises ValueError when one is not
    in the lock."""
    packages = blocks(lock)
    declared = tomllib.loads(project)["project"]["dependencies"]
    names = [_NAME.match(one) for one in declared]
    chosen = {normal(name[0]) for name in names if name is not None}
    if missing := chosen - set(packages):
        raise ValueError(f"requirements.lock lacks {', '.join(sorted(missing))}; run make lock")
    grew = True
    while grew:
        more = {name for name, block in packages.items() if name not in chosen and needed_by(block) & chosen}
        chosen |= more
        grew = bool(more)
    return "".join(packages[name] for name in sorted(chosen))


def main() -> int:
    """Reads the two files and prints."""
    lock, project = (Path(argument).read_text(encoding="utf-8") for argument in sys.argv[1:3])
    sys.stdout.write(runtime(lock, project))
    return 0


if __name__ == "__main__":
    sys.exit(main())
