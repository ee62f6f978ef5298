"""Examples of replies in the OpenAPI document. A test holds them to live replies."""

from __future__ import annotations

from typing import Any, Final

_ID: Final = "task_019adb3c5e7b7c31a5f0c2d9e4b61a77"
TASK: Final[dict[str, Any]] = {
    "task_id": _ID,
    "task_type": "chat",
    "user_id": "alice",
    "model_id": "smollm2-135m",
    "status": "COMPLETED",
    "priority": "NORMAL",
    "progress": 100,
    "error_code": None,
    "error_message": None,
    "retry_count": 0,
    "max_retries": 3,
    "callback_url": None,
    "callback_events": ["COMPLETED", "FAILED", "CANCELLED"],
    "metadata": {"order": "4711"},
    "not_before": None,
    "queue_timeout_seconds": None,
    "timeout_seconds": 1800.0,
    "deadline_seconds": 3600.0,
    "rerun_of": None,
    "created_at": "2026-12-01T14:00:00.123456Z",
    "queued_at": "2026-12-01T14:00:00.131202Z",
    "started_at": "2026-12-01T14:00:00.160118Z",
    "completed_at": "2026-12-01T14:00:02.481003Z",
    "updated_at": "2026-12-01T14:00:02.489550Z",
    "version": 3,
    "cancel_requested": False,
    "next_attempt_at": None,
    "queue": None,
    "usage": {"prompt_tokens": 39, "completion_tokens": 74, "discarded_tokens": 0},
    "links": {
        "self": f"/v1/tasks/{_ID}",
        "events": f"/v1/tasks/{_ID}/events",
        "cancel": f"/v1/tasks/{_ID}/cancel",
        "callbacks": f"/v1/tasks/{_ID}/callbacks",
    },
    "params": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 80},
    "result": {"text": "Air scatters blue light most.", "finish_reason": "stop", "resumed": False},
    "attempts": [
        {
            "number": 1,
            "worker": "gpu:local@host:4711",
            "started_at": "2026-12-01T14:00:00.160118Z",
            "ended_at": "2026-12-01T14:00:02.470331Z",
            "outcome": "completed",
            "error_code": None,
            "error_message": None,
            "output_tokens": 74,
            "resumed_from_tokens": 0,
        }
    ],
}
PROBLEM: Final[dict[str, Any]] = {
    "type": "urn:perdure:problem:model-unknown",
    "title": "Model unknown",
    "status": 422,
    "detail": "/model_id: there is no such model; see GET /v1/models",
    "code": "model-unknown",
    "request_id": "019adb3c5e7b7c31a5f0c2d9e4b61a78",
    "errors": [
        {
            "pointer": "/model_id",
            "code": "model-unknown",
            "detail": "there is no such model; see GET /v1/models",
        }
    ],
}
