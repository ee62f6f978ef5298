"""Who counts as a live worker, what a worker tells, and which models nobody has."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure import names
from perdure.contracts import ModelNews, WorkerNews
from perdure.dispatcher import unserved
from perdure.llm.breaker import Breaker
from perdure.models import parse_catalogue
from perdure.store.rows import WorkerRow
from perdure.task.errors import TaskFault
from tests.support.waiting import until
from workers import news as news_module
from workers.gpu import GpuWorker
from workers.news import Teller
from workers.roll_call import Pulse

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CATALOGUE = parse_catalogue(
    """
    [pools.p]
    slots = 3
    [models.m]
    pool = "p"
    executor = "simulated"
    [models.far]
    pool = "p"
    base_url = "http://127.0.0.1:9/v1"
    [models.keyless]
    pool = "p"
    base_url = "http://127.0.0.1:9/v1"
    api_key_env = "NONE"
    [pools.q]
    [models.n]
    pool = "q"
    executor = "simulated"
    """
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pulse(clock: Clock, skew: float = 0.0) -> Pulse:
    return Pulse(clock, lambda: clock.now + skew)


@pytest.mark.parametrize("skew", [0.0, -3600.0, 3600.0])
def test_a_heartbeat_that_changes_is_a_pulse_whatever_the_clocks_say(skew: float) -> None:
    clock = Clock()
    watch = pulse(clock, skew)
    watch.silent("w", clock.now)
    for _ in range(3):
        clock.now += 5
        assert watch.silent("w", clock.now) == 0
    last = clock.now
    clock.now += 12
    assert watch.silent("w", last) == 12


def test_a_dead_worker_that_is_still_listed_counts_from_its_last_heartbeat() -> None:
    clock = Clock()
    watch = pulse(clock)
    assert watch.silent("dead", clock.now - 90) == 90
    clock.now += 5
    assert watch.silent("dead", clock.now - 95) == 95
    assert watch.silent("ahead", clock.now + 7) == 0  # its clock goes before ours


def test_workers_that_were_silent_for_long_are_forgotten() -> None:
    clock = Clock()
    watch = pulse(clock)
    watch.silent("w", clock.now)
    clock.now += 601
    watch.forget()
    assert watch._seen == {}


def worker(*models: str, told: bool = True, draining: bool = False, pool: str = "p") -> WorkerRow:
    said = tuple(ModelNews(model_id=name) for name in models)
    return WorkerRow("w", pool, models, 1, 0, draining, NOW, said if told else None)


@pytest.mark.parametrize(
    ("workers", "held"),
    [
        ([], set()),  # what waits in the engine starts with the next worker
        ([worker("m")], {"far", "keyless"}),
        ([worker("m"), worker("far", "keyless")], set()),
        ([worker("m"), worker(told=False)], set()),  # it may have any
        ([worker("m"), worker("far", draining=True)], {"far", "keyless"}),
        ([worker("m", "far", "keyless"), worker(pool="q")], {"n"}),
    ],
)
def test_models_that_no_worker_of_their_pool_has(workers: list[WorkerRow], held: set[str]) -> None:
    assert unserved(CATALOGUE, workers) == held


def test_a_breaker_tells_since_when_it_is_not_closed() -> None:
    clock = Clock()
    breaker = Breaker(clock=clock, uniform=lambda low, high: low)
    clock.now += 100
    assert (breaker.state().state, breaker.state().age) == ("closed", 100)
    for _ in range(3):
        breaker.enter().refused()
    clock.now += 20
    assert (breaker.state().state, breaker.state().age) == ("open", 20)
    probe = breaker.enter()
    with pytest.raises(TaskFault):
        breaker.enter()
    assert (breaker.state().state, breaker.state().age) == ("probing", 20)
    probe.refused()
    clock.now += 20
    breaker.enter().answered()
    assert (breaker.state().state, breaker.state().age) == ("recovering", 40)
    clock.now += 7
    assert (breaker.state().state, breaker.state().age) == ("closed", 2)  # it closed after five seconds


async def test_a_worker_tells_what_it_serves_and_what_it_cannot() -> None:
    client: Any = SimpleNamespace(identity="gpu:p@here:1")
    gpu = GpuWorker(client, CATALOGUE, "p", 7, None, 1, {})
    news = gpu.news()
    assert (news.worker, news.pool, news.slots) == ("gpu:p@here:1", "p", 7)
    assert {one.model_id: (one.error_code, one.breaker) for one in news.models} == {
        "m": (None, None),
        "far": (None, "closed"),
        "keyless": ("upstream_auth", None),
    }
    again = gpu.news()
    assert [one.since for one in again.models] == [one.since for one in news.models]
    await gpu.aclose()


class Engine:
    """Takes news, or does not."""

    identity = "w"

    def __init__(self, away: int = 0) -> None:
        self.away, self.taken = away, list[WorkerNews]()
        self.tries = 0

    async def start_workflow(self, name: str, news: WorkerNews, **options: Any) -> None:
        self.tries += 1
        if self.tries <= self.away:
            raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
        assert (name, options["id"], options["task_queue"]) == (
            names.WF_WORKER_NEWS,
            names.worker_news_id("w"),
            names.CONTROL_QUEUE,
        )
        assert options["execution_timeout"] <= timedelta(seconds=30)
        self.taken.append(news)


class Told:
    """A worker's state, as the test sets it."""

    def __init__(self) -> None:
        self.state: Any = "closed"
        self.asked = 0

    def __call__(self) -> WorkerNews:
        self.asked += 1
        model = ModelNews(model_id="m", breaker=self.state, since=NOW, refusals=self.asked)
        return WorkerNews(worker="w", pool="p", slots=1, models=[model], at=NOW)


async def test_news_are_told_at_the_start_and_at_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news_module, "_LOOK", 0.005)
    monkeypatch.setattr(news_module, "_BETWEEN", 0.02)
    engine: Any = Engine(away=2)
    told = Told()
    telling = asyncio.create_task(Teller(engine, told).run())
    await until(lambda: len(engine.taken) == 1)
    asked = told.asked
    await until(lambda: told.asked > asked + 10)
    assert len(engine.taken) == 1, "more refusals in a row are no news"
    told.state = "open"
    await until(lambda: len(engine.taken) == 2)
    assert [news.models[0].breaker for news in engine.taken] == ["closed", "open"]
    monkeypatch.setattr(news_module, "_AGAIN", 0.0)
    await until(lambda: len(engine.taken) >= 4)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
