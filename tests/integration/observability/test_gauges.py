"""Gauges from rows on a real Postgres, and the page while Postgres is away."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perdure.contracts import Projection
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.models import parse_catalogue
from perdure.observability import gauges
from perdure.observability.gauges import StatsGauges
from perdure.observability.metrics import Metrics
from perdure.observability.page import Exposition
from perdure.store import Store, make_engine
from perdure.store.rows import WorkerReport
from perdure.task.states import Priority, Status
from tests.support.tasks import submit
from tests.support.waiting import until

CATALOGUE = parse_catalogue('[pools.p]\n[pools.big]\n[models.m]\npool = "p"\nexecutor = "simulated"\n')


async def figures(exposition: Exposition) -> dict[str, float]:
    """The page's samples, as `name{label=value,…}`."""
    found = {}
    for family in text_string_to_metric_families((await exposition.render()).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def page_of(store: Store) -> Exposition:
    metrics = Metrics(CATALOGUE)
    return Exposition(metrics, gauges=StatsGauges(metrics, store))


async def test_rows_and_live_workers_are_shown(store: Store) -> None:
    for priority in (Priority.HIGH, Priority.LOW, Priority.LOW):
        await submit(store, priority=priority)
    await submit(store, pool="gone")  # a pool that the configuration no longer knows
    await store.workers.report(
        [
            WorkerReport("w1", "p", ("m",), slots=4, in_use=1),
            WorkerReport("w2", "p", ("m",), slots=4, in_use=3, draining=True),
            WorkerReport("w3", "gone", (), slots=2, in_use=0),
        ]
    )
    seen = await figures(page_of(store))
    assert seen["perdure_tasks{status=PENDING}"] == 4
    assert seen["perdure_tasks{status=COMPLETED}"] == 0
    assert seen["perdure_queue_depth{pool=p,priority=HIGH}"] == 1
    assert seen["perdure_queue_depth{pool=p,priority=LOW}"] == 2
    assert seen["perdure_queue_depth{pool=other,priority=NORMAL}"] == 1
    assert seen["perdure_queue_depth{pool=big,priority=HIGH}"] == 0
    assert 0 < seen["perdure_queue_oldest_wait_seconds{pool=p,priority=LOW}"] < 60
    assert seen["perdure_pool_slots{pool=p,state=busy}"] == 4
    assert seen["perdure_pool_slots{pool=p,state=free}"] == 3  # a draining worker takes nothing new
    assert seen["perdure_pool_slots{pool=other,state=free}"] == 2
    assert seen["perdure_pool_slots{pool=big,state=free}"] == 0
    assert seen["perdure_stats_up{}"] == 1


async def test_a_burst_of_scrapes_reads_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    exposition, reads = page_of(store), 0
    by_state = store.stats.by_state

    async def counted() -> object:
        nonlocal reads
        reads += 1
        return await by_state()

    monkeypatch.setattr(store.stats, "by_state", counted)
    monkeypatch.setattr(gauges, "_FRESH_SECONDS", 60.0)
    await asyncio.gather(*(exposition.render() for _ in range(20)))
    assert reads == 1


@pytest.mark.slow
async def test_the_page_answers_with_the_last_figures_while_postgres_is_away(
    own_postgres: EmbeddedPostgres,
) -> None:
    store = Store(make_engine(own_postgres.dsn, pool_size=2, application_name="perdure-test"))
    try:
        await submit(store)
        exposition = page_of(store)
        assert (await figures(exposition))["perdure_stats_up{}"] == 1
        await asyncio.to_thread(own_postgres.kill)

        async def told() -> bool:
            return (await figures(exposition))["perdure_stats_up{}"] == 0

        begin = time.monotonic()
        await until(told)
        seen = await figures(exposition)
        assert time.monotonic() - begin < 30
        assert seen["perdure_queue_depth{pool=p,priority=NORMAL}"] == 1
        await asyncio.to_thread(own_postgres.start)

        async def back() -> bool:
            return (await figures(exposition))["perdure_stats_up{}"] == 1

        await until(back)
    finally:
        await store.aclose()


async def test_a_task_that_waits_again_is_no_consumption_delay(store: Store) -> None:
    """It started long ago and failed: its back-off says nothing of how fast new tasks are taken."""
    old = datetime.now(UTC) - timedelta(hours=1)
    task = await submit(store)
    await store.tasks.project(
        Projection(task_id=task, version=5, status=Status.QUEUED, queued_at=old, started_at=old)
    )
    seen = await figures(page_of(store))
    assert seen["perdure_queue_depth{pool=p,priority=NORMAL}"] == 1
    assert seen["perdure_queue_oldest_wait_seconds{pool=p,priority=NORMAL}"] == 0
