"""Watchers of real tasks, through a proxy, on three API processes at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.client import Client, Event
from tests.integration.live.stack import Proxy, Stack
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("live_stack")


def simulated(tokens: int, rate: float, *, wait: float = 0, **params: Any) -> dict[str, Any]:
    """A task that starts in `wait` seconds."""
    body = {"model_id": "simulated", "params": {"tokens": tokens, "tokens_per_second": rate, **params}}
    start = datetime.now(UTC) + timedelta(seconds=wait)
    return {**body, "not_before": start.isoformat()} if wait else body


async def watch(
    url: str, task_id: str, *, last: str | None = None, at_most: int = 10**6, partial: bool = True
) -> list[Event]:
    found: list[Event] = []
    async with (
        Client(url) as client,
        aclosing(client.watch(task_id, partial=partial, last_event_id=last)) as events,
    ):
        async for event in events:
            found.append(event)
            if len(found) >= at_most:
                break
    return found


def moves(events: list[Event]) -> list[tuple[str, int]]:
    """(status, attempt) of each move."""
    found: list[tuple[str, int]] = []
    for event in events:
        here = (event.data["status"], event.data["attempt"])
        if not found or found[-1] != here:
            found.append(here)
    return found


def text_of(events: list[Event], text: str = "") -> str:
    for event in events:
        if event.data["restarted"]:
            text = ""
        if part := event.data["partial"]:
            assert part["offset"] == len(text), "a gap, or a repeat"
            text += part["text"]
    return text


async def test_all_watchers_see_the_same_whichever_process_serves_them(stack: Stack, proxy: Proxy) -> None:
    """Thirty viewers, three processes, a task that fails once and goes on."""
    async with Client(proxy.url) as client:
        fault = {"code": "token_timeout", "after_tokens": 40, "times": 1}
        task = await client.submit(simulated(150, 40, wait=4, fault=fault))
        viewers = await asyncio.gather(*(watch(proxy.url, task["task_id"]) for _ in range(30)))
        done = await client.get(task["task_id"])
    assert {*proxy.served} == {*stack.ports}
    states = ["PENDING", "QUEUED", "PROCESSING", "QUEUED", "PROCESSING", "COMPLETED"]
    for events in viewers:
        assert moves(events) == list(zip(states, [0, 0, 1, 1, 2, 2], strict=True))
        assert text_of(events) == done["result"]["text"]
        progress = [event.data["progress"] for event in events if event.data["status"] == "PROCESSING"]
        assert progress == sorted(progress)
        assert all(event.data["queue"] for event in events if event.data["status"] == "PENDING")
    assert len({events[-1].id for events in viewers}) == 1
    order: dict[str, int] = {}
    by_id: dict[str, dict[str, Any]] = {}
    for events in viewers:
        for event in events:
            order.setdefault(event.id, len(order))
            mine = {name: event.data[name] for name in ("status", "attempt", "progress", "output_tokens")}
            assert by_id.setdefault(event.id, mine) == mine, "one id, one truth"
    keys = [[tuple(map(int, event.id.split("-")[:3])) for event in events] for events in viewers]
    assert all(mine == sorted(mine) for mine in keys)


async def test_a_reader_that_drops_misses_nothing_and_sees_nothing_twice(stack: Stack, proxy: Proxy) -> None:
    async with Client(proxy.url) as client:
        fault = {"code": "token_timeout", "after_tokens": 60, "times": 1}
        task = await client.submit(simulated(200, 40, wait=2, fault=fault))
        whole = asyncio.create_task(watch(proxy.url, task["task_id"]))
        events: list[Event] = []
        text = ""
        while not events or not events[-1].final:
            last = events[-1].id if events else None
            more = await watch(proxy.url, task["task_id"], last=last, at_most=2)
            text = text_of(more, text)
            events += more
        done = await client.get(task["task_id"])
        assert text == done["result"]["text"] == text_of(await whole)
        assert moves(events) == moves(await whole)
        assert len({event.id for event in events}) == len(events)
        assert await watch(proxy.url, task["task_id"], last=events[-1].id) == []
        again = await watch(proxy.url, task["task_id"])
        assert [event.id for event in again] == [events[-1].id], "after the end: the final event alone"
        assert text_of(again) == text


async def test_a_client_goes_on_over_broken_connections(stack: Stack, proxy: Proxy) -> None:
    async with Client(proxy.url) as client:
        task = await client.submit(simulated(160, 40))
        watching = asyncio.create_task(watch(proxy.url, task["task_id"]))
        for _ in range(3):
            await asyncio.sleep(0.9)
            proxy.cut()
        events = await watching
        done = await client.get(task["task_id"])
    assert text_of(events) == done["result"]["text"]
    assert len({event.id for event in events}) == len(events)


async def test_progress_is_fresh(stack: Stack) -> None:
    """What a watcher sees is at most 1.5 s behind the model: made at a known rate, seen at a known time."""
    rate = 50.0
    url = f"http://127.0.0.1:{stack.ports[0]}"
    lags: list[float] = []
    async with Client(url) as client:
        task = await client.submit(simulated(300, rate))
        shown, started = 0, 0.0
        async with aclosing(client.watch(task["task_id"])) as events:
            async for event in events:
                now = time.time()
                data = event.data
                if data["status"] == "PROCESSING":
                    started = datetime.fromisoformat(data["started_at"]).timestamp()
                if started and shown:
                    lags.append(now - (started + shown / rate))  # as old as what was shown got
                shown = data["output_tokens"] or shown
    lags.sort()
    print(f"behind the model: p50 {lags[len(lags) // 2]:.2f} s, max {lags[-1]:.2f} s of {len(lags)}")
    assert len(lags) >= 4
    assert lags[int(0.8 * len(lags))] <= 1.5


async def test_a_submit_that_waits_has_its_result(stack: Stack, proxy: Proxy) -> None:
    async with Client(proxy.url) as client:
        began = time.monotonic()
        task = await client.submit(simulated(5, 1000), wait=30)
        assert (task["status"], len(task["result"]["text"].split())) == ("COMPLETED", 5)
        assert time.monotonic() - began < 20
        slow = await client.submit(simulated(100, 20), wait=1)
        assert slow["status"] in ("PENDING", "QUEUED", "PROCESSING")
        await client.cancel(slow["task_id"])
        assert (await client.finished(slow["task_id"]))["status"] == "CANCELLED"


async def test_lists_and_reads_show_live_progress(stack: Stack, proxy: Proxy) -> None:
    async with Client(proxy.url) as client:
        task = await client.submit(simulated(400, 100))
        seen = []
        while (now := await client.get(task["task_id"], include=["partial"]))["status"] != "COMPLETED":
            seen.append((now["progress"], len(now["partial_text"] or "")))
            await asyncio.sleep(0.4)
        assert max(progress for progress, _ in seen) > 10
        assert max(length for _, length in seen) > 100
        task = await client.submit(simulated(400, 100))

        async def listed() -> bool:
            mine = [one for one in (await client.list(limit=20))["data"] if one["task_id"] == task["task_id"]]
            return bool(mine[0]["progress"] > 10)

        await until(listed, every=0.2)
        await client.finished(task["task_id"])


async def test_all_tasks_on_one_stream(stack: Stack, proxy: Proxy) -> None:
    """Every task's end is told once, over drops and processes."""
    async with Client(proxy.url) as client:
        told: list[Event] = []
        last: str | None = None
        ids: set[str] = set()

        async def follow(count: int) -> None:
            nonlocal last
            async with aclosing(client.watch_all(last_event_id=last, model_id="simulated")) as events:
                async for event in events:
                    told.append(event)
                    last = event.id
                    count -= 1
                    if count <= 0:
                        return

        first = await client.submit(simulated(40, 40))
        ids.add(first["task_id"])
        await follow(1)
        for _ in range(8):
            made = await asyncio.gather(*(client.submit(simulated(5, 100)) for _ in range(5)))
            ids |= {task["task_id"] for task in made}
            await asyncio.wait_for(follow(4), 30)
        while ids - {event.data["task_id"] for event in told if event.final}:
            await asyncio.wait_for(follow(1), 30)
        states = [(event.data["task_id"], event.data["version"], event.data["progress"]) for event in told]
        assert len(set(states)) == len(states), "told twice"
        assert {event.data["task_id"] for event in told} == ids
        assert len({event.id for event in told}) == len(told)
