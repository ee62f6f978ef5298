"""The whole service as a newcomer runs it, with the real small model.

One stack serves all of these tests, in their order: starting it costs more than most of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import asyncpg
import httpx
import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from tests.e2e.support import COMMAND, ENV, DevStack, alive, until

pytestmark = [pytest.mark.llm, pytest.mark.slow, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(300)]

LONG = "Write a long story about a lighthouse keeper, his dog, the sea and a storm that lasts for seven days."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    found = DevStack(tmp_path_factory.mktemp("stack"))
    try:
        found.start()
        yield found
    finally:
        found.end()


def test_first_start_says_where_everything_is_and_runs_a_task(stack: DevStack) -> None:
    printed = until(
        lambda: re.search(r"^(task_[0-9a-f]{32}) COMPLETED$", stack.output.read_text(), re.MULTILINE),
        90,
        "the first task",
    )
    text = stack.output.read_text()
    assert text.count("Perdure is ready") == 1
    for name in ("api", "temporal_ui", "model"):
        assert stack.dev["urls"][name] in text
    assert f"/namespaces/default/workflows/{printed[1]}" in text
    assert stack.task(printed[1])["usage"]["completion_tokens"] > 0
    assert httpx.get(stack.dev["urls"]["temporal_ui"], trust_env=False).status_code == 200


def test_dev_json_names_the_working_processes(stack: DevStack) -> None:
    dev = stack.dev
    assert set(dev["children"]) == {
        "postgres", "temporal", "model", "api", "control", "callbacks", "gpu:local:0",
    }  # fmt: skip
    expected = {
        "postgres": "postgres", "temporal": "temporal", "model": "model_server", "api": "api",
        "control": "control", "callbacks": "callbacks", "gpu:local:0": "gpu",
    }  # fmt: skip
    for name, word in expected.items():
        with open(f"/proc/{dev['children'][name]}/cmdline") as line:
            assert word in line.read(), name
    assert dev["urls"]["api"] == f"http://127.0.0.1:{stack.base}"
    assert dev["urls"]["temporal"] == f"127.0.0.1:{stack.base + 1}"
    assert dev["pid"] == (stack.process.pid if stack.process else None)
    assert dev["callback_secret"]
    assert (stack.data / "dev.json").stat().st_mode & 0o077 == 0


def test_gpu_worker_has_no_database_and_no_secret(stack: DevStack) -> None:
    def environment(name: str) -> dict[str, str]:
        with open(f"/proc/{stack.children[name]}/environ") as file:
            return dict(entry.split("=", 1) for entry in file.read().split("\0") if "=" in entry)

    gpu, control = environment("gpu:local:0"), environment("control")
    for name in ("PERDURE_DATABASE_URL", "PERDURE_SECRET_KEY", "PERDURE_CALLBACK_SECRET"):
        assert name in control
        assert control[name] not in gpu.values()
    assert not [name for name in gpu if "DATABASE" in name or "SECRET" in name or "CALLBACK" in name]


async def test_real_task_is_seen_growing_and_row_and_history_agree(stack: DevStack) -> None:
    task_id = stack.submit(LONG, max_tokens=200)
    seen: list[int] = []
    partial = ""

    def finished() -> bool:
        nonlocal partial
        task = stack.task(task_id, "partial")
        seen.append(task["progress"])
        partial = task.get("partial_text") or partial
        return task["status"] == "COMPLETED"

    until(finished, 120, "the task")
    task = stack.task(task_id, "params,result,attempts")
    assert seen == sorted(seen)
    assert seen[-1] == 100
    assert len({value for value in seen if 0 < value < 100}) >= 2, seen
    assert partial
    assert task["result"]["text"].startswith(partial[:20])
    assert task["result"]["finish_reason"] in ("stop", "length")
    assert task["usage"]["completion_tokens"] > 10

    client = await Client.connect(stack.dev["urls"]["temporal"])
    handle = client.get_workflow_handle(task_id)
    assert (await handle.describe()).status is WorkflowExecutionStatus.COMPLETED
    history = await handle.fetch_history()
    names = [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in history.events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert names[:2] == ["generate", "commit_outcome"]

    connection = await asyncpg.connect(stack.dev["database_url"])
    try:
        row = await connection.fetchrow(
            "select status, version, progress from tasks where task_id = $1", task_id
        )
    finally:
        await connection.close()
    assert (row["status"], row["version"], row["progress"]) == ("COMPLETED", task["version"], 100)


def test_cancel_in_the_middle_frees_the_slot_and_keeps_the_text(stack: DevStack) -> None:
    task_id = stack.submit(LONG, max_tokens=1500)
    until(lambda: stack.task(task_id, "partial").get("partial_text"), 90, "some text")
    assert stack.busy_slots() == 1
    answer = stack.call("POST", f"/v1/tasks/{task_id}/cancel", json={"reason": "enough"})
    assert answer.status_code == 202
    assert answer.json()["cancel_requested"]
    until(lambda: stack.busy_slots() == 0, 15, "a free slot")
    task = stack.until_status(task_id, "CANCELLED")
    assert stack.task(task_id, "result")["result"]["text"]
    assert task["completed_at"]


def test_second_copy_is_refused(stack: DevStack) -> None:
    second = subprocess.run(
        [*COMMAND, "dev", *stack.options], env=ENV, capture_output=True, text=True, check=False, timeout=60
    )
    assert second.returncode == 1
    assert len(second.stderr.splitlines()) == 1
    assert f"pid {stack.dev['pid']}" in second.stderr
    assert stack.call("GET", "/readyz").status_code == 200


def test_demo_uses_the_running_stack_and_leaves_it(stack: DevStack) -> None:
    before = stack.dev
    demo = subprocess.run(
        [*COMMAND, "demo", *stack.options], env=ENV, capture_output=True, text=True, check=False, timeout=120
    )
    assert demo.returncode == 0, demo.stderr
    assert re.fullmatch(r"task_[0-9a-f]{32} COMPLETED", demo.stdout.splitlines()[-1])
    assert "tokens/s" in demo.stdout
    assert f"{before['urls']['temporal_ui']}/namespaces/default/workflows/task_" in demo.stdout
    assert stack.dev == before


def test_worker_killed_in_the_middle_is_replaced_and_the_task_goes_on(stack: DevStack) -> None:
    task_id = stack.submit(LONG, max_tokens=200)
    until(lambda: len(stack.task(task_id, "partial").get("partial_text") or "") > 80, 90, "some text")
    old = stack.children["gpu:local:0"]
    os.kill(old, signal.SIGKILL)
    new = until(
        lambda: stack.children["gpu:local:0"] != old and stack.children["gpu:local:0"], 30, "a new pid"
    )
    assert alive(new)
    stack.until_status(task_id, "COMPLETED")
    attempts = stack.task(task_id, "attempts")["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["lost", "completed"]
    assert attempts[1]["resumed_from_tokens"] > 0
    assert "gpu:local:0 was killed by SIGKILL; starting it again" in stack.output.read_text()


def test_stack_stopped_in_the_middle_of_a_task_finishes_it_after_the_next_start(stack: DevStack) -> None:
    task_id = stack.submit(LONG, max_tokens=200)
    until(lambda: len(stack.task(task_id, "partial").get("partial_text") or "") > 80, 90, "some text")
    processes = [*stack.children.values()]
    assert stack.stop(signal.SIGINT) < 30  # 15 s by design; this machine is shared
    assert not [pid for pid in processes if alive(pid)]
    assert not (stack.data / "dev.json").exists()
    stack.start()
    stack.until_status(task_id, "COMPLETED")
    attempts = stack.task(task_id, "attempts")["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["drained", "completed"]
    assert attempts[1]["resumed_from_tokens"] > 0


def test_killed_parent_leaves_nothing_behind_and_the_next_start_goes_on(stack: DevStack) -> None:
    task_id = stack.submit(LONG, max_tokens=60)
    old = stack.children
    stack.kill()
    stack.start()
    assert not [name for name, pid in old.items() if alive(pid)]
    assert not set(old.values()) & set(stack.children.values())
    stack.until_status(task_id, "COMPLETED")


def test_stack_with_models_of_its_own_and_two_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`--models`, `--no-model`, `--gpu-workers`; and `demo` brings up what it needs and takes it down."""
    root = tmp_path_factory.mktemp("own")
    models = root / "own.toml"
    models.write_text(
        '[pools.a]\nslots = 1\n[pools.b]\n[models.first]\npool = "a"\nexecutor = "simulated"\n'
        '[models.second]\npool = "b"\nexecutor = "simulated"\n'
    )
    stack = DevStack(root, "--models", str(models), "--no-model", "--gpu-workers", "2")
    try:
        stack.start()
        assert set(stack.children) == {
            "postgres", "temporal", "api", "control", "callbacks",
            "gpu:a:0", "gpu:a:1", "gpu:b:0", "gpu:b:1",
        }  # fmt: skip
        assert "model" not in stack.dev["urls"]
        stack.until_status(stack.submit("hi", "second", tokens=5), "COMPLETED")
        assert "first task" not in stack.output.read_text()
        stack.stop()
        demo = subprocess.run(
            [*COMMAND, "demo", *stack.options],
            env=ENV,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert demo.returncode == 0, demo.stderr
        assert re.fullmatch(r"task_[0-9a-f]{32} COMPLETED", demo.stdout.splitlines()[-1])
        assert not (stack.data / "dev.json").exists()
    finally:
        stack.end()


def test_stop_in_the_middle_of_the_start_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    stack = DevStack(tmp_path_factory.mktemp("early"), "--no-model")
    try:
        stack.launch()
        recorded = stack.data / "children.json"
        until(lambda: recorded.exists() and "temporal" in recorded.read_text(), 60, "a first child")
        processes = [pid for pid, _ in json.loads(recorded.read_text()).values()]
        assert stack.stop() < 30
        assert not [pid for pid in processes if alive(pid)]
        assert not (stack.data / "dev.json").exists()
    finally:
        stack.end()
