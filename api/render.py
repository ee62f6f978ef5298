"""Rows as the JSON that callers see: the task object, times, links, ETags.

    fields = task_fields(row, beat=beat, queue=queue)     a dict for `dumps`
    response = json_response(fields, 202, headers)

JSON that the row keeps as text goes out as it is, without being parsed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from starlette.responses import Response

from perdure.contracts import Beat
from perdure.store.rows import TaskRow
from perdure.task.states import Status

EVERYTHING: Final = ("params", "result", "attempts")
RETRY_AFTER: Final = "2"  # seconds, on what is not final
PRIVATE: Final = {"Cache-Control": "private, no-cache", "Vary": "Authorization, Prefer, Perdure-User"}
_NULL: Final = orjson.Fragment(b"null")


def time_text(moment: datetime | None) -> str | None:
    """UTC, six fractional digits, `Z`."""
    if moment is None:
        return None
    return moment.astimezone(UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def dumps(value: Any) -> bytes:
    """JSON for a reply; datetimes as `time_text`."""
    return orjson.dumps(value, default=_default, option=orjson.OPT_PASSTHROUGH_DATETIME)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON reply, encoded once."""
    return Response(dumps(value), status, headers=dict(headers or {}), media_type="application/json")


def task_fields(
    row: TaskRow,
    *,
    include: Collection[str] = EVERYTHING,
    beat: Beat | None = None,
    queue: Mapping[str, Any] | None = None,
    params_json: str | None = None,
) -> dict[str, Any]:
    """The task object. `beat` is of the attempt that runs now; `include` may name `partial` for its text;
    `params_json` stands in for a row that was written a moment ago and does not hold them."""
    path = f"/v1/tasks/{row.task_id}"
    fields: dict[str, Any] = {
        "task_id": row.task_id,
        "task_type": row.task_type,
        "user_id": row.user_id,
        "model_id": row.model_id,
        "status": row.status.value,
        "priority": row.priority.value,
        "progress": _progress(row, beat),
        "error_code": row.error_code,
        "error_message": row.error_message,
        "retry_count": row.retry_count,
        "max_retries": row.max_retries,
        "callback_url": row.callback_url,
        "callback_events": [event.value for event in row.callback_events],
        "metadata": orjson.Fragment(row.metadata_json),
        "not_before": time_text(row.not_before),
        "queue_timeout_seconds": row.queue_timeout_seconds,
        "timeout_seconds": row.timeout_seconds,
        "deadline_seconds": row.deadline_seconds,
        "rerun_of": row.rerun_of,
        "created_at": time_text(row.created_at),
        "queued_at": time_text(row.queued_at),
        "started_at": time_text(row.started_at),
        "completed_at": time_text(row.completed_at),
        "updated_at": time_text(row.updated_at),
        "version": row.version,
        "cancel_requested": row.cancel_requested,
        "next_attempt_at": time_text(row.next_attempt_at),
        "queue": queue,
        "usage": {
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
            "discarded_tokens": row.discarded_tokens,
        },
        "links": {
            "self": path,
            "events": path + "/events",
            "cancel": path + "/cancel",
            "callbacks": path + "/callbacks",
        },
    }
    if "params" in include:
        fields["params"] = _text(params_json or row.params_json)
    if "result" in include:
        fields["result"] = _text(row.result_json)
    if "attempts" in include:
        fields["attempts"] = _attempts(row.attempts_json)
    if "partial" in include:
        fields["partial_text"] = beat.text if beat is not None else None
    return fields


def etag(row: TaskRow, beat: Beat | None) -> str:
    """Of a task as it is read: its transition, what else changed, and the last beat."""
    live = f"-{beat.attempt}.{beat.seq}" if beat is not None else ""
    return f'"{row.version}-{row.change_seq}{live}"'


def matches(header: str | None, tag: str) -> bool:
    """Whether an `If-None-Match` names this tag (or any)."""
    if header is None:
        return False
    given = (part.strip().removeprefix("W/") for part in header.split(","))
    return any(part in (tag, "*") for part in given)


def _progress(row: TaskRow, beat: Beat | None) -> int:
    if row.status is Status.PROCESSING and beat is not None:
        return min(99, max(row.progress, beat.progress))
    return row.progress


def _text(json_text: str | None) -> Any:
    return _NULL if json_text is None else orjson.Fragment(json_text)


def _attempts(json_text: str | None) -> list[dict[str, Any]]:
    """Attempts with their times in our form; what pydantic wrote may leave out the fraction."""
    attempts: list[dict[str, Any]] = orjson.loads(json_text) if json_text else []
    for attempt in attempts:
        for name in ("started_at", "ended_at"):
            if attempt.get(name) is not None:
                attempt[name] = time_text(datetime.fromisoformat(attempt[name]))
    return attempts


def _default(value: object) -> object:
    if isinstance(value, datetime):
        return time_text(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
