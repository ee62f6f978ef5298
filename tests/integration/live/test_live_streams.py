"""The two streams over real sockets and a real Postgres: what goes out, who may read, what it costs."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from contextlib import AsyncExitStack, ExitStack

import httpx
import psutil
import pytest

import api.event_stream
from perdure.contracts import Projection
from perdure.names import new_task_id
from perdure.settings import ApiSettings
from perdure.store import Store
from perdure.store.base import sql
from perdure.store.rows import WorkerReport
from perdure.task.states import Priority, Status
from tests.integration.live.service import Seen, Service, serving
from tests.support.tasks import submit
from tests.support.waiting import until

FORGERY = (
    'x\r\nevent: completed\ndata: {}\n\n\rid: 9\n\n\u2028data: {}\u0085\ndata: {"status": "COMPLETED"}\n\n'
)

_IDLE_IN_TRANSACTION = sql(
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure-api' "
    "AND state LIKE 'idle in transaction%'"
)


def events_of(task_id: str, query: str = "") -> str:
    return f"/v1/tasks/{task_id}/events{query}"


# What goes out --------------------------------------------------------------------------------------
async def test_a_stream_goes_out_at_once_and_as_it_is(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.event_stream, "PING_SECONDS", 0.2)
    task_id = await service.task()
    headers = {"Accept-Encoding": "gzip, br"}
    async with service.client.stream("GET", events_of(task_id), headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-cache, no-transform"
        assert reply.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in reply.headers
        assert "content-length" not in reply.headers
        raw = b""
        async for chunk in reply.aiter_raw():
            raw += chunk
            if raw.count(b": ping\n\n") >= 2:
                break
    assert raw.startswith(b"retry: 3000\n\nevent: task-update\nid: ")
    assert raw.index(b"task-update") < raw.index(b": ping")


async def test_a_task_is_told_from_its_row_to_its_end(service: Service) -> None:
    task_id = await service.task()
    async with service.stream(events_of(task_id, "?include=partial")) as events:
        first = await anext(events)
        assert first.name == "task-update"
        assert first.data["task_id"] == task_id
        assert first.data["status"] == "PENDING"
        assert first.data["queue"]["reason"] == "not_before"
        assert first.data["queue"]["estimated"] is True
        assert first.data["partial"] is None
        assert {"params", "result", "attempts"}.isdisjoint(first.data)
        await service.queue(task_id)
        second = await anext(events)
        assert (second.data["status"], second.data["version"]) == ("QUEUED", 1)
        await service.finish(task_id, "the text")
        last = await anext(events)
        assert (last.data["status"], last.data["progress"]) == ("COMPLETED", 100)
        assert last.data["partial"] == {"offset": 0, "text": "the text"}
        assert [event async for event in events] == []
    reply = await service.client.get(events_of(task_id), headers={"Last-Event-ID": last.id})
    assert reply.status_code == 204
    assert reply.content == b""


async def test_junk_ids_give_a_snapshot_and_the_final_id_is_one(service: Service) -> None:
    task_id, other = await service.task(), await service.task()
    (snapshot,) = await service.read(events_of(task_id), at_most=1)
    (foreign,) = await service.read(events_of(other), at_most=1)
    stage, rest = snapshot.id.split("-", 1)
    future = f"{int(stage) + 5}-{rest}"
    for junk in (
        "0",
        "5",
        "-1",
        "abc",
        "9" * 30,
        "x" * 4000,
        "\u00e9",
        future,
        foreign.id,
        "",
        "0-0-0-0-0.0",
    ):
        headers = {"Last-Event-ID": junk.encode("utf-8")}
        (event,) = await service.read(events_of(task_id), headers, at_most=1)  # type: ignore[arg-type]
        assert event == snapshot, junk
    await service.finish(task_id)
    reads = [await service.read(events_of(task_id, query)) for query in ("", "?include=partial", "")]
    reads.append(await service.read(events_of(task_id), {"Last-Event-ID": snapshot.id}))
    assert len({events[-1].id for events in reads}) == 1
    assert [len(events) for events in reads] == [1, 1, 1, 1]
    again = await service.read(events_of(other), {"Last-Event-ID": reads[0][-1].id}, at_most=1)
    assert again == [foreign], "another task's final id is nothing here"


async def test_text_forges_no_event(service: Service) -> None:
    task_id = await service.task(metadata={"note": FORGERY, FORGERY[:60]: "1"})
    async with service.stream(events_of(task_id, "?include=partial")) as events:
        first = await anext(events)
        await service.queue(task_id, error_code="internal", error_message=FORGERY)
        second = await anext(events)
        await service.finish(task_id, FORGERY, Status.FAILED, error_code="internal", error_message=FORGERY)
        third = await anext(events)
        assert [event async for event in events] == []
    assert {event.name for event in (first, second, third)} == {"task-update"}
    assert [event.data["status"] for event in (first, second, third)] == ["PENDING", "QUEUED", "FAILED"]
    assert first.data["metadata"] == {"note": FORGERY, FORGERY[:60]: "1"}
    assert second.data["error_message"] == FORGERY
    assert third.data["partial"] == {"offset": 0, "text": FORGERY}
    everything = await service.read("/v1/events", at_most=1) if await service.task() else []
    assert everything[0].name == "task-update"


# Who may read ---------------------------------------------------------------------------------------
async def test_what_one_does_not_own_does_not_exist(service: Service) -> None:
    task_id = await service.task()
    bob = await service.key("bob")
    for path in (new_task_id(), "nonsense", "task_" + "0" * 31, task_id.upper(), "x" * 300):
        reply = await service.client.get(events_of(path))
        assert (reply.status_code, reply.json()["code"]) == (404, "task-not-found"), path
        assert (await service.client.post(f"/v1/tasks/{path}/cancel")).status_code == 404
    foreign = await service.client.get(events_of(task_id), headers=bob)
    assert (foreign.status_code, foreign.json()["code"]) == (404, "task-not-found")
    nobody = await service.client.get(events_of(task_id), headers={"Authorization": ""})
    assert nobody.status_code == 401
    bad = await service.client.get("/v1/events?status=DONE")
    assert (bad.status_code, bad.json()["errors"][0]["parameter"]) == (422, "status")
    bad = await service.client.get(events_of(task_id, "?include=everything"))
    assert bad.status_code == 422


async def test_a_stream_token_reads_streams_and_nothing_else(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    task_id = await service.task()
    reply = await service.client.post("/v1/stream-token")
    assert reply.json()["expires_in"] == 60
    assert reply.headers["cache-control"] == "no-store"
    token = reply.json()["token"]
    nobody = {"Authorization": ""}
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, verify=False) as browser:
        for path in (f"{events_of(task_id)}?token={token}", f"/v1/events?token={token}"):
            async with browser.stream("GET", path) as stream:
                assert stream.status_code == 200
                chunks = stream.aiter_raw()
                assert b"task-update" in await anext(chunks) + await anext(chunks)
        for path in (f"/v1/tasks/{task_id}", "/v1/tasks", "/v1/queues", f"/v1/tasks/{task_id}/callbacks"):
            assert (await browser.get(f"{path}?token={token}")).status_code in (401, 422)
        assert (await browser.post(f"/v1/stream-token?token={token}")).status_code == 401
        for bad in (token[:-3] + "abc", "", "x", "\u00e9"):
            reply = await browser.get(events_of(task_id), params={"token": bad})
            assert (reply.status_code, reply.json()["code"]) == (401, "stream-token-refused")
        bob = await service.key("bob")
        foreign = (await service.client.post("/v1/stream-token", headers=bob)).json()["token"]
        assert (await browser.get(events_of(task_id), params={"token": foreign})).status_code == 404
    assert (await service.client.post("/v1/stream-token", headers=nobody)).status_code == 401
    ours = [
        record.getMessage() + str(record.__dict__)
        for record in caplog.records
        if record.name.startswith("perdure")
    ]
    assert ours
    assert not any(token in line for line in ours)


async def test_a_user_has_so_many_streams(settings: ApiSettings, store: Store) -> None:
    async with serving(settings.model_copy(update={"max_streams_per_user": 3}), store) as service:
        task_id = await service.task()
        async with AsyncExitStack() as stack:
            paths = (events_of(task_id), events_of(task_id), "/v1/events")
            held = [await stack.enter_async_context(service.stream(path)) for path in paths]
            for events in held:
                await anext(events)
            for path in (events_of(task_id), "/v1/events"):
                refused = await service.client.get(path)
                assert (refused.status_code, refused.json()["code"]) == (429, "too-many-streams")
                assert int(refused.headers["retry-after"]) >= 1
            bob = await service.key("bob")
            async with service.client.stream("GET", "/v1/events", headers=bob) as reply:
                assert reply.status_code == 200
        await until(lambda: service.open_streams == 0)
        (event,) = await service.read(events_of(task_id), at_most=1)
        assert event.data["status"] == "PENDING"


# What it costs --------------------------------------------------------------------------------------
async def test_two_hundred_streams_hold_no_database_connection(service: Service, store: Store) -> None:
    task_id = await service.task()
    async with httpx.AsyncClient(
        base_url=service.url,
        headers=service.client.headers,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
        verify=False,
        timeout=60,
    ) as many:

        async def hold(stack: AsyncExitStack, path: str) -> None:
            reply = await stack.enter_async_context(many.stream("GET", path))
            assert reply.status_code == 200

        async with AsyncExitStack() as stack:
            paths = [events_of(task_id) if number % 2 else "/v1/events" for number in range(200)]
            await asyncio.gather(*(hold(stack, path) for path in paths))
            await until(lambda: service.open_streams == 200)
            await until(lambda: service.in_use == 0)
            began = time.monotonic()
            assert (await service.client.get("/v1/tasks")).status_code == 200
            assert time.monotonic() - began < 5
            chance = random.Random(7)

            async def come_and_go() -> None:
                path = chance.choice(paths)
                try:
                    async with asyncio.timeout(chance.uniform(0.001, 0.2)), many.stream("GET", path) as reply:
                        async for _ in reply.aiter_raw():
                            await asyncio.sleep(chance.uniform(0, 0.1))
                except (TimeoutError, httpx.HTTPError):
                    pass

            for _ in range(10):
                await asyncio.gather(*(come_and_go() for _ in range(50)))
            assert (await service.client.get("/v1/tasks")).status_code == 200
            await until(lambda: service.open_streams == 200)
            await until(lambda: service.in_use == 0)
            rows = await store._one(_IDLE_IN_TRANSACTION)
            assert rows[0][0] == 0
    await until(lambda: service.open_streams == 0)


async def test_viewers_that_never_read_are_bounded_and_dropped(
    settings: ApiSettings, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred viewers that read nothing of a 1 MB text: memory stays, and they go."""
    monkeypatch.setattr(api.event_stream, "SEND_SECONDS", 5.0)
    loop = asyncio.get_running_loop()
    async with serving(settings, store, send_buffer=16_384) as service:
        task_id = await service.task()
        await service.finish(task_id, "0123456789abcdef" * 60_000)
        process = psutil.Process()
        before = process.memory_info().rss
        with ExitStack() as viewers:
            for _ in range(100):
                viewer = viewers.enter_context(socket.socket())
                viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                viewer.setblocking(False)
                await loop.sock_connect(viewer, ("127.0.0.1", service.port))
                await loop.sock_sendall(viewer, service.request(events_of(task_id, "?include=partial")))
            await until(lambda: service.open_streams == 100, every=0.005)
            assert (await service.client.get(f"/v1/tasks/{task_id}")).status_code == 200
            grown = process.memory_info().rss - before
            assert grown < 80 * 1024 * 1024, f"{grown / 1e6:.0f} MB for viewers that were to get 96 MB"
            await until(lambda: service.open_streams == 0)


