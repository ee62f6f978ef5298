"""The body of a callback: one pure function, for every writer of an outcome.

    body = build_body(task_id=…, status=…, result=…, error_code=…, error_message=…, at=…)

The bytes are stored with the outcome and sent as they are on every try: what is signed is what is sent.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Final

from perdure.task.errors import ErrorCode
from perdure.task.states import Status
from perdure.task.text import clean, clean_json

MAX_BODY_BYTES: Final = 256 * 1024  # above that the result is left out and fetched by `url`
MAX_MESSAGE_CHARS: Final = 4000
TEST_EVENT: Final = "TEST"
TEST_TASK_ID: Final = "task_" + "0" * 32


def build_body(
    *,
    task_id: str,
    status: Status,
    result: dict[str, Any] | None,
    error_code: str | None,
    error_message: str | None,
    at: datetime,
) -> bytes:
    """The JSON body of a final state: `task_id, event, status, result, error, timestamp`, in that order.

    `at` is the time of the outcome (aware); `timestamp` is its milliseconds since 1970. `error` is
    {code, message} of a FAILED task, else null. `result` of a cancelled task is its partial result.
    A body above MAX_BODY_BYTES carries {"omitted": true, "bytes": n, "url": …} instead, n being the size of
    the encoded result. Text that UTF-8 cannot hold is replaced, non-finite numbers become null.
    Raises ValueError for a state that is not final and for a time without a zone.
    """
    if not status.final:
        raise ValueError(f"no callback for {status}: it is not final")
    if at.tzinfo is None:
        raise ValueError("the time of an outcome needs a zone")
    error = None
    if status is Status.FAILED:
        code = error_code or ErrorCode.INTERNAL.value
        error = {"code": str(code), "message": clean(error_message or "")[:MAX_MESSAGE_CHARS]}
    timestamp = round(at.timestamp() * 1000)
    body = _encode(_fields(task_id, status.value, status.value, clean_json(result), error, timestamp))
    if len(body) <= MAX_BODY_BYTES:
        return body
    omitted = {"omitted": True, "bytes": len(_encode(clean_json(result))), "url": f"/v1/tasks/{task_id}"}
    return _encode(_fields(task_id, status.value, status.value, omitted, error, timestamp))


def build_test_body(at: datetime) -> bytes:
    """The body of a test event: the same six fields, `event` TEST and a task id that no task has."""
    result = {"text": "This is a test event. Verify its signature and answer with any 2xx."}
    timestamp = round(at.timestamp() * 1000)
    return _encode(_fields(TEST_TASK_ID, TEST_EVENT, Status.COMPLETED.value, result, None, timestamp))


def _fields(
    task_id: str, event: str, status: str, result: object, error: dict[str, str] | None, timestamp: int
) -> dict[str, object]:
    return {
        "task_id": task_id,
        "event": event,
        "status": status,
        "result": result,
        "error": error,
        "timestamp": timestamp,
    }


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
