"""The activity `generate`, in the SDK's own environment, against a scripted model server."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.client import Client
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.testing import ActivityEnvironment

from activities.generate import GenerateActivities
from perdure.contracts import Beat, FaultDetails, GenerateInput, GenerateResult, Limits
from perdure.llm.drain import DrainState
from perdure.llm.executors import build_executors
from perdure.llm.simulated import words as simulated_words
from perdure.models import Catalogue, parse_catalogue
from perdure.observability.metrics import Metrics
from tests.support.model_server import DONE, ModelServer, chunk, finish, reply, stream, usage, words
from tests.support.waiting import until

FOREVER = 3600
TASK = "task_" + "1" * 32
SECRET = "CANARY-PROMPT that nobody may read in a log"
PARAMS: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 10}


class Stage:
    """An activity on a stage: a model server, a worker's parts, and what was heard."""

    def __init__(self, server: ModelServer, catalogue: Catalogue, client: Client) -> None:
        self.server = server
        self.drain = DrainState()
        self.metrics = Metrics(catalogue)
        self.executors = build_executors(catalogue, "local", {})
        self.activities = GenerateActivities(self.executors, catalogue, client, self.metrics, self.drain)
        self.environment = ActivityEnvironment(client)
        self.beats: list[Beat] = []
        self.times: list[float] = []
        self.environment.on_heartbeat = self._heard
        self.limit_by_temporal(3600)

    def _heard(self, beat: Beat) -> None:
        self.beats.append(beat)
        self.times.append(time.monotonic())

    def limit_by_temporal(self, seconds: float) -> None:
        """Sets start-to-close."""
        self.environment.info = dataclasses.replace(
            self.environment.info,
            workflow_id=TASK,
            workflow_run_id="run",
            start_to_close_timeout=timedelta(seconds=seconds),
        )

    async def run(self, model: str = "chat", params: Any = None, **more: Any) -> GenerateResult:
        given = GenerateInput(
            task_id=TASK,
            attempt=more.pop("attempt", 1),
            model_id=model,
            params=PARAMS if params is None else params,
            announce=False,
            **more,
        )
        return await self.environment.run(self.activities.generate, given)

    async def fault(self, model: str = "chat", params: Any = None, **more: Any) -> tuple[Any, FaultDetails]:
        with pytest.raises(ApplicationError) as caught:
            await self.run(model, params, **more)
        error = caught.value
        assert error.non_retryable
        assert error.category is ApplicationErrorCategory.BENIGN
        details = error.details[0]
        assert isinstance(details, FaultDetails)
        assert error.type == details.code
        assert str(error.message) == details.message
        return error, details

    def counted(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value("perdure_attempts_total", {"outcome": outcome})
        assert value is not None
        return value


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with ModelServer() as server:
        catalogue = parse_catalogue(
            f"""
            [pools.local]
            [models.chat]
            pool = "local"
            base_url = "{server.base_url}"
            resume = "trailing"
            first_token_timeout = 30
            [models.keyless]
            pool = "local"
            base_url = "{server.base_url}"
            api_key_env = "NO_SUCH_KEY"
            [models.missing]
            pool = "local"
            executor = "python"
            import_path = "no_such_module:function"
            [models.broken]
            pool = "local"
            executor = "python"
            import_path = "tests.activity.functions:breaks"
            [models.deaf]
            pool = "local"
            executor = "python"
            import_path = "tests.activity.functions:ignores_cancel"
            [models.sim]
            pool = "local"
            executor = "simulated"
            """
        )
        client = await Client.connect("127.0.0.1:1", lazy=True, identity="gpu:local@test")
        made = Stage(server, catalogue, client)
        yield made
        for executor in made.executors.values():
            await executor.aclose()


# The ordinary way ------------------------------------------------------------------------------------


async def test_a_generation_from_first_beat_to_result(stage: Stage) -> None:
    stage.server.script(stream(*words("one two three"), finish(), usage(7, 3), DONE))
    ended = await stage.run()
    assert ended.kind == "generated"
    assert ended.result is not None
    assert (ended.result.text, ended.result.finish_reason) == ("one two three", "stop")
    assert (ended.usage.prompt_tokens, ended.usage.completion_tokens) == (7, 3)
    assert (ended.worker, ended.beat.output_tokens, ended.beat.progress) == ("gpu:local@test", 3, 30)
    assert ended.beat.text == ""  # the result has it
    assert ended.started_at is not None
    assert (stage.beats[0].attempt, stage.beats[0].output_tokens) == (1, 0)
    assert stage.counted("completed") == 1


async def test_the_checkpoint_of_the_attempt_before_is_in_the_first_beat(stage: Stage) -> None:
    stage.server.script(stream(FOREVER))
    checkpoint = Beat(attempt=1, text="one two", output_tokens=2, progress=20)
    work = asyncio.create_task(stage.run(attempt=2, checkpoint=checkpoint))
    await until(lambda: bool(stage.beats))
    beat = stage.beats[0]
    assert (beat.attempt, beat.text, beat.output_tokens, beat.resumed_from_tokens) == (2, "one two", 2, 2)
    assert beat.progress == 20
    stage.environment.cancel()
    ended = await work
    assert (ended.kind, ended.beat.text, ended.beat.resumed_from_tokens) == ("cancelled", "one two", 2)


async def test_beats_carry_the_text_and_progress_never_falls(stage: Stage) -> None:
    stage.server.script(stream(*[step for n in range(8) for step in (chunk(f"{n} "), 0.35)], finish(), DONE))
    ended = await stage.run()
    assert ended.result is not None
    texts = [beat.text or "" for beat in stage.beats]
    assert all(ended.result.text.startswith(text) for text in texts)
    assert len(set(texts)) >= 3
    progress = [beat.progress for beat in stage.beats]
    assert progress == sorted(progress)
    assert progress[-1] <= 99
    assert [beat.seq for beat in stage.beats] == sorted(beat.seq for beat in stage.beats)


async def test_a_silent_model_is_heard_of_every_second(stage: Stage) -> None:
    stage.server.script(stream(chunk("a"), FOREVER))
    work = asyncio.create_task(stage.run())
    await until(lambda: len(stage.beats) >= 4)
    gaps = [b - a for a, b in itertools.pairwise(stage.times)]
    assert all(0.9 <= gap < 3 for gap in gaps)
    assert stage.beats[-1] == stage.beats[-2]  # nothing new: the same record again
    stage.environment.cancel()
    await work


async def test_it_goes_on_where_the_attempt_before_stopped(stage: Stage) -> None:
    stage.server.script(stream(chunk(" three"), finish(), DONE))
    ended = await stage.run(attempt=2, checkpoint=Beat(attempt=1, text="one two", output_tokens=2))
    assert ended.result is not None
    assert (ended.result.text, ended.result.resumed) == ("one two three", True)
    assert stage.server.calls[0].body["max_tokens"] == 8
    assert (ended.beat.output_tokens, ended.beat.resumed_from_tokens) == (3, 2)


async def test_a_simulated_model_with_nothing_to_do_ends_at_once(stage: Stage) -> None:
    ended = await stage.run("sim", {"tokens": 0})
    assert ended.kind == "generated"


# Cut short -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[FOREVER], [0.01, chunk("x ")] * 20_000], ids=["silent", "busy"])
async def test_a_cancel_closes_the_connection_and_keeps_the_text(stage: Stage, steps: list[Any]) -> None:
    stage.server.script(stream(*words("one two three"), *steps))
    work = asyncio.create_task(stage.run())
    call = await stage.server.call(0)
    await asyncio.sleep(0.2)
    before = time.monotonic()
    stage.environment.cancel()
    ended = await work
    assert await call.closed_by_client(2) - before < 1
    assert ended.kind == "cancelled"
    assert ended.result is None
    assert (ended.beat.text or "").startswith("one two three")
    assert ended.usage.completion_tokens == ended.beat.output_tokens >= 3
    assert stage.counted("cancelled") == 1


async def test_a_cancelled_attempt_keeps_more_than_a_checkpoint_holds(stage: Stage) -> None:
    stage.server.script(stream(*[chunk("y" * 50_000)] * 8, FOREVER))
    work = asyncio.create_task(stage.run())
    await until(lambda: bool(stage.beats) and stage.beats[-1].output_tokens == 8)
    assert stage.beats[-1].text is None
    stage.environment.cancel()
    assert (await work).beat.text == "y" * 400_000


@pytest.mark.parametrize("details", [{"timed_out": True, "not_found": True}, {"not_found": True}])
async def test_a_fenced_attempt_closes_the_connection_and_reports_nothing(
    stage: Stage, details: dict[str, bool]
) -> None:
    stage.server.script(stream(chunk("x"), FOREVER))
    work = asyncio.create_task(stage.run())
    call = await stage.server.call(0)
    stage.environment.cancel(ActivityCancellationDetails(**details))
    await asyncio.wait([work], timeout=5)
    assert work.cancelled()
    await call.closed_by_client(2)


async def test_a_drain_hands_over_the_checkpoint(stage: Stage) -> None:
    stage.server.script(stream(*words("one two three"), FOREVER))
    work = asyncio.create_task(stage.run())
    call = await stage.server.call(0)
    await asyncio.sleep(0.1)
    stage.drain.begin(0.3)
    await asyncio.sleep(0.1)
    assert not work.done()
    ended = await asyncio.wait_for(work, 5)
    await call.closed_by_client(2)
    assert (ended.kind, ended.beat.text, ended.beat.output_tokens) == ("drained", "one two three", 3)
    assert stage.counted("drained") == 1


async def test_an_attempt_that_ends_within_the_drain_is_whole(stage: Stage) -> None:
    stage.server.script(stream(chunk("a"), 0.3, finish(), DONE))
    work = asyncio.create_task(stage.run())
    await stage.server.call(0)
    stage.drain.begin(20)
    assert (await asyncio.wait_for(work, 5)).kind == "generated"


async def test_a_second_word_ends_the_drain_at_once(stage: Stage) -> None:
    stage.server.script(stream(chunk("a"), FOREVER))
    work = asyncio.create_task(stage.run())
    await stage.server.call(0)
    stage.drain.begin(3600)
    stage.drain.now()
    assert (await asyncio.wait_for(work, 5)).kind == "drained"


async def test_work_that_arrives_during_a_drain_goes_back(stage: Stage) -> None:
    stage.drain.begin(3600)
    checkpoint = Beat(attempt=1, text="one", output_tokens=1)
    ended = await stage.run(attempt=2, checkpoint=checkpoint)
    assert (ended.kind, ended.beat.text) == ("drained", "one")
    assert stage.server.calls == []
    stage.drain.now()


async def test_the_sdks_own_shutdown_hands_over_too(stage: Stage) -> None:
    stage.server.script(stream(chunk("a"), FOREVER))
    work = asyncio.create_task(stage.run())
    await stage.server.call(0)
    stage.environment.cancel(ActivityCancellationDetails(worker_shutdown=True))
    assert (await work).kind == "drained"


async def test_an_executor_that_ignores_a_cancel_is_left_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.generate._CLOSING", 0.3)
    work = asyncio.create_task(stage.run("deaf", {"seconds": 1.0}))
    await until(lambda: bool(stage.beats))
    await asyncio.sleep(0.1)
    before = time.monotonic()
    stage.environment.cancel()
    assert (await work).kind == "cancelled"
    assert time.monotonic() - before < 0.9
    await asyncio.sleep(1.0)  # lets it end before the loop closes


# Faults ----------------------------------------------------------------------------------------------


async def test_a_fault_carries_the_checkpoint(stage: Stage) -> None:
    stage.server.script(stream(*words("one two three")))
    _, details = await stage.fault()
    assert (details.code, details.retryable, details.refused) == ("stream_truncated", True, False)
    assert details.beat is not None
    assert (details.beat.text, details.beat.output_tokens) == ("one two three", 3)
    assert details.usage.completion_tokens == 3
    assert details.worker == "gpu:local@test"
    assert details.started_at is not None
    assert stage.counted("failed") == 1


async def test_a_refusal_carries_its_delay(stage: Stage) -> None:
    stage.server.script(reply(503, "", Retry_After="7"))
    _, details = await stage.fault()
    assert (details.code, details.refused, details.retry_after) == ("upstream_unavailable", True, 7.0)
    assert stage.counted("refused") == 1


async def test_the_time_limit_of_an_attempt(stage: Stage) -> None:
    stage.server.script(stream(*[step for _ in range(1000) for step in (chunk("x "), 0.05)]))
    _, details = await stage.fault(limits=Limits(attempt_seconds=0.5))
    assert (details.code, details.retryable) == ("attempt_timeout", True)
    assert details.beat is not None
    assert (details.beat.text or "").startswith("x x ")
    await stage.server.calls[0].closed_by_client(2)
    assert stage.counted("timed_out") == 1


async def test_it_ends_before_temporal_would_end_it(stage: Stage) -> None:
    stage.limit_by_temporal(1.5)
    stage.server.script(stream(chunk("x"), FOREVER))
    before = time.monotonic()
    _, details = await stage.fault(limits=Limits(attempt_seconds=100))
    assert details.code == "attempt_timeout"
    assert time.monotonic() - before < 1.4


@pytest.mark.parametrize(
    ("model", "code", "words_in_it"),
    [
        ("keyless", "upstream_auth", "NO_SUCH_KEY"),
        ("missing", "model_unknown", "no_such_module"),
    ],
)
async def test_models_that_cannot_be_served_say_what_to_do(
    stage: Stage, model: str, code: str, words_in_it: str
) -> None:
    _, details = await stage.fault(model)
    assert (details.code, details.retryable) == (code, False)
    assert words_in_it in details.message
    assert stage.server.calls == []


async def test_a_model_that_this_worker_lacks_is_left_to_another(stage: Stage) -> None:
    _, details = await stage.fault("nowhere")
    assert (details.code, details.retryable, details.refused) == ("model_unknown", True, True)
    assert "models.toml" in details.message


async def test_a_result_larger_than_may_be_kept(stage: Stage) -> None:
    stage.server.script(stream(*[chunk("\n" * 100_000)] * 9, finish(), DONE))  # doubled by its JSON
    _, details = await stage.fault()
    assert (details.code, details.retryable) == ("output_too_large", False)
    assert details.beat is not None
    assert details.beat.text is None


async def test_whatever_goes_wrong_no_prompt_is_told(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        error, details = await stage.fault("broken")
        refusal = json.dumps({"error": {"message": f"cannot parse: {SECRET}"}})
        stage.server.script(reply(400, refusal))
        _, refused = await stage.fault()
        stage.server.script(stream(chunk("x"), finish(), DONE))
        await stage.run()
    assert (details.code, details.retryable) == ("internal", True)
    assert refused.code == "invalid_request"
    for text in (str(error), details.message, refused.message):
        assert "CANARY" not in text
        assert len(text) < 600
    logged = [
        "".join(str(value) for value in vars(record).values()) + record.getMessage()
        for record in caplog.records
        if not record.name.startswith("temporalio")
    ]
    assert any("RuntimeError" in line for line in logged)
    assert not [line for line in logged if "CANARY" in line]


async def test_the_first_token_is_timed(stage: Stage) -> None:
    stage.server.script(stream(chunk(role="assistant"), 0.2, *words("one two three"), finish(), DONE))
    await stage.run()
    name = "perdure_time_to_first_token_seconds"
    assert stage.metrics.registry.get_sample_value(f"{name}_count") == 1
    assert (stage.metrics.registry.get_sample_value(f"{name}_sum") or 0) >= 0.2


async def test_two_attempts_after_a_fault_make_one_text(stage: Stage) -> None:
    params = {
        "tokens": 40,
        "tokens_per_second": 400,
        "fault": {"code": "upstream_unavailable", "after_tokens": 15, "times": 2},
    }
    beat: Beat | None = None
    for number in (1, 2):
        _, details = await stage.fault("sim", params, attempt=number, checkpoint=beat)
        beat = details.beat
    ended = await stage.run("sim", params, attempt=3, checkpoint=beat)
    assert ended.result is not None
    assert ended.result.text == simulated_words(0, 40)
    assert ended.usage.completion_tokens == 10
