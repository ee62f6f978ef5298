"""Several API processes with a page each: counters add up, gauges agree, a crash leaves no ghost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.observability.processes import Processes

NAMES = [f"api{number}" for number in range(4)]
MODELS = '[pools.local]\n[models.simulated]\npool = "local"\nexecutor = "simulated"\n'
SUBMITS = 100


@pytest.fixture
def stack(tmp_path: Path, database_url: str) -> Iterator[Processes]:
    """Four API processes; Temporal is away, so that what is submitted stays PENDING."""
    commands = {name: ["api"] for name in NAMES}
    with Processes(tmp_path, database_url, "127.0.0.1:1", models=MODELS, commands=commands) as one:
        yield one


def total(page: str, name: str, **labels: str) -> float:
    """The sum of a page's samples of this name that carry these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def pages(stack: Processes) -> list[str]:
    return await asyncio.gather(*(asyncio.to_thread(stack.page, name) for name in NAMES))


async def settled(stack: Processes, name: str, wanted: float, **labels: str) -> bool:
    """Whether every page shows the figure; gauges are read anew after a second."""
    for _ in range(20):
        if all(total(page, name, **labels) == wanted for page in await pages(stack)):
            return True
        await asyncio.sleep(0.5)
    return False


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_four_processes_count_exactly_and_agree_on_what_is_in_the_rows(stack: Processes) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:

        async def submit(number: int) -> None:
            port = stack.ports[NAMES[number % 4]]
            body = {"model_id": "simulated", "params": {}, "task_type": f"stranger-{number}"}
            sent = await client.post(f"http://127.0.0.1:{port}/v1/tasks", json=body)
            assert sent.status_code == 202, sent.text

        before = 0.0
        for first in range(0, SUBMITS, 20):
            await asyncio.gather(*(submit(number) for number in range(first, first + 20)))
            for _ in range(4):  # twenty scrapes in all: exact each time, never backwards
                seen = await pages(stack)
                now = sum(total(page, "perdure_tasks_submitted_total") for page in seen)
                assert now == first + 20 >= before
                before = now
    series = {
        sample.labels["task_type"]
        for page in seen
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "perdure_tasks_submitted_total"
    }
    assert series == {"chat", "document", "code-review", "other"}  # a hundred strangers made no series
    assert await settled(stack, "perdure_queue_depth", SUBMITS, pool="local", priority="NORMAL")
    assert await settled(stack, "perdure_tasks", SUBMITS, status="PENDING")

    await asyncio.to_thread(stack.kill, NAMES[0])
    own, *others = await pages(stack)
    assert total(own, "perdure_tasks_submitted_total") == 0
    assert sum(total(page, "perdure_tasks_submitted_total") for page in others) == SUBMITS * 3 / 4
    assert await settled(stack, "perdure_queue_depth", SUBMITS, pool="local", priority="NORMAL")
