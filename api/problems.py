"""Every answer that is not a success: RFC 9457 `application/problem+json`, rendered in one place.

    Problem                  raised anywhere in `api`; knows its HTTP status, code and headers
    install(app)             handlers for Problem, Starlette's own errors, validation and store errors

A reply never echoes input: values may hold prompts, secrets or text that cannot be encoded. Codes are stable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from perdure.store.errors import StoreRefused, StoreUnavailable
from perdure.task.text import one_line

MEDIA_TYPE: Final = "application/problem+json"
_MAX_ERRORS: Final = 20  # a body with a thousand faults is told the first twenty
_STATUS_CODES: Final = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    413: "body-too-large",
    415: "unsupported-media-type",
    503: "unavailable",
}


class FieldError:
    """One refused value: `pointer` (RFC 6901, into the body) or `parameter` (query or path), and why."""

    __slots__ = ("code", "detail", "parameter", "pointer")

    def __init__(self, pointer: str | None, code: str, detail: str, *, parameter: str | None = None) -> None:
        self.pointer = pointer
        self.parameter = parameter
        self.code = code
        self.detail = detail

    def as_json(self) -> dict[str, str]:
        where = {"parameter": self.parameter} if self.parameter else {"pointer": self.pointer or ""}
        return {**where, "code": self.code, "detail": self.detail}


class Problem(Exception):  # noqa: N818 - the word of RFC 9457
    """A refusal with its HTTP status.

    `code` is stable and for programs; `detail` is for people and says the next step; `headers` go out with
    it (`Retry-After`, `Allow`, `WWW-Authenticate`); `errors` name refused values; `extra` adds members.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[FieldError] = (),
        **extra: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = dict(headers or {})
        self.errors = list(errors)[:_MAX_ERRORS]
        self.extra = extra

    def as_json(self, request_id: str | None = None) -> dict[str, Any]:
        """The members of the problem document."""
        body: dict[str, Any] = {
            "type": f"urn:perdure:problem:{self.code}",
            "title": self.code.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            **self.extra,
        }
        if request_id:
            body["request_id"] = request_id
        if self.errors:
            body["errors"] = [error.as_json() for error in self.errors]
        return body


def not_found() -> Problem:
    """The one answer for a task that is malformed, unknown or another user's: they cannot be told apart."""
    return Problem(404, "task-not-found", "There is no such task.")


def invalid(errors: Sequence[FieldError], code: str = "validation-failed") -> Problem:
    """422 naming the refused values."""
    first = errors[0]
    where = first.parameter or first.pointer or "the body"
    return Problem(422, code, f"{where}: {first.detail}", errors=errors)


def too_many(code: str, detail: str, retry_after: float, **extra: Any) -> Problem:
    """429 with the seconds to wait, rounded up."""
    wait = str(max(1, int(-(-retry_after // 1))))
    return Problem(429, code, detail, headers={"Retry-After": wait}, **extra)


def unavailable() -> Problem:
    """503 while Postgres cannot be reached: nothing was written, the caller may try again."""
    return Problem(
        503,
        "store-unavailable",
        "The database cannot be reached; nothing was changed. Try again.",
        headers={"Retry-After": "2"},
    )


def pointer_of(parts: Iterable[object]) -> str:
    """A JSON pointer from path parts. Parts are keys that a caller chose: cut, one line."""
    escaped = (one_line(str(part), 100).replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join("/" + part for part in escaped)


def problem_of(error: Exception) -> Problem:
    """The problem that an exception stands for; 500 `internal` for any that has none."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return invalid([_field_error(item) for item in error.errors()])
    if isinstance(error, StoreUnavailable):
        return unavailable()
    if isinstance(error, StoreRefused):
        return Problem(422, "value-refused", "The database cannot hold a value of this request.")
    if isinstance(error, HTTPException):
        code = _STATUS_CODES.get(error.status_code, "http-error")
        detail = HTTPStatus(error.status_code).phrase + "."
        return Problem(error.status_code, code, detail, headers=error.headers)
    return Problem(500, "internal", "Something went wrong on our side. The request id finds it in the log.")


def from_pydantic(error: ValidationError) -> Problem:
    """422 for a part of a body that was validated by itself; pointers start at that part."""
    return invalid(
        [_field_error({**item, "loc": ("body", *item["loc"])}) for item in error.errors(include_input=False)]
    )


def _field_error(item: Mapping[str, Any]) -> FieldError:
    """Pydantic's error without its input and context."""
    place, *parts = item["loc"]
    code = str(item["type"]).replace("_", "-")
    detail = one_line(str(item["msg"]).removeprefix("Value error, "), 300)
    if place == "body":
        return FieldError(pointer_of(parts), code, detail)
    name = one_line(".".join(map(str, parts)), 100)
    return FieldError(None, code, detail, parameter=name or str(place))


def render(problem: Problem, request_id: str | None) -> Response:
    """The response of a problem."""
    headers = {"Cache-Control": "no-store", **problem.headers}
    return Response(
        orjson.dumps(problem.as_json(request_id)), problem.status, headers=headers, media_type=MEDIA_TYPE
    )


def request_id_of(request: Request) -> str | None:
    """The id that the edge middleware gave this request."""
    return getattr(request.state, "request_id", None)


def install(app: FastAPI, methods: Callable[[str], Iterable[str]]) -> None:
    """One handler for everything that is expected; what is not is answered by the edge middleware.

    `methods` tells those of a path, for the `Allow` of a 405: Starlette names the first route's only.
    """

    async def handle(request: Request, error: Exception) -> Response:
        problem = problem_of(error)
        if problem.status == 405:
            problem.headers["Allow"] = ", ".join(sorted(methods(request.url.path)))
        return render(problem, request_id_of(request))

    for kind in (Problem, HTTPException, RequestValidationError, StoreUnavailable, StoreRefused):
        app.add_exception_handler(kind, handle)
