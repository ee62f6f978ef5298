"""What the commands do. Each returns its exit code; ClientError and UsageError end it otherwise."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import Any

from perdure.client import FINAL_STATES, Client, Task
from perdure.commands import exits, show
from perdure.commands.exits import UsageError

_PAGE = 200
_PATIENCE = 5.0  # seconds that a command looks for an API that is away
_WATCH_PATIENCE = 120.0  # the same once it follows a task: a deploy takes a while


async def submit(body: dict[str, Any], *, watch: bool, wait: bool, as_json: bool) -> int:
    """Submits. `wait` prints the result alone, `watch` follows the task; else its id is printed."""
    async with Client(patience=_PATIENCE) as client:
        body["model_id"] = body["model_id"] or await _only_model(client)
        wanted = {name: value for name, value in body.items() if value not in (None, {})}
        task = await client.submit(wanted)
        if watch:
            return await _follow(client, task["task_id"], as_json)
        if not wait:
            show.print_json(task) if as_json else print(task["task_id"], flush=True)
            return exits.DONE
        print(task["task_id"], file=sys.stderr, flush=True)
        client.patience = _WATCH_PATIENCE
        task = await client.finished(task["task_id"])
        if as_json:
            show.print_json(task)
        elif text := show.text_of(task):
            show.print_text(text)
        if task["status"] != "COMPLETED":
            print(show.status_line(task), file=sys.stderr, flush=True)
        return exits.of_task(task)


async def _only_model(client: Client) -> str:
    """The model that is meant when none is named: the one there is."""
    found = (await client.models()).get("data") or []
    names = [str(model.get("model_id") or model.get("id")) for model in found]
    if len(names) == 1:
        return names[0]
    known = ", ".join(names[:20]) or "none"
    raise UsageError(f"name a model with --model or PERDURE_MODEL; there are: {known}")


async def get(task_id: str, *, text: bool, as_json: bool) -> int:
    """Prints a task."""
    async with Client(patience=_PATIENCE) as client:
        task = await client.get(task_id, include=["partial"])
    if as_json:
        show.print_json(task)
    elif text:
        show.print_text(show.text_of(task))
    else:
        show.print_task(task)
    return exits.DONE


async def list_tasks(filters: dict[str, Any], *, limit: int, as_json: bool) -> int:
    """Prints the newest tasks, over as many pages as `limit` needs."""
    tasks: list[Task] = []
    async with Client(patience=_PATIENCE) as client:
        cursor: str | None = None
        while len(tasks) < limit:
            page = await client.list(limit=min(_PAGE, limit - len(tasks)), cursor=cursor, **filters)
            tasks += page["data"]
            cursor = page["next_cursor"]
            if not page["has_more"]:
                break
    if as_json:
        for task in tasks:
            show.print_json(task)
    else:
        show.print_table(tasks)
    return exits.DONE


async def watch(task_id: str, *, as_json: bool) -> int:
    """Follows a task to its end."""
    async with Client(patience=_PATIENCE) as client:
        return await _follow(client, task_id, as_json)


async def _follow(client: Client, task_id: str, as_json: bool) -> int:
    screen = show.show_for(as_json)
    try:
        async with aclosing(client.watch(task_id, partial=True)) as events:
            async for event in events:
                client.patience = _WATCH_PATIENCE
                screen.event(event)
        task = await client.get(task_id)
        screen.end(task)
        return exits.of_task(task)
    finally:
        screen.close()


async def cancel(task_id: str, *, reason: str | None, as_json: bool) -> int:
    """Asks for a cancel."""
    async with Client(patience=_PATIENCE) as client:
        task = await client.cancel(task_id, reason)
    if as_json:
        show.print_json(task)
    elif task["status"] in FINAL_STATES:
        print(show.status_line(task), flush=True)
    else:
        print(f"{task['task_id']} {task['status']}, cancel requested", flush=True)
    return exits.DONE
