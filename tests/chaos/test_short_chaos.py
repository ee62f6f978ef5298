"""The short form of `make chaos`: a fixed seed, the faults that matter most, every promise."""

from __future__ import annotations

import pytest

from tests.chaos.run import chaos

KINDS = (
    "kill gpu", "freeze gpu", "drain gpu", "kill control", "kill api", "kill temporal", "kill postgres",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("chaos")
async def test_every_promise_holds() -> None:
    report = await chaos(tasks=60, seed=20, pace=6.0, kinds=KINDS, every=(0.1, 1.0), say=print)
    figures = report.verdict.figures
    assert report.verdict.broken == [], figures
    assert {strike.kind.split(" (")[0] for strike in report.strikes} == set(KINDS)
    assert figures["accepted"] >= 60
    assert (
        sum(figures[f"final {state}"] for state in ("COMPLETED", "FAILED", "CANCELLED"))
        == figures["accepted"]
    )
    assert figures["final COMPLETED"] > figures["accepted"] / 2
