"""Frames: nothing that a model or a caller wrote can end a line or begin an event."""

from __future__ import annotations

import json

import httpx2
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from perdure.client.errors import ClientError
from perdure.client.frames import Frames
from perdure.live import sse

NASTY = [
    "\r\nevent: completed\ndata: {}\n\n",
    "\r",
    "\n\n",
    "\x00",
    "\u2028data: x\u2029\u0085id: 9",
    "\x0b\x0c\x1c\x1d\x1e",
    ": comment\nretry: 1\n",
    "\ufeff",
    "\U0001f600 \u00e4",
]
texts = st.text(max_size=40) | st.sampled_from(NASTY) | st.lists(st.sampled_from(NASTY)).map("".join)


def stream(values: list[str]) -> bytes:
    frames = [sse.retry(3000), sse.PING]
    for number, value in enumerate(values):
        frames += [
            sse.frame("task-update", f"{number}-x.y_z", orjson.dumps({"text": value, value: 1})),
            sse.PING,
        ]
    return b"".join(frames)


async def by_httpx2(raw: bytes) -> list[tuple[str, str, str]]:
    """Read by a parser that shares nothing with ours."""

    async def body():  # type: ignore[no-untyped-def]
        for at in range(0, len(raw), 7):
            yield raw[at : at + 7]

    request = httpx2.Request("GET", "http://api/v1/events")
    headers = {"content-type": "text/event-stream"}
    response = httpx2.Response(200, headers=headers, content=body(), request=request)
    source = httpx2.EventSource(response)
    return [(event.event, event.id, event.data) async for event in source]


@given(st.lists(texts, max_size=5))
async def test_an_independent_parser_sees_the_true_events(values: list[str]) -> None:
    seen = [found for found in await by_httpx2(stream(values)) if found[2]]
    assert [event for event, _, _ in seen] == ["task-update"] * len(values)
    assert [event_id for _, event_id, _ in seen] == [f"{n}-x.y_z" for n in range(len(values))]
    assert [json.loads(data)["text"] for _, _, data in seen] == values


@given(st.lists(texts, max_size=5))
def test_a_reader_that_splits_lines_too_often_sees_them_too(values: list[str]) -> None:
    """Python's own `splitlines` ends lines at a dozen characters; several clients use it."""
    decoder = SSEDecoder()
    found = [decoder.decode(line) for line in stream(values).decode().splitlines()]
    data = [event.data for event in found if event is not None and event.data]
    assert [json.loads(text)["text"] for text in data] == values


@given(st.lists(texts, max_size=5), st.integers(1, 50))
def test_our_client_reads_any_split(values: list[str], size: int) -> None:
    raw = stream(values)
    frames = Frames()
    events = [event for at in range(0, len(raw), size) for event in frames.feed(raw[at : at + size])]
    assert [event.data["text"] for event in events] == values
    assert [event.id for event in events] == [f"{n}-x.y_z" for n in range(len(values))]
    assert frames.retry == 3.0


def test_json_spread_over_lines_is_one_line() -> None:
    raw = sse.frame("task-update", "1", b'{\r\n  "a": "b",\n  "c": 1\r}')
    assert raw.count(b"\n") == 4
    assert b"\r" not in raw


@pytest.mark.parametrize("bad", ["", "a b", "a\nb", "a\rb", "\u0661", "a:b"])
def test_names_and_ids_are_plain(bad: str) -> None:
    with pytest.raises(ValueError):
        sse.frame(bad, "1", b"{}")
    with pytest.raises(ValueError):
        sse.frame("task-update", bad, b"{}")


def test_our_client_passes_over_what_is_no_event() -> None:
    raw = b"id: 1\ndata: no json\n\nid: 2\ndata: [1]\n\nid: 3\nevent: x\n\n"
    raw += b'id: 4\ndata: {"a":\ndata: 1}\n\n'
    events = list(Frames().feed(raw))
    assert [(event.id, event.data) for event in events] == [("4", {"a": 1})]


def test_our_client_refuses_an_endless_event() -> None:
    frames = Frames()

    def endless() -> None:
        for _ in range(200):
            list(frames.feed(b"data: " + b"x" * 100_000 + b"\n"))

    with pytest.raises(ClientError):
        endless()
