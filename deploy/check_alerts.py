"""Runs the alert rules and the scrape configuration through Prometheus' own tools (`make check-alerts`).

Exit status 0: all passed. 1: something is wrong. 2: a tool is missing; the text says which and how to get it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent / "prometheus"
CHECKS = (
    ("promtool", "check", "rules", "rules.yml"),
    ("promtool", "test", "rules", "rules_test.yml"),
    ("promtool", "check", "config", "prometheus.yml"),
    ("amtool", "check-config", "alertmanager.yml"),
)
PACKAGES = {"promtool": "prometheus", "amtool": "prometheus-alertmanager"}


def main() -> int:
    """Runs each check whose tool is there, and says in words what could not run."""
    failed: list[str] = []
    missing: set[str] = set()
    for command in CHECKS:
        tool = shutil.which(command[0])
        if tool is None:
            missing.add(command[0])
            continue
        print("$ " + " ".join(command), flush=True)
        done = subprocess.run([tool, *command[1:]], cwd=HERE, check=False)  # noqa: S603 - our own arguments
        if done.returncode != 0:
            failed.append(" ".join(command))
    for tool in sorted(missing):
        print(
            f"not checked: {tool} is not on the PATH. On Debian or Ubuntu:\n"
            f"  apt-get install --no-install-recommends {PACKAGES[tool]}\n"
            "elsewhere take it from https://prometheus.io/download/",
            file=sys.stderr,
        )
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    if failed:
        return 1
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
