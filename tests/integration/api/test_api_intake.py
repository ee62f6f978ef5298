"""Submits that come together: shared transactions, faults that stay with whom they belong to, true times."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from api.intake import Intake
from perdure import names
from perdure.embedded.postgres import EmbeddedPostgres
from perdure.settings import ApiSettings
from perdure.store import Store
from perdure.store.errors import StoreRefused, StoreUnavailable
from perdure.store.rows import Idempotency, NewTask
from tests.integration.api.harness import SIMULATED, Api, running_app


def new_task(**more: object) -> NewTask:
    task = NewTask(
        task_id=names.new_task_id(), user_id="u", model_id="simulated", pool="local", params_json="{}"
    )
    return dataclasses.replace(task, **more)  # type: ignore[arg-type]


async def test_submits_that_come_together_share_transactions(api: Api) -> None:
    await api.client.post("/v1/queues/local/pause")  # nobody else writes these rows
    tasks = [new_task() for _ in range(300)]
    results = await asyncio.gather(*(api.resources.intake.add(task) for task in tasks))
    assert [result.task.task_id for result in results if result.task] == [task.task_id for task in tasks]
    assert {result.kind for result in results} == {"created"}
    connection = await asyncpg.connect(api.settings.database_url.get_secret_value())
    try:
        transactions = await connection.fetchval("SELECT count(DISTINCT xmin::text) FROM tasks")
    finally:
        await connection.close()
    assert transactions < 30


async def test_a_refused_row_fails_alone(api: Api) -> None:
    intake = api.resources.intake
    first = new_task()
    await intake.add(first)
    tasks = [new_task() for _ in range(40)]
    tasks[20] = new_task(task_id=first.task_id)  # taken
    results = await asyncio.gather(*(intake.add(task) for task in tasks), return_exceptions=True)
    assert [index for index, result in enumerate(results) if isinstance(result, BaseException)] == [20]
    assert isinstance(results[20], StoreRefused)
    counts = await api.store.tasks.count_by_state()
    assert sum(counts.values()) == 40


async def test_a_lost_database_fails_all_who_wait_and_no_one_later(
    settings: ApiSettings, own_postgres: EmbeddedPostgres, store: Store
) -> None:
    dsn = type(settings.database_url)(own_postgres.dsn)
    async with running_app(settings.model_copy(update={"database_url": dsn}), store) as one:
        intake = one.resources.intake
        await intake.add(new_task())
        await asyncio.to_thread(own_postgres.stop)
        results = await asyncio.gather(*(intake.add(new_task()) for _ in range(50)), return_exceptions=True)
        assert {type(result) for result in results} == {StoreUnavailable}
        await asyncio.to_thread(own_postgres.start)
        async with asyncio.timeout(30):
            await _kept(intake)


async def test_a_stampede_of_repeats_holds_one_connection(api: Api) -> None:
    intake = api.resources.intake
    mine, other = Idempotency("u", "submit", "k", b"1" * 32), Idempotency("u", "submit", "k", b"2" * 32)
    adds = [intake.add(new_task(params_json='{"n":1}'), mine) for _ in range(100)]
    results = await asyncio.gather(*adds)
    assert [result.kind for result in results] == ["created", *["replayed"] * 99]
    assert len({result.task.task_id for result in results if result.task}) == 1
    assert {result.task.params_json for result in results[1:] if result.task} == {'{"n":1}'}
    assert (await intake.add(new_task(), mine)).kind == "replayed"
    assert (await intake.add(new_task(), other)).kind == "conflict"


async def _kept(intake: Intake) -> None:
    """Submits until one is kept."""
    while True:
        try:
            await intake.add(new_task())
        except StoreUnavailable:
            await asyncio.sleep(0.1)
        else:
            return


async def test_large_inputs_do_not_pile_up_in_one_transaction(api: Api) -> None:
    big = '{"x":"' + "y" * 600_000 + '"}'
    tasks = [new_task(params_json=big) for _ in range(8)]
    results = await asyncio.gather(*(api.resources.intake.add(task) for task in tasks))
    assert all(result.kind == "created" for result in results)


async def test_times_are_utc_wherever_the_processes_are(
    settings: ApiSettings, store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute("ALTER ROLE CURRENT_USER SET timezone = 'Asia/Kolkata'")
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        async with running_app(settings, store) as one:
            before = datetime.now(UTC)
            later = (before + timedelta(hours=2)).astimezone()  # an offset of New York's
            task = await one.submit(not_before=later.isoformat())
            created = datetime.fromisoformat(task["created_at"])
            assert abs(created - before) < timedelta(seconds=30)
            assert task["created_at"].endswith("Z")
            assert datetime.fromisoformat(task["not_before"]) == later
            query = {"created_after": (before - timedelta(minutes=1)).isoformat()}
            assert len((await one.client.get("/v1/tasks", params=query)).json()["data"]) == 1
            query = {"created_after": (before + timedelta(minutes=1)).isoformat()}
            assert (await one.client.get("/v1/tasks", params=query)).json()["data"] == []
    finally:
        monkeypatch.undo()
        time.tzset()
        await connection.execute("ALTER ROLE CURRENT_USER RESET timezone")
        await connection.close()


async def test_a_burst_over_http_is_kept_whole(api: Api) -> None:
    replies = await asyncio.gather(*(api.client.post("/v1/tasks", json=SIMULATED) for _ in range(300)))
    assert {reply.status_code for reply in replies} == {202}
    assert len({reply.json()["task_id"] for reply in replies}) == 300
    assert sum((await api.store.tasks.count_by_state()).values()) == 300
