"""Log lines of workflows and activities: written once, with the task in them, and silent in a replay."""

from __future__ import annotations

import io
import json
import logging
import uuid
from collections.abc import Iterator
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Replayer, Worker

from perdure.observability.logs import JsonFormatter


@activity.defn
async def speak() -> None:
    """Logs a line."""
    activity.logger.info("in the activity")


@workflow.defn(sandboxed=False)
class Talker:
    """Logs before and after an activity."""

    @workflow.run
    async def run(self) -> None:
        workflow.logger.info("before\nERROR forged")
        await workflow.execute_activity(speak, start_to_close_timeout=timedelta(seconds=10))
        workflow.logger.info("after", extra={"attempt": 3})


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the SDK's two loggers write in our form."""
    monkeypatch.setattr(workflow.logger, "workflow_info_on_message", False)
    monkeypatch.setattr(activity.logger, "activity_info_on_message", False)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("control"))
    loggers = [logging.getLogger(name) for name in ("temporalio.workflow", "temporalio.activity")]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.INFO)
    yield stream
    for one in loggers:
        one.removeHandler(handler)
        one.setLevel(logging.NOTSET)


async def test_lines_carry_the_task_and_a_replay_writes_none(
    temporal_client: Client, written: io.StringIO
) -> None:
    task = "task_" + uuid.uuid4().hex
    async with Worker(temporal_client, task_queue=task, workflows=[Talker], activities=[speak]):
        await temporal_client.execute_workflow(Talker.run, id=task, task_queue=task)
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["before\nERROR forged", "in the activity", "after"]
    assert {line["task_id"] for line in lines} == {task}
    assert lines[1]["activity"] == "speak"
    assert lines[2]["attempt"] == 3

    history = await temporal_client.get_workflow_handle(task).fetch_history()
    await Replayer(workflows=[Talker]).replay_workflow(history)
    assert len(written.getvalue().splitlines()) == 3
