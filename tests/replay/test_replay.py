"""Histories of released workflows replay, and the commands of each path stay what they were.

After a deliberate change behind `workflow.patched`, add golden histories with
`PERDURE_RECORD=1 python -m pytest tests/replay`; keep the old files: they must go on replaying.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from perdure import names
from perdure.contracts import CommitReceipt, TaskInput
from tests.replay.scenarios import SCENARIOS, UPKEEP, fingerprint, upkeep_run
from tests.workflow.conftest import Stage, stage, temporal_address, temporal_client, temporal_server, world  # noqa: F401
from workers.control import WORKFLOWS, workflow_runner

HISTORIES = Path(__file__).parent / "histories"
FINGERPRINTS = Path(__file__).parent / "fingerprints.json"
RECORD = bool(os.environ.get("PERDURE_RECORD"))


def replayer(workflows: list[type]) -> Replayer:
    return Replayer(
        workflows=workflows, data_converter=pydantic_data_converter, workflow_runner=workflow_runner()
    )


def history_of(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(f"golden-{path.stem}", path.read_text())


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.json")), ids=lambda path: path.stem)
async def test_a_golden_history_replays(path: Path) -> None:
    await replayer(WORKFLOWS).replay_workflow(history_of(path))


def test_every_path_has_a_golden_history() -> None:
    recorded = {path.stem.split(".")[0] for path in HISTORIES.glob("*.json")}
    assert recorded >= {*SCENARIOS, *UPKEEP}


@workflow.defn(name=names.WF_INFERENCE_TASK)
class Changed:
    """A workflow whose first command is another one."""

    @workflow.run
    async def run(self, task: TaskInput) -> CommitReceipt:
        await workflow.sleep(1)
        return CommitReceipt(kind="committed")


async def test_a_changed_workflow_is_caught() -> None:
    with pytest.raises(NondeterminismError):
        await replayer([Changed]).replay_workflow(history_of(HISTORIES / "quick_success.json"))


@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_commands_of_a_path_are_as_released(name: str, stage: Stage) -> None:  # noqa: F811 - a fixture
    handle = await SCENARIOS[name](stage)
    check(name, await handle.fetch_history())


@pytest.mark.parametrize("name", UPKEEP)
async def test_the_commands_of_upkeep_are_as_released(name: str, temporal_client: Client) -> None:  # noqa: F811
    handle = await upkeep_run(temporal_client, name)
    check(name, await handle.fetch_history())


def anywhere(value: Any) -> Any:
    """A history without what tells the machine that it was recorded on; a replay needs none of it."""
    if isinstance(value, dict):
        kept = {key: anywhere(item) for key, item in value.items() if key != "stackTrace"}
        return kept | {"identity": "recorder"} if "identity" in kept else kept
    return [anywhere(item) for item in value] if isinstance(value, list) else value


def check(name: str, history: WorkflowHistory) -> None:
    found = fingerprint(history)
    known = json.loads(FINGERPRINTS.read_text()) if FINGERPRINTS.exists() else {}
    if RECORD:
        HISTORIES.mkdir(exist_ok=True)
        (HISTORIES / f"{name}.json").write_text(json.dumps(anywhere(history.to_json_dict()), indent=1) + "\n")
        FINGERPRINTS.write_text(json.dumps(known | {name: found}, indent=1) + "\n")
        return
    assert found == known[name], (
        f"the commands of '{name}' changed: runs that are under way would break. Gate the change with "
        "workflow.patched (CONTRIBUTING), then record a new history beside the old one"
    )