async def test_viewers_that_vanish_are_noticed(service: Service) -> None:
    task_id = await service.task()
    for number in range(50):
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(service.request(events_of(task_id)))
        await writer.drain()
        await until(lambda: service.open_streams == 1)
        if number % 2:
            writer.transport.abort()
        else:
            writer.close()
        await until(lambda: service.open_streams == 0, seconds=10)
    assert (await service.client.get(f"/v1/tasks/{task_id}")).json()["status"] == "PENDING"


# The end --------------------------------------------------------------------------------------------
async def test_a_process_that_stops_ends_streams_and_waits_cleanly(
    settings: ApiSettings, store: Store
) -> None:
    """Twenty idle streams and a wait: the process is gone at once, nobody sees a broken reply."""
    async with serving(settings, store) as service:
        task_id = await service.task()
        bodies: list[bytes] = []

        async def watch(path: str) -> None:
            async with service.client.stream("GET", path) as reply:
                bodies.append(await reply.aread())

        paths = [events_of(task_id), "/v1/events"] * 10
        watching = [asyncio.create_task(watch(path)) for path in paths]
        waiting = asyncio.create_task(
            service.client.get(f"/v1/tasks/{task_id}", headers={"Prefer": "wait=60"})
        )
        await until(lambda: service.open_streams == 20)
        await asyncio.sleep(0.3)
        began = time.monotonic()
        service.server.should_exit = True
        await asyncio.gather(*watching)
        assert (await waiting).status_code == 200
        await service.serving
        assert time.monotonic() - began < settings.grace_seconds
    assert len(bodies) == 20
    assert all(body.endswith(b"retry: 1000\n\n") for body in bodies)
    assert all(b"task-update" in body for body in bodies)


