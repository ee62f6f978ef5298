"""The reader of server-sent events: every legal form, every split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.llm.sse import Event, EventTooLargeError, SseReader


def read(*pieces: bytes, limit: int = 1000) -> list[Event]:
    reader = SseReader(limit)
    found = [event for piece in pieces for event in reader.feed(piece)]
    return found + list(reader.end())


def data_of(*pieces: bytes) -> list[bytes]:
    return [event.data for event in read(*pieces)]


@pytest.mark.parametrize(
    "raw",
    [
        b"data: one\n\ndata: two\n\n",
        b"data:one\n\ndata:two\n\n",
        b"data: one\r\n\r\ndata: two\r\n\r\n",
        b"data: one\r\rdata: two\r\r",
        b"data: one\r\n\ndata: two\n\r",
        b"\xef\xbb\xbfdata: one\n\ndata: two\n\n",
        b": hello\ndata: one\n\n:\n\ndata: two\n: bye\n\n",
        b"id: 7\nretry: 10\nevent: message\nwhatever: x\nnocolon\ndata: one\n\ndata: two\n\n",
        b"\n\n\ndata: one\n\n\n\ndata: two\n\n",
    ],
)
def test_legal_forms_read_alike(raw: bytes) -> None:
    assert data_of(raw) == [b"one", b"two"]


def test_several_data_lines_are_one_event() -> None:
    assert data_of(b'data: {"a":\ndata: 1}\n\n') == [b'{"a":\n1}']


def test_empty_data_is_an_event_without_content() -> None:
    assert data_of(b"data\n\ndata:\n\n") == [b"", b""]


def test_only_one_space_is_dropped() -> None:
    assert data_of(b"data:  two spaces\n\n") == [b" two spaces"]


def test_unicode_line_separators_end_no_line() -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg".encode()
    assert data_of(b"data: " + text + b"\n\n") == [text]


def test_a_bom_counts_only_at_the_start() -> None:
    assert data_of(b"data: one\n\n\xef\xbb\xbfdata: two\n\n") == [b"one"]


def test_an_unterminated_event_is_kept_and_marked() -> None:
    assert read(b"data: one\n\ndata: two") == [Event(b"one"), Event(b"two", cut=True)]
    assert read(b"data: one\n\ndata: two\n") == [Event(b"one"), Event(b"two", cut=True)]


def test_error_events_are_named() -> None:
    assert read(b"event: error\ndata: broken\n\n") == [Event(b"broken", name="error")]
    assert read(b"event: error\n\n") == [Event(b"", name="error")]
    assert read(b'error: {"code": 500}\n\n') == [Event(b'{"code": 500}', name="error")]


def test_a_document_in_place_of_events_is_bare() -> None:
    assert read(b'{"error": "x"}') == [Event(b'{"error": "x"}', bare=True, cut=True)]
    assert read(b'{\n  "error": "x"\n}\n\n') == [Event(b'{\n  "error": "x"\n}', bare=True)]
    assert read(b"<html>\n<body>\n\n")[0] == Event(b"<html>\n<body>", bare=True)


def test_a_document_between_events_does_not_swallow_them() -> None:
    assert read(b'{"error": "x"}\ndata: one\n\n') == [Event(b'{"error": "x"}', bare=True), Event(b"one")]


def until_refused(raw: bytes, size: int) -> list[Event]:
    reader, found = SseReader(1000), []
    try:
        for at in range(0, len(raw), size):
            found.extend(reader.feed(raw[at : at + size]))
    except EventTooLargeError:
        return found
    raise AssertionError("it was taken")


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_line_above_the_limit_is_refused_after_the_good_events(size: int) -> None:
    assert until_refused(b"data: good\n\ndata: " + b"x" * 2000, size) == [Event(b"good")]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_an_event_of_many_lines_has_the_same_limit(size: int) -> None:
    assert until_refused(b"data: good\n\n" + (b"data: " + b"x" * 300 + b"\n") * 4, size) == [Event(b"good")]


def test_endless_comments_cost_nothing() -> None:
    assert data_of(*[b": keep-alive\n"] * 1000, b"data: one\n\n") == [b"one"]


LINES = st.sampled_from(
    [
        "data: {}", "data:é 好 🙂", "data", "data: ", ": comment 🙂", "event: error", "event: x", "id: 1",
        "retry: 5", "unknown: é", "nocolon", '{"error": 1}', "<p>", "", "", "", "data: a\u2028b", "error: x",
        "\ufeffdata: y",
    ]
)  # fmt: skip
ENDS = st.sampled_from(["\n", "\r", "\r\n"])


@settings(max_examples=200, deadline=None)
@given(
    lines=st.lists(st.tuples(LINES, ENDS), max_size=25),
    tail=st.sampled_from(["", "data: cut", "data: x\n", "\r"]),
    bom=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=20),
)
def test_any_split_gives_the_same_events(
    lines: list[tuple[str, str]], tail: str, bom: bool, cuts: list[int]
) -> None:
    raw = (b"\xef\xbb\xbf" if bom else b"") + "".join(a + b for a, b in lines).encode() + tail.encode()
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    whole = read(raw)
    assert read(*pieces) == whole
    assert read(*[raw[at : at + 1] for at in range(len(raw))]) == whole
