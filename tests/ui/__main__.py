"""Opens the Temporal UI of a real stack in headless Chromium, finds a task by its search attributes, reads
its story, and takes the screenshots of the docs.

    python -m tests.ui [--images docs/images]        `make check-ui`; without --images nothing is kept

Exit status 0: all was there. 1: something is missing from a page. 2: there is no browser; the text says what
to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.e2e.support import DevStack
from tests.support.model_server import DONE, ModelServer, finish, reply, stream, usage, words
from tests.support.receiver import Receiver, answer
from tests.ui.browser import Browser, BrowserMissingError, find_chromium

MODELS = """
task_types = ["chat", "document", "code-review"]
[pools.local]
slots = 4
[models.llama-8b]
pool = "local"
executor = "openai"
base_url = "{url}"
[models.simulated]
pool = "local"
executor = "simulated"
"""
COLUMNS = [
    "Status",
    "Workflow ID",
    "TaskStatus",
    "TaskModel",
    "TaskType",
    "TaskPriority",
    "TaskUser",
    "Start",
]
TEXT = "A queue keeps its promise: what went in comes out, in order, once."


def check(ui: str, task_id: str, images: Path | None) -> None:
    """Reads the pages as an operator would. Raises AssertionError with what a page shows instead."""

    def keep(name: str) -> None:
        if images is not None:
            browser.screenshot(images / name)

    with Browser() as browser:
        browser.open(f"{ui}/namespaces/default/workflows")
        browser.wait_for_text("Workflow ID")
        columns = json.dumps({"default": [{"label": one} for one in COLUMNS]})
        browser.run(f"localStorage.setItem('namespace-workflow-table-columns', {json.dumps(columns)})")
        browser.open(f"{ui}/namespaces/default/workflows?query=" + quote('`WorkflowType`="InferenceTask"'))
        browser.wait_for_text(task_id, *COLUMNS, "CANCELLED", "FAILED", "code-review", "LOW")
        keep("temporal-list.png")

        wanted = '`TaskModel`="llama-8b" AND `TaskStatus`="COMPLETED" AND `TaskPriority`="HIGH"'
        browser.open(f"{ui}/namespaces/default/workflows?query=" + quote(wanted))
        browser.wait_for_text(task_id, "1 COMPLETED")  # found by what it is, and nothing else with it
        keep("temporal-search.png")

        link = f"[...document.querySelectorAll('a')].find(a => a.innerText.trim() === '{task_id}')"
        browser.click(link, "link to the task")
        browser.wait_for_text(
            "attempt 1 on llama-8b", "back-off before attempt 2", "attempt 2 on llama-8b",
            "outcome: COMPLETED", "callback: COMPLETED",
        )  # fmt: skip
        keep("temporal-timeline.png")

        browser.click("document.querySelector('[data-testid=user-metadata-tab]')", "tab User Metadata")
        summary, details = frame(browser, "summary"), frame(browser, "current-details")
        assert "llama-8b" in summary
        assert "HIGH" in summary
        for part in ("COMPLETED", "retries 1 of 3", "attempt 1: failed", "attempt 2: completed"):
            assert part in details, details
        keep("temporal-details.png")

        browser.click(
            "document.querySelector('[data-testid=search-attributes-tab]')", "tab Search Attributes"
        )
        browser.wait_for_text('"TaskStatus": "COMPLETED"', '"TaskModel": "llama-8b"', '"TaskUser": "dev"')


def frame(browser: Browser, name: str) -> str:
    """What a frame of rendered Markdown shows."""
    element = f"document.getElementById('user-metadata-{name}')"
    browser.click(element, f"frame {name}")  # waits until it is there
    text = ""
    for _ in range(50):
        text = str(browser.run(f"({element}.contentDocument || {{}}).body?.innerText || ''"))
        if text.strip():
            break
        browser.run("new Promise(done => setTimeout(done, 200))")
    return text


async def tell_stories(stack: DevStack, receiver: Receiver) -> str:
    """Tasks of every ending; the one that the checks read has a retry and a callback in it."""

    async def submit(body: dict[str, Any]) -> str:
        sent = await asyncio.to_thread(stack.call, "POST", "/v1/tasks", json=body)
        assert sent.status_code == 202, sent.text
        return str(sent.json()["task_id"])

    chat = {"messages": [{"role": "user", "content": "Praise the queue in one sentence."}]}
    long = {"tokens": 100_000, "tokens_per_second": 20}
    told = await submit(
        {"model_id": "llama-8b", "params": chat, "priority": "HIGH", "callback_url": receiver.url("/hook")}
    )
    await asyncio.to_thread(stack.until_status, told, "COMPLETED")
    await receiver.received(2)
    for task_type in ("document", "code-review"):
        task = await submit({"model_id": "simulated", "params": {"tokens": 5}, "task_type": task_type})
        await asyncio.to_thread(stack.until_status, task, "COMPLETED")
    await submit({"model_id": "simulated", "params": long, "priority": "LOW"})
    stopped = await submit({"model_id": "simulated", "params": long, "task_type": "document"})
    await asyncio.to_thread(stack.until_status, stopped, "PROCESSING")
    await asyncio.to_thread(
        stack.call, "POST", f"/v1/tasks/{stopped}/cancel", json={"reason": "changed my mind"}
    )
    late = await submit({"model_id": "simulated", "params": long, "timeout_seconds": 1, "max_retries": 0})
    await asyncio.to_thread(stack.until_status, stopped, "CANCELLED")
    await asyncio.to_thread(stack.until_status, late, "FAILED")
    return told


async def run(root: Path, images: Path | None) -> None:
    """Starts a stack of its own on free ports, checks, and stops it."""
    async with ModelServer() as model, Receiver([answer(503), answer(200)]) as receiver:
        model.script(
            reply(500, '{"error": {"message": "out of memory"}}'),
            stream(*words(TEXT), finish(), usage(9, 15), DONE),
        )
        (root / "models.toml").write_text(MODELS.format(url=model.base_url))
        stack = DevStack(root, "--no-model", "--models", str(root / "models.toml"))
        try:
            await asyncio.to_thread(stack.start)
            told = await tell_stories(stack, receiver)
            await asyncio.to_thread(check, stack.dev["urls"]["temporal_ui"], told, images)
            await asyncio.to_thread(stack.stop)
        finally:
            await asyncio.to_thread(stack.end)


def main() -> int:
    """Parses the command line, runs, and says in words how it went."""
    parser = argparse.ArgumentParser(description="browser test of the Temporal UI")
    parser.add_argument("--images", type=Path, help="folder for screenshots")
    images = parser.parse_args().images
    try:
        find_chromium()
    except BrowserMissingError as error:
        print(f"not checked: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="perdure-ui-", ignore_cleanup_errors=True) as root:
        Path(root).chmod(0o755)  # Postgres may run under another account
        try:
            asyncio.run(run(Path(root), images))
        except AssertionError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    print("the Temporal UI finds a task by its search attributes and tells its story")
    return 0


if __name__ == "__main__":
    sys.exit(main())
