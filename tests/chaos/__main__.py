"""`make chaos`: kill, freeze and drain everything at random, then count what was promised.

    python -m tests.chaos --tasks 500 --seed 7

Exit code 0 when every promise held, 1 when one was broken. The seed is printed: the same one gives the same
tasks and the same order of faults (their moments depend on the machine).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from tests.chaos.run import chaos


def main() -> int:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--pace", type=float, default=4.0, help="submits a second")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000)
    print(f"chaos: {given.tasks} tasks, seed {seed}", flush=True)
    began = time.monotonic()
    report = asyncio.run(chaos(given.tasks, seed, given.pace, say=_say))
    for name, value in report.verdict.figures.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, one in sorted(value.items()):
                print(f"    {key:<34} {one}")
        else:
            print(f"{name:<58} {value}")
    print(f"took {time.monotonic() - began:.0f} s with {len(report.strikes)} faults")
    for line in report.verdict.broken:
        print(f"BROKEN  {line}")
    print("every promise held" if not report.verdict.broken else f"promises broken; seed {seed}")
    return 1 if report.verdict.broken else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