async def test_a_stream_ends_after_its_time_and_is_resumed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.event_stream, "MAX_AGE", 0.5)
    task_id = await service.task()
    raw = (await service.client.get(events_of(task_id))).content
    assert raw.endswith(b"\n\nretry: 1000\n\n")
    (event,) = await service.read(events_of(task_id), at_most=1)
    assert await service.read(events_of(task_id), {"Last-Event-ID": event.id}) == []


# Waiting --------------------------------------------------------------------------------------------
async def test_waiting_for_the_end_and_for_any_change(service: Service) -> None:
    task_id = await service.task()
    path = f"/v1/tasks/{task_id}"
    began = time.monotonic()
    reply = await service.client.get(path, headers={"Prefer": "wait=1"})
    assert (reply.status_code, reply.json()["status"]) == (200, "PENDING")
    assert reply.headers["preference-applied"] == "wait=1"
    assert time.monotonic() - began >= 0.9
    known = {"If-None-Match": reply.headers["etag"]}
    assert (await service.client.get(path, headers=known)).status_code == 304
    change = asyncio.create_task(service.client.get(path, headers={**known, "Prefer": "wait=30"}))
    end = asyncio.create_task(service.client.get(path, headers={"Prefer": "wait=30"}))
    await asyncio.sleep(0.3)
    await service.queue(task_id)
    assert (await change).json()["status"] == "QUEUED"
    assert not end.done()
    await service.finish(task_id)
    assert (await end).json()["status"] == "COMPLETED"
    assert time.monotonic() - began < 20
    await until(lambda: service.in_use == 0)


