"""The python executor: any async generator, its progress and its checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from perdure.contracts import Beat
from perdure.llm.base import Delta
from perdure.llm.python import BadFunctionError, PythonExecutor, load_function
from perdure.task.errors import ErrorCode, TaskFault
from tests.support.generation import Told, attempt

closed: list[str] = []


async def pages(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    done = checkpoint.state["page"] if checkpoint else 0
    for page in range(done, params["pages"]):
        yield f"p{page} "
        await asyncio.sleep(0.005)
        report(100 * (page + 1) // params["pages"], f"page {page + 1}", state={"page": page + 1})


async def every_form(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    yield "text "
    yield 40
    yield {"text": "more ", "tokens": 3, "state": {"at": 1}}
    yield Delta(reasoning="why", message="busy")
    await asyncio.to_thread(report, 60, "from a thread")
    yield {"result": {"score": 7, "finish_reason": "done"}}


async def raises(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    yield "a"
    raise ValueError(f"canary {params['secret']}")


async def faults(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    yield "a"
    raise TaskFault(ErrorCode.RATE_LIMITED, "slow down", retry_after=5)


async def yields_junk(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    yield params["junk"]


async def reports_junk(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    report(state=params["junk"])
    yield "never"


async def waits(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    try:
        yield "a"
        await asyncio.sleep(3600)
    finally:
        closed.append("waits")


async def stateless(params: Any, checkpoint: Any, report: Any) -> AsyncGenerator[Any, None]:
    assert checkpoint is None
    for word in ("a", "b", "c"):
        yield word
        await asyncio.sleep(0.005)


def no_generator() -> None: ...


async def run(function: Any, params: dict[str, Any] | None = None, **more: Any) -> Told:
    return await attempt(PythonExecutor("scorer", function, f"m:{function.__name__}"), params or {}, **more)


async def test_every_form_has_its_place() -> None:
    told = await run(every_form)
    beat = told.beat
    assert (beat.text, beat.reasoning, beat.output_tokens) == ("text more ", "why", 5)
    assert (beat.progress, beat.message) == (60, "from a thread")
    assert told.done.model_dump(exclude_none=True) == {
        "text": "text more ",
        "finish_reason": "done",
        "model": "scorer",
        "resumed": False,
        "score": 7,
    }


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 8])
async def test_it_goes_on_from_its_state_with_the_text_of_that_moment(stop: int) -> None:
    checkpoint: Beat | None = None
    for number in range(1, 60):
        told = await run(pages, {"pages": 6}, number=number, checkpoint=checkpoint, stop_after=stop)
        if told.result:
            break
        checkpoint = Beat.model_validate_json(told.beat.model_dump_json())
        if stop == 1:  # nothing is ever reported: no attempt can get further
            assert told.beat.text == "p0 "
            return
    assert told.done.text == "p0 p1 p2 p3 p4 p5 "
    assert told.done.resumed


async def test_text_after_the_last_state_is_made_again_and_counted() -> None:
    first = await run(pages, {"pages": 3}, stop_after=3)  # p0, its state, p1
    assert first.beat.text == "p0 p1 "
    second = await run(pages, {"pages": 3}, number=2, checkpoint=first.beat)
    assert second.done.text == "p0 p1 p2 "
    assert (second.track.discarded, second.track.restarted) == (1, False)


async def test_a_function_without_states_starts_over() -> None:
    first = await run(stateless, stop_after=2)
    second = await run(stateless, number=2, checkpoint=first.beat)
    assert second.done.text == "abc"
    assert (second.track.discarded, second.track.restarted) == (2, True)


async def test_its_exceptions_are_internal_and_tell_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        told = await run(raises, {"secret": "tell-nobody"})
    assert (told.failed.code, told.failed.retryable) == (ErrorCode.INTERNAL, True)
    assert told.beat.text == "a"
    logged = "".join(str(vars(record)) for record in caplog.records)
    assert "ValueError" in logged
    assert "raises" in logged
    assert "tell-nobody" not in logged
    assert "tell-nobody" not in told.failed.message


async def test_its_own_faults_pass() -> None:
    fault = (await run(faults)).failed
    assert (fault.code, fault.retry_after) == (ErrorCode.RATE_LIMITED, 5)


@pytest.mark.parametrize(
    "junk",
    [
        object(),
        b"bytes",
        ["list"],
        {"unknown": object(), "text": 3},
        {"state": object()},
        {"state": 10**30},
        {"state": "x" * 200_000},
        {"result": {"text": "a", "more": {1, 2}}},
    ],
)
async def test_junk_is_refused_once(junk: Any) -> None:
    fault = (await run(yields_junk, {"junk": junk})).failed
    assert (fault.code, fault.retryable) == (ErrorCode.INTERNAL, False)


async def test_a_state_that_is_no_json_is_refused() -> None:
    assert not (await run(reports_junk, {"junk": object()})).failed.retryable


async def test_text_is_cleaned() -> None:
    assert (await run(yields_junk, {"junk": "a\x00\ud800b"})).done.text == "a\ufffd\ufffdb"


async def test_messages_are_cleaned() -> None:
    told = await run(yields_junk, {"junk": {"message": "a\ud800\nb" + "x" * 900}})
    message = told.beat.message or ""
    assert message.startswith("a\ufffd b")
    assert len(message) == 500


async def test_closing_closes_the_function() -> None:
    closed.clear()
    await asyncio.wait_for(run(waits, stop_after=1), 5)
    assert closed == ["waits"]


async def test_cancelling_closes_the_function() -> None:
    closed.clear()
    work = asyncio.create_task(run(waits))
    await asyncio.sleep(0.05)
    work.cancel()
    await asyncio.wait([work], timeout=5)
    assert work.cancelled()
    assert closed == ["waits"]


def test_import_paths() -> None:
    assert load_function(f"{__name__}:pages") is pages
    for path, words in [
        ("no.such.module:f", "ModuleNotFoundError"),
        (f"{__name__}:nothing", "AttributeError"),
        (f"{__name__}:no_generator", "async generator"),
        ("nocolon", "cannot be imported"),
    ]:
        with pytest.raises(BadFunctionError, match=words):
            load_function(path)
