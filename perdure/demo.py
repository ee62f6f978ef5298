"""One real task, watched to its end: what `perdure demo` shows, and the first start of `perdure dev`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from typing import Any

from perdure.client import Client, ClientError, Task
from perdure.models import Catalogue
from perdure.task.states import Status

PREFERRED_MODEL = "smollm2-135m"
MAX_TOKENS = 160
_PAUSE = 0.4  # seconds between looks at the task
_BAR = 30


class DemoError(RuntimeError):
    """The demo could not run; the message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """The stack that the demo speaks to, and the model that it asks."""

    api: str
    temporal_ui: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True)
class Report:
    """A task at its end."""

    task: Task
    temporal_url: str

    @property
    def completed(self) -> bool:
        return bool(self.task["status"] == Status.COMPLETED)

    @property
    def last_line(self) -> str:
        return f"{self.task['task_id']} {self.task['status']}"

    def lines(self) -> list[str]:
        """Result, usage, speed and the link to the history."""
        task = self.task
        text = (task.get("result") or {}).get("text") or ""
        lines = ["", *(text.strip().splitlines() or ["(no text)"]), ""]
        if task.get("error_code"):
            lines += [f"error         {task['error_code']}: {task['error_message']}"]
        usage = task.get("usage") or {}
        asked, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        lines += [f"tokens        {_count(asked)} read, {_count(made)} written"]
        if speed := tokens_per_second(task):
            lines += [f"speed         {speed:.1f} tokens/s over the whole attempt"]
        return [*lines, f"history       {self.temporal_url}"]


def _count(tokens: int | None) -> str:
    return "unknown" if tokens is None else str(tokens)


def tokens_per_second(task: Task) -> float | None:
    """Tokens written per second of the last attempt, the reading of the prompt included. None: unknown."""
    made = (task.get("usage") or {}).get("completion_tokens")
    attempts = task.get("attempts") or []
    if not made or not attempts:
        return None
    started, ended = attempts[-1].get("started_at"), attempts[-1].get("ended_at")
    if not started or not ended:
        return None
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
    return made / seconds if seconds > 0 else None


def choose_model(catalogue: Catalogue) -> str:
    """The small language model, else the first model there is."""
    models = list(catalogue.models)
    return PREFERRED_MODEL if PREFERRED_MODEL in models or not models else models[0]


def demo_body(model: str) -> dict[str, Any]:
    """The submit: a summary of a page of text that ships with the package."""
    text = files("perdure").joinpath("demo_text.txt").read_text(encoding="utf-8")
    messages = [{"role": "user", "content": f"{text}\n\nSummarise this story in three short sentences."}]
    # So small a model repeats itself when nothing holds it back; the seed gives everybody the same text.
    params = {"messages": messages, "max_tokens": MAX_TOKENS}
    params |= {"temperature": 0.3, "frequency_penalty": 0.6, "seed": 7}
    return {"model_id": model, "task_type": "document", "params": params, "metadata": {"origin": "demo"}}


async def follow(target: Target, show: Callable[[Task], None]) -> Report:
    """Submits the demo task and follows it; `show` is called with every state that was seen.

    Polls, as the API gives the text so far only on request. Raises DemoError.
    """
    try:
        async with Client(target.api, target.api_key or "") as client:
            task = await client.submit(demo_body(target.model))
            show(task)
            while not Status(task["status"]).final:
                await asyncio.sleep(_PAUSE)
                task = await client.get(task["task_id"], include=["partial"])
                show(task)
    except ClientError as error:
        raise DemoError(str(error)) from error
    return Report(task, f"{target.temporal_ui}/namespaces/default/workflows/{task['task_id']}")


# Showing --------------------------------------------------------------------------------------------
class PlainShow:
    """A line whenever the state or the progress changed: for pipes and logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: tuple[str, int] | None = None

    def __call__(self, task: Task) -> None:
        now = (task["status"], task["progress"])
        if now != self._last:
            self._last = now
            self._say(f"{task['task_id']} {now[0]} {now[1]} %")


async def first_task(target: Target, say: Callable[[str], None]) -> None:
    """The first start's task: its link, then a summary of its result."""
    announced = False

    def show(task: Task) -> None:
        nonlocal announced
        if not announced:
            announced = True
            link = f"{target.temporal_ui}/namespaces/default/workflows/{task['task_id']}"
            say(f"A first task runs on {target.model}; watch it at {link}")

    report = await follow(target, show)
    for line in [*report.lines(), report.last_line, ""]:
        say(line)


async def watch(target: Target) -> Report:
    """Runs the task with a progress bar and the growing text on a terminal, else with plain lines."""
    if not sys.stdout.isatty():
        return await follow(target, PlainShow(lambda line: print(line, flush=True)))
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    began = time.monotonic()

    def picture(task: Task) -> Group:
        done = task["progress"]
        filled = _BAR * done // 100
        bar = Text.assemble(
            ("█" * filled, "green"),
            ("░" * (_BAR - filled), "dim"),
            f" {done:>3} %  ",
            (task["status"], "bold"),
            f"  {time.monotonic() - began:.0f} s",
        )
        text = (task.get("result") or {}).get("text") or task.get("partial_text") or ""
        return Group(Text(task["task_id"], style="dim"), bar, Text(text))

    with Live(refresh_per_second=8, transient=True) as live:
        return await follow(target, lambda task: live.update(picture(task)))
