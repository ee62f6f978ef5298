"""The commands as typer sees them: options and help. What they do is in `act`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text; one object a line.")]
_TaskId = Annotated[str, typer.Argument(metavar="TASK_ID")]


class PriorityName(StrEnum):
    """A class as one types it."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class StatusName(StrEnum):
    """A state as one types it."""

    PENDING = "pending"
    QUEUED = "queued"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def register(app: typer.Typer) -> None:
    """Adds `submit`, `get`, `list`, `watch` and `cancel`. They read PERDURE_URL and PERDURE_API_KEY."""
    app.command()(submit)
    app.command()(get)
    app.command("list")(list_)
    app.command()(watch)
    app.command()(cancel)


def submit(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing: stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", envvar="PERDURE_MODEL", help="The only one, if not given.")
    ] = None,
    priority: Annotated[PriorityName, typer.Option("--priority", case_sensitive=False)] = PriorityName.NORMAL,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    params: Annotated[str | None, typer.Option("--params", help="More params, as a JSON object.")] = None,
    task_type: Annotated[str | None, typer.Option("--type", help="The task's type.")] = None,
    metadata: Annotated[list[str] | None, typer.Option("--metadata", help="key=value; repeatable.")] = None,
    callback_url: Annotated[str | None, typer.Option("--callback-url")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow it to its end.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Print the result alone, once it is there.")] = False,
    as_json: _Json = False,
) -> None:
    """Submit a task. Prints its id; with --wait its result; with --watch all of its life."""
    from perdure.commands import act, exits
    from perdure.commands.prompt import chat_params, pairs, read_prompt

    async def command() -> int:
        text = read_prompt(prompt, file)
        body = {
            "model_id": model,
            "params": chat_params(text, system, max_tokens, params),
            "priority": priority.value.upper(),
            "task_type": task_type,
            "metadata": pairs(metadata or []),
            "callback_url": callback_url,
        }
        return await act.submit(body, watch=watch, wait=wait, as_json=as_json)

    exits.run(command())


def get(
    task_id: _TaskId,
    text: Annotated[bool, typer.Option("--text", help="The text alone, as far as it is there.")] = False,
    as_json: _Json = False,
) -> None:
    """Show a task as it is now."""
    from perdure.commands import act, exits

    exits.run(act.get(task_id, text=text, as_json=as_json))


def list_(
    status: Annotated[
        list[StatusName] | None, typer.Option("--status", case_sensitive=False, help="Repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m")] = None,
    task_type: Annotated[str | None, typer.Option("--type")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 20,
    as_json: _Json = False,
) -> None:
    """List tasks, newest first."""
    from perdure.commands import act, exits

    filters = {
        "status": [item.value.upper() for item in status or []] or None,
        "model_id": model,
        "task_type": task_type,
    }
    exits.run(act.list_tasks(filters, limit=limit, as_json=as_json))


def watch(task_id: _TaskId, as_json: _Json = False) -> None:
    """Follow a task to its end. The exit code is its outcome's."""
    from perdure.commands import act, exits

    exits.run(act.watch(task_id, as_json=as_json))


def cancel(
    task_id: _TaskId,
    reason: Annotated[str | None, typer.Option("--reason", help="Kept with the task.")] = None,
    as_json: _Json = False,
) -> None:
    """Cancel a task."""
    from perdure.commands import act, exits

    exits.run(act.cancel(task_id, reason=reason, as_json=as_json))
