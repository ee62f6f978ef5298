"""Whether a worker notices that Temporal does not hear it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from activities import pulse as module
from activities.pulse import Pulse
from tests.support.waiting import until


class Temporal:
    """The one call that a pulse makes, answered as `says`."""

    def __init__(self) -> None:
        self.says: RPCStatusCode | None = None
        self.asked = 0
        self.workflow_service = SimpleNamespace(get_system_info=self._answer)

    async def _answer(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        if self.says is not None:
            raise RPCError("no", self.says, b"")


@pytest.fixture
def temporal(monkeypatch: pytest.MonkeyPatch) -> Temporal:
    monkeypatch.setattr(module, "EVERY", 0.02)
    return Temporal()


@pytest.mark.parametrize("says", [None, RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.RESOURCE_EXHAUSTED])
async def test_any_answer_shows_that_the_way_is_open(temporal: Temporal, says: RPCStatusCode | None) -> None:
    temporal.says = says
    pulse = Pulse(temporal)  # type: ignore[arg-type]
    async with pulse.felt():
        lost = asyncio.create_task(pulse.lost(0.5))
        await until(lambda: temporal.asked > 40)
        assert not lost.done()
        lost.cancel()


@pytest.mark.parametrize("says", [RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED])
async def test_silence_is_noticed_and_an_answer_in_time_forgives_it(
    temporal: Temporal, says: RPCStatusCode
) -> None:
    pulse = Pulse(temporal)  # type: ignore[arg-type]
    async with pulse.felt():
        temporal.says = says
        began = time.monotonic()
        lost = asyncio.create_task(pulse.lost(1.0))
        await asyncio.sleep(0.5)
        temporal.says = None
        seen = temporal.asked
        await until(lambda: temporal.asked > seen + 2)
        temporal.says = says
        await asyncio.wait_for(lost, 20)
        assert time.monotonic() - began > 1.4


async def test_nobody_is_asked_while_nothing_runs(temporal: Temporal) -> None:
    pulse = Pulse(temporal)  # type: ignore[arg-type]
    async with pulse.felt(), pulse.felt():
        await until(lambda: temporal.asked > 0)
    seen = temporal.asked
    await asyncio.sleep(0.2)
    assert temporal.asked <= seen + 1
    async with pulse.felt():
        await until(lambda: temporal.asked > seen + 2)