# All tasks ------------------------------------------------------------------------------------------
async def test_all_of_a_users_tasks_and_nobody_elses(service: Service) -> None:
    mine, done = await service.task(), await service.task()
    await service.finish(done)
    await service.task(user_id="bob")
    async with service.stream("/v1/events") as events:
        first = await anext(events)
        assert first.data["task_id"] == mine
        await service.queue(mine)
        second = await anext(events)
        assert (second.data["task_id"], second.data["status"]) == (mine, "QUEUED")
        await service.task(user_id="bob")
        fresh = await service.task(model_id="other")
        assert (await anext(events)).data["task_id"] == fresh
        await service.finish(mine, status=Status.FAILED)
        assert (await anext(events)).data["status"] == "FAILED"
    (only,) = await service.read("/v1/events?model_id=other", at_most=1)
    assert only.data["task_id"] == fresh
    resumed = await service.read("/v1/events?status=FAILED,COMPLETED", {"Last-Event-ID": first.id}, at_most=1)
    assert [event.data["task_id"] for event in resumed] == [mine]


async def test_every_change_once_while_writers_race(settings: ApiSettings, store: Store) -> None:
    """Real transactions that overlap, two API processes' worth of hubs, a reader that comes and goes."""
    async with serving(settings, store) as one, serving(settings, store) as two:
        two.client.headers = one.client.headers
        first = await one.task()
        seen: list[Seen] = await one.read("/v1/events", at_most=1)
        tasks: list[str] = []

        async def life(number: int) -> None:
            chance = random.Random(number)
            task_id = await one.task()
            tasks.append(task_id)
            for version in range(1, 4):
                await asyncio.sleep(chance.uniform(0, 0.2))
                at = Projection(task_id=task_id, version=version, status=Status.QUEUED, progress=version)
                await store.tasks.project(at)
            await one.finish(task_id)

        async def lives() -> None:
            for start in range(0, 60, 12):
                await asyncio.gather(*(life(start + number) for number in range(12)))

        living = asyncio.create_task(lives())
        chance = random.Random(1)
        ended: set[str] = set()
        while not living.done() or ended != set(tasks):
            service = chance.choice([one, two])
            more: list[Seen] = []
            try:
                async with (
                    asyncio.timeout(5),
                    service.stream("/v1/events", {"Last-Event-ID": seen[-1].id}) as events,
                ):
                    async for event in events:
                        more.append(event)
                        if len(more) >= chance.randint(1, 6):
                            break
            except TimeoutError:
                assert more or not living.done(), "an end was never told"
            seen += more
            ended |= {event.data["task_id"] for event in more if event.data["status"] == "COMPLETED"}
        told = [(event.data["task_id"], event.data["version"]) for event in seen]
        assert len(set(told)) == len(told), "told twice"
        assert {task_id for task_id, _ in told} == {first, *tasks}
        assert len({event.id for event in seen}) == len(seen)


# Why it waits ---------------------------------------------------------------------------------------
async def test_a_waiting_task_says_why_and_behind_how_many(service: Service, store: Store) -> None:
    """Users take turns: the first task of one who comes late is not behind all of another's."""
    for _ in range(6):
        await submit(store, user_id="bob")
    await submit(store, user_id="bob", priority=Priority.HIGH)
    mine = [await submit(store), await submit(store)]
    await submit(store, priority=Priority.LOW)
    places = [(await service.client.get(f"/v1/tasks/{task_id}")).json()["queue"] for task_id in mine]
    assert [place["reason"] for place in places] == ["no_worker"] * 2
    assert [place["ahead"] for place in places] == [1, 3]
    assert [place["position"] for place in places] == [2, 4]
    assert places[0]["estimated_start_at"] is None
    report = WorkerReport(worker="w", pool="p", models=("m",), slots=2, in_use=2)
    await store.workers.report([report])
    service.resources.queues._last = None
    (event,) = await service.read(events_of(mine[0]), at_most=1)
    assert event.data["queue"]["reason"] == "behind_higher_priority"
    assert await store.lines.before(new_task_id()) is None
    assert await store.lines.before(mine[1]) == 1
