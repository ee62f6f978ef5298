"""Tasks for eyes and for pipes. A terminal gets bars, tables and live text; a pipe gets plain lines.

What a model or a caller wrote never steers the terminal: control characters are shown, not obeyed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from perdure.client import Event, Task
from perdure.task.text import one_line

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_COLOURS: Final = {
    "PENDING": "dim",
    "QUEUED": "yellow",
    "PROCESSING": "cyan",
    "COMPLETED": "green",
    "FAILED": "red",
    "CANCELLED": "magenta",
}
_WAITS: Final = {
    "waiting_for_slot": "waits for a free slot",
    "behind_higher_priority": "waits behind higher priority",
    "no_worker": "no worker serves its model",
    "backing_off": "waits before its next attempt",
    "not_before": "waits for its start time",
}


def harmless(text: str) -> str:
    """Text with nothing in it that a terminal would obey."""
    return _CONTROLS.sub("\ufffd", text)


def text_of(task: Task) -> str:
    """The task's text: of its result, else what there is so far."""
    result = task.get("result")
    if isinstance(result, dict):
        text = result.get("text")
        return text if isinstance(text, str) else json.dumps(result, ensure_ascii=False)
    return task.get("partial_text") or ""


def print_json(value: Any) -> None:
    """One line of JSON."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_text(text: str) -> None:
    """A result on its own. A pipe gets it as it is."""
    print(harmless(text) if sys.stdout.isatty() else text, flush=True)


def status_line(task: Task) -> str:
    """`task_… PROCESSING 42 %`, with why it waits or failed."""
    line = f"{task['task_id']} {task['status']}"
    if task["status"] == "PROCESSING":
        line += f" {task['progress']} %"
    why = waiting(task)
    if why:
        line += f" ({why})"
    if task.get("error_code"):
        line += f" {one_line(str(task['error_code']))}: {one_line(str(task.get('error_message') or ''))}"
    return line


def waiting(task: Task) -> str:
    """Why a task waits, and about how long; empty when it does not, or nothing is known."""
    queue = task.get("queue")
    if not isinstance(queue, dict):
        return ""
    why = _WAITS.get(queue.get("reason", ""), "waits")
    if queue.get("ahead"):
        why += f", about {queue['ahead']} ahead"
    start = queue.get("estimated_start_at")
    if start:
        seconds = (datetime.fromisoformat(start) - datetime.now(UTC)).total_seconds()
        if seconds > 1:
            why += f", starts in about {_span(seconds)}"
    return why


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# One task -------------------------------------------------------------------------------------------
def print_task(task: Task) -> None:
    """A task in full: `name: value` lines, then its text."""
    lines = [
        ("task", task["task_id"]),
        ("status", task["status"]),
        ("progress", f"{task['progress']} %"),
        ("waiting", waiting(task)),
        ("model", task["model_id"]),
        ("type", task["task_type"]),
        ("priority", task["priority"]),
        ("error", status_error(task)),
        ("retries", f"{task['retry_count']} of {task['max_retries']}"),
        ("created", task["created_at"]),
        ("started", task["started_at"]),
        ("completed", task["completed_at"]),
        ("tokens", _tokens(task)),
    ]
    for name, value in lines:
        if value:
            print(f"{name + ':':<11}{one_line(str(value))}")
    text = text_of(task)
    if text:
        print()
        print_text(text)


def status_error(task: Task) -> str:
    code = task.get("error_code")
    return f"{code}: {task.get('error_message') or ''}" if code else ""


def _tokens(task: Task) -> str:
    usage = task.get("usage") or {}
    made, read = usage.get("completion_tokens"), usage.get("prompt_tokens")
    return "" if made is None else f"{made} written, {'?' if read is None else read} read"


def print_table(tasks: Iterable[Task]) -> None:
    """A table on a terminal; tab-separated lines without a head in a pipe."""
    if not sys.stdout.isatty():
        for task in tasks:
            print("\t".join(_cells(task)))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("task", "status", "progress", "priority", "model", "created"):
        table.add_column(head, no_wrap=True)
    for task in tasks:
        cells = [Text(cell) for cell in _cells(task)]
        cells[1].stylize(_COLOURS.get(task["status"], ""))
        table.add_row(*cells)
    Console().print(table)


def _cells(task: Task) -> list[str]:
    names = ("task_id", "status", "progress", "priority", "model_id", "created_at")
    return [one_line(str(task[name])) for name in names]


# A watch --------------------------------------------------------------------------------------------
class Show(Protocol):
    """Follows one task on stdout."""

    def event(self, event: Event) -> None: ...
    def end(self, task: Task) -> None: ...
    def close(self) -> None: ...


class JsonShow:
    """One JSON object a line: each event's data, then the whole task."""

    def event(self, event: Event) -> None:
        print_json(event.data)

    def end(self, task: Task) -> None:
        print_json(task)

    def close(self) -> None: ...


class LineShow:
    """A line for each thing that changed, then the text."""

    def __init__(self) -> None:
        self._last = ""

    def event(self, event: Event) -> None:
        line = status_line(event.data)
        if line != self._last:
            self._last = line
            print(line, flush=True)

    def end(self, task: Task) -> None:
        text = text_of(task)
        if text:
            print()
            print_text(text)

    def close(self) -> None: ...


class LiveShow:
    """A bar with the growing text under it; what remains at the end is the text."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._text = ""
        self._live.start()

    def event(self, event: Event) -> None:
        task = event.data
        if task.get("restarted"):
            self._text = ""
        part = task.get("partial")
        if part:
            self._text = self._text[: part["offset"]] + part["text"]
        self._live.update(self._picture(task))

    def _picture(self, task: Task) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        colour = _COLOURS.get(task["status"], "")
        row.add_row(
            Text(task["status"], style=colour),
            ProgressBar(total=100, completed=task["progress"], width=30),
            Text(f"{task['progress']:>3} %"),
            Text(waiting(task) or one_line(task.get("message") or ""), style="dim"),
        )
        height = max(3, self._console.height - 4)
        width = max(20, self._console.width)
        tail = harmless(self._text[-height * width :])
        lines = Text(tail).wrap(self._console, width)[-height:]
        return Group(Text(task["task_id"], style="dim"), row, *lines)

    def end(self, task: Task) -> None:
        from rich.text import Text

        self.close()
        text = text_of(task)
        if text:
            print_text(text)
        style = _COLOURS.get(task["status"], "")
        self._console.print(Text(f"{status_line(task)}  {_tokens(task)}", style=style))

    def close(self) -> None:
        self._live.stop()


def show_for(as_json: bool) -> Show:
    """The show that fits where stdout goes."""
    if as_json:
        return JsonShow()
    return LiveShow() if sys.stdout.isatty() else LineShow()
