"""Signals to workflows while Temporal is away: a change of class is told again, the last one alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api import signals
from api.signals import Signals
from perdure.task.states import Priority
from perdure.temporal import EngineUnavailable, TemporalGate
from tests.support.waiting import until


class Gate(TemporalGate):
    """An engine that can be away."""

    def __init__(self) -> None:
        self.away = True
        self.told: list[tuple[str, str]] = []

    async def signal_priority(self, task_id: str, priority: str) -> bool:
        if self.away:
            raise EngineUnavailable("away")
        self.told.append((task_id, priority))
        return True


class Hub:
    def poke(self, task_id: str) -> None: ...


async def test_a_change_of_class_is_told_when_temporal_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_AGAIN", (0.02,) * 200)
    monkeypatch.setattr(signals, "PATIENCE", 0.05)
    gate, hub = Gate(), Hub()
    one: Any = hub
    sent = Signals(gate, one)
    await sent.priority("a", Priority.HIGH)
    await sent.priority("a", Priority.LOW)
    await sent.priority("b", Priority.HIGH)
    assert gate.told == []
    gate.away = False
    await until(lambda: len(gate.told) == 2)
    await asyncio.sleep(0.1)
    assert sorted(gate.told) == [("a", "LOW"), ("b", "HIGH")]
    await sent.aclose()


async def test_it_is_given_up_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "PATIENCE", 0.05)
    gate = Gate()
    hub: Any = Hub()
    sent = Signals(gate, hub)
    await sent.priority("a", Priority.HIGH)
    await asyncio.wait_for(sent.aclose(), 5)
    gate.away = False
    await asyncio.sleep(0.05)
    assert gate.told == []
