"""A task told in words, for the Temporal UI: no prompt and no output in them."""

from __future__ import annotations

from perdure.contracts import Beat, TaskInput
from perdure.task.lifecycle import Lifecycle


def task_summary(task: TaskInput) -> str:
    """One line about a task, fixed at its start."""
    return f"{task.model_id} · {task.priority} · {task.task_type} · {task.user_id}"[:200]


def attempt_summary(number: int, model_id: str, checkpoint: Beat | None) -> str:
    """One line about an attempt."""
    if checkpoint and checkpoint.output_tokens:
        return f"attempt {number} on {model_id}, continues after {checkpoint.output_tokens} tokens"
    return f"attempt {number} on {model_id}"


def details(life: Lifecycle, waiting: str | None, cancelled: bool) -> str:
    """The task's state in Markdown."""
    reasons = {
        "slot": f"waiting for a slot in pool `{life.task.pool}`",
        "back_off": "waiting for its back-off to end",
        "record": "writing its outcome",
        "callback": "sending its callback",
    }
    lines = [f"**{life.status}**" + (f", {reasons[waiting]}" if waiting in reasons else "")]
    lines.append("")  # the UI makes a list only of what follows an empty line
    if cancelled and not life.status.final:
        lines.append("- cancel requested")
    if life.error_code:
        lines.append(f"- last fault: `{life.error_code}`")
    lines.append(
        f"- retries {life.retry_count} of {life.task.max_retries}, workers lost {life.lost_count} of "
        f"{life.task.max_lost}"
    )
    lines.extend(
        f"- attempt {a.number}: {a.outcome or 'open'}"
        + (f" (`{a.error_code}`)" if a.error_code else "")
        + (f" on `{a.worker}`" if a.worker else "")
        + (f", {a.output_tokens} tokens" if a.output_tokens else "")
        for a in life.attempts[-10:]
    )
    return "\n".join(lines)
