"""Why a task or an attempt failed: stable codes, each retryable or not, in one table.

TaskFault                what an executor raises; crosses Temporal as an ApplicationError of type `code`
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ErrorCode(StrEnum):
    """Stable strings: rows, replies, callbacks, metrics and histories hold them."""

    CONNECT_TIMEOUT = "connect_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105 - a code, no credential
    TOKEN_TIMEOUT = "token_timeout"  # noqa: S105 - a code, no credential
    ATTEMPT_TIMEOUT = "attempt_timeout"
    UPSTREAM_UNAVAILABLE = "upstream_unavailable"
    UPSTREAM_AUTH = "upstream_auth"
    RATE_LIMITED = "rate_limited"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    CONTENT_FILTERED = "content_filtered"
    OUTPUT_TOO_LARGE = "output_too_large"
    STREAM_TRUNCATED = "stream_truncated"
    WORKER_LOST = "worker_lost"
    QUEUE_EXPIRED = "queue_expired"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    MODEL_UNKNOWN = "model_unknown"
    TERMINATED = "terminated"
    INTERNAL = "internal"


RETRYABLE: Final[dict[ErrorCode, bool]] = {
    ErrorCode.CONNECT_TIMEOUT: True,
    ErrorCode.FIRST_TOKEN_TIMEOUT: True,
    ErrorCode.TOKEN_TIMEOUT: True,
    ErrorCode.ATTEMPT_TIMEOUT: True,
    ErrorCode.UPSTREAM_UNAVAILABLE: True,
    ErrorCode.UPSTREAM_AUTH: False,
    ErrorCode.RATE_LIMITED: True,
    ErrorCode.INVALID_REQUEST: False,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: False,
    ErrorCode.CONTENT_FILTERED: False,
    ErrorCode.OUTPUT_TOO_LARGE: False,
    ErrorCode.STREAM_TRUNCATED: True,
    ErrorCode.WORKER_LOST: True,
    ErrorCode.QUEUE_EXPIRED: False,
    ErrorCode.DEADLINE_EXCEEDED: False,
    ErrorCode.MODEL_UNKNOWN: False,
    ErrorCode.TERMINATED: False,
    ErrorCode.INTERNAL: True,
}


class TaskFault(Exception):  # noqa: N818 - a fault is the field's word; it is no bug of ours
    """An attempt ended without an outcome.

    `code` names it; `message` is for the user: bounded, clean of secrets, prompts and control characters,
    and says the next step; `retry_after` is the least wait the other side asked for, in seconds;
    `refused` means that the model server refused before any output (connection refused, 502, 503, 504, 529),
    which `unavailable_patience` covers; `retryable` overrides the table for the one fault.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        retry_after: float | None = None,
        refused: bool = False,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.refused = refused
        self.retryable = RETRYABLE[code] if retryable is None else retryable

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.code, self.message, self.retry_after, self.refused, self.retryable))


def _rebuild(
    code: ErrorCode, message: str, retry_after: float | None, refused: bool, retryable: bool
) -> TaskFault:
    return TaskFault(code, message, retry_after=retry_after, refused=refused, retryable=retryable)
