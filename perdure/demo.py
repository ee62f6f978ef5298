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

import httpx

from perdure.models import Catalogue
from perdure.task.states import Status

PREFERRED_MODEL = "smollm2-135m"
MAX_TOKENS = 160
_PAUSE = 0.4  # seconds between looks at the task
_SUBMIT_SECONDS = 15.0
_BAR = 30


class DemoError(RuntimeError):
    """The demo could not run; the message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """The stack that the demo speaks to. `model` None: any that the API lists."""

    api: str
    temporal_ui: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True)
class Report:
    """A task at its end."""

    task: dict[str, Any]
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


def tokens_per_second(task: dict[str, Any]) -> float | None:
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
    messages = [
        {"role": "system", "content": "You summarise texts in a few plain sentences."},
        {"role": "user", "content": f"Summarise this story in three sentences.\n\n{text}"},
    ]
    params = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    return {"model_id": model, "task_type": "document", "params": params, "metadata": {"origin": "demo"}}


class Watcher:
    """Submits the demo task and follows it. `show(task)` is called with every state that was seen."""

    def __init__(self, target: Target, show: Callable[[dict[str, Any]], None]) -> None:
        self._target = target
        self._show = show

    async def run(self) -> Report:
        """Returns at the task's end. Raises DemoError."""
        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        async with httpx.AsyncClient(
            base_url=self._target.api, headers=headers, timeout=_SUBMIT_SECONDS, trust_env=False
        ) as http:
            task = await self._submit(http)
            while True:
                self._show(task)
                if Status(task["status"]).final:
                    break
                await asyncio.sleep(_PAUSE)
                task = await self._look(http, task)
        link = f"{self._target.temporal_ui}/namespaces/default/workflows/{task['task_id']}"
        return Report(task, link)

    async def _submit(self, http: httpx.AsyncClient) -> dict[str, Any]:
        try:
            answer = await http.post("/v1/tasks", json=demo_body(self._target.model))
        except httpx.HTTPError as error:
            raise DemoError(f"{self._target.api} does not answer ({error})") from error
        if answer.status_code != httpx.codes.ACCEPTED:
            raise DemoError(f"the task was refused: {_problem(answer)}")
        task: dict[str, Any] = answer.json()
        return task

    async def _look(self, http: httpx.AsyncClient, last: dict[str, Any]) -> dict[str, Any]:
        """The task as it is now; what was seen last while the API is away."""
        try:
            answer = await http.get(f"/v1/tasks/{last['task_id']}", params={"include": "partial"})
        except httpx.HTTPError:
            return last
        if answer.is_success:
            task: dict[str, Any] = answer.json()
            return task
        if answer.is_server_error:
            return last
        raise DemoError(f"the task cannot be read: {_problem(answer)}")


def _problem(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return f"{answer.status_code} {body['code']}: {body.get('detail', '')}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text[:200]}"


# Showing --------------------------------------------------------------------------------------------
class PlainShow:
    """A line whenever the state or the progress changed: for pipes and logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: tuple[str, int] | None = None

    def __call__(self, task: dict[str, Any]) -> None:
        now = (task["status"], task["progress"])
        if now != self._last:
            self._last = now
            self._say(f"{task['task_id']} {now[0]} {now[1]} %")


async def first_task(target: Target, say: Callable[[str], None]) -> None:
    """The first start's task: its link, then a summary of its result."""
    announced = False

    def show(task: dict[str, Any]) -> None:
        nonlocal announced
        if not announced:
            announced = True
            link = f"{target.temporal_ui}/namespaces/default/workflows/{task['task_id']}"
            say(f"A first task runs on {target.model}; watch it at {link}")

    report = await Watcher(target, show).run()
    for line in [*report.lines(), report.last_line, ""]:
        say(line)


async def watch(target: Target) -> Report:
    """Runs the task with a progress bar and the growing text on a terminal, else with plain lines."""
    if not sys.stdout.isatty():
        return await Watcher(target, PlainShow(lambda line: print(line, flush=True))).run()
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    began = time.monotonic()

    def picture(task: dict[str, Any]) -> Group:
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
        return await Watcher(target, lambda task: live.update(picture(task))).run()
