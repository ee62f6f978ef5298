"""`python -m bench`: measures and prints."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import uvloop

from bench import (
    rows_cancel,
    rows_faults,
    rows_latency,
    rows_priority,
    rows_slots,
    rows_submit,
    rows_throughput,
)
from bench.case import Case
from bench.ground import Ground
from bench.stack import StackDidNotStart, tree_cpu
from bench.table import Row, render

CASES: list[Case] = [
    *rows_submit.CASES,
    *rows_throughput.CASES,
    *rows_latency.CASES,
    *rows_slots.CASES,
    *rows_priority.CASES,
    rows_slots.LAST,
    *rows_faults.CASES,
    *rows_cancel.CASES,
]
_NOTES = """\
Generators, receiver and model server run on the same cores as what they measure. "bare Temporal" is a
workflow of three activities (model, row, webhook) in processes of its own, unsandboxed, on the same Temporal
and Postgres in the same run; Perdure's workflows run in the SDK's sandbox. p99 is the nearest rank: of fewer
than 100 samples it is the worst. Ratios are Perdure / bare: above 1 is better for rates, below 1 for times
and costs. A reach was set on two loaded cores; "met" says how it went here and now; nothing fails by it.
`make chaos` answers the last line of the design's table: what is lost when everything is killed at random."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", metavar="ROW[,ROW]", help="measure these rows only (see --list)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")
    parser.add_argument("--list", action="store_true", help="list the rows and end")
    return parser.parse_args()


def _chosen(only: str | None) -> list[Case]:
    if only is None:
        return CASES
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    known = {case.name: case for case in CASES}
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"bench: no row {', '.join(unknown)}; there are: {', '.join(known)}")
    return [case for case in CASES if case.name in wanted]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Run:
    """One run: rows so far, and what else the machine did meanwhile."""

    def __init__(self, cases: list[Case], *, quick: bool) -> None:
        self._cases, self._quick = cases, quick
        self.rows: list[Row] = []
        self.failed: dict[str, str] = {}
        self.others: dict[str, float] = {}
        self.began = datetime.now(UTC)
        self.load = os.getloadavg()

    async def all(self) -> None:
        """Every case, those of one kind of stack on the same stack. What cannot be measured is named."""
        for kind, group in itertools.groupby(self._cases, key=lambda case: case.kind):
            _say(f"bench: starting a stack with {kind.name}")
            async with Ground(kind, quick=self._quick, say=_say) as ground:
                for case in group:
                    await self._one(case, ground)

    async def _one(self, case: Case, ground: Ground) -> None:
        _say(f"bench: {case.name}: {case.title} ...")
        began, ours, busy = time.monotonic(), _our_cpu(), _machine_cpu()
        try:
            found = await case.run(ground)
        except Exception as error:  # one row that cannot be measured must not hide the others
            self.failed[case.name] = f"{type(error).__name__}: {error}"
            _say(f"bench: {case.name} could not be measured: {self.failed[case.name]}")
            return
        seconds = time.monotonic() - began
        room = seconds * (psutil.cpu_count() or 1)
        self.others[case.name] = max(0.0, (_machine_cpu() - busy) - (_our_cpu() - ours)) / room
        self.rows += found
        _say(render(found))
        share = self.others[case.name]
        _say(f"bench: {case.name} took {seconds:.0f} s; others used {share:.0%} of the machine")

    def report(self) -> str:
        """The whole output."""
        machine = f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
        load = " ".join(f"{value:.2f}" for value in self.load)
        lines = [
            f"Perdure bench, {self.began:%Y-%m-%d %H:%M} UTC, {machine}, load average at the start {load}"
            + (", quick" if self._quick else ""),
            "",
            render(self.rows) if self.rows else "nothing was measured",
            "",
            *(f"not measured: {name}: {why}" for name, why in self.failed.items()),
        ]
        if self.others:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.others.items())
            lines.append(f"Share of the machine that other programs used during each row: {shares}.")
        return "\n".join([*lines, _NOTES])

    def as_json(self) -> str:
        return json.dumps(
            {
                "date": self.began.isoformat(timespec="seconds"),
                "cores": psutil.cpu_count(),
                "load_average": self.load,
                "quick": self._quick,
                "rows": [row.as_json() for row in self.rows],
                "others": self.others,
                "failed": self.failed,
            },
            indent=2,
        )


def _our_cpu() -> float:
    return tree_cpu(os.getpid())


def _machine_cpu() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


async def _measure(run: Run) -> bool:
    """Runs until done or told to stop; the stack is stopped either way. True when it was cut short."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await run.all()
    except asyncio.CancelledError:
        _say("bench: stopped")
        return True
    return False


def main() -> int:
    """Prints the table; the exit code tells only whether it could measure."""
    given = _arguments()
    if given.list:
        print("\n".join(f"{case.name:<12} {case.title}" for case in CASES))
        return 0
    run = Run(_chosen(given.only), quick=given.quick)
    try:
        stopped = uvloop.run(_measure(run))
    except StackDidNotStart as error:
        _say(f"bench: {error}")
        return 1
    print(run.report())
    if given.json:
        given.json.write_text(run.as_json() + "\n")
    return 130 if stopped else 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
