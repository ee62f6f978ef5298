"""The route class of every call: first who asks, then the body, read strictly and within bounds.

    router = APIRouter(prefix="/v1", route_class=StrictRoute)

    @router.post("/tasks")
    @requires("tasks:write")                      # or @public: the endpoint settles it itself
    async def submit(body: SubmitBody, principal: PrincipalDep) -> Response: ...

Order of refusals: 401, 403, 429, 415, 413, 400, 422. The limit counts the bytes that arrive, whatever
Content-Length says. A route without `requires` or `public` does not start: identity is denied by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api.auth import authenticate
from api.json_reader import read_json
from api.problems import FieldError, Problem, invalid
from perdure.task.text import one_line

MAX_BODY: Final = 1024 * 1024
_THREAD_FROM: Final = 256 * 1024  # larger bodies are parsed beside the event loop
_LISTS: Final = frozenset({"status", "include"})  # query parameters that may be repeated
_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def requires(scope: str, *, max_body: int = MAX_BODY) -> Callable[[_Endpoint], _Endpoint]:
    """Marks an endpoint: the caller's key must hold this scope; the body may have `max_body` bytes."""

    def mark(endpoint: _Endpoint) -> _Endpoint:
        endpoint.__dict__["needs_scope"] = scope
        endpoint.__dict__["max_body"] = max_body
        return endpoint

    return mark


def public(endpoint: _Endpoint) -> _Endpoint:
    """Marks an endpoint that needs no key, or that settles identity itself (stream tokens)."""
    endpoint.__dict__["needs_scope"] = None
    endpoint.__dict__["max_body"] = MAX_BODY
    return endpoint


def marks_of(endpoint: Callable[..., Any]) -> tuple[str | None, int]:
    """(scope, body limit) of an endpoint; scope None: it is public. Raises TypeError when it has no mark."""
    marks = getattr(endpoint, "__dict__", {})
    if "needs_scope" not in marks:
        raise TypeError(f"{endpoint}: an endpoint needs @requires(scope) or @public")
    return marks["needs_scope"], marks["max_body"]


class _StrictRequest(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._body = body
        self._value = value

    async def json(self) -> Any:
        return self._value


class StrictRoute(APIRoute):
    """See the module's text."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        scope, limit = marks_of(self.endpoint)
        reads_body = self.body_field is not None
        body_needed = reads_body and self.body_field.field_info.is_required()  # type: ignore[union-attr]
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if scope is not None:
                principal = await authenticate(request, scope)
                if reads_body:
                    request.app.state.resources.limits.take_body(principal)
            if request.scope["query_string"]:
                _check_query(request)
            if not reads_body:
                return await inner(request)
            body = await _read_body(request, limit)
            if not body and body_needed:
                raise Problem(400, "malformed-json", "The body is empty; a JSON object is needed.")
            value = None
            if body:  # here, not in `json`: FastAPI would bury what that raises
                value = (
                    await asyncio.to_thread(read_json, body) if len(body) > _THREAD_FROM else read_json(body)
                )
            return await inner(_StrictRequest(request, body, value))

        return handle


def _check_query(request: Request) -> None:
    """Refuses a parameter that is given twice: two readers would take it for two things."""
    seen = set()
    for name, _ in request.query_params.multi_items():
        if name in seen and name not in _LISTS:
            shown = one_line(name, 100)
            raise invalid([FieldError(None, "repeated", "the parameter stands twice", parameter=shown)])
        seen.add(name)


def routes_of(app: FastAPI) -> list[StrictRoute]:
    """Every route of the app that callers may use, those of included routers too."""
    found = (context.original_route for context in iter_route_contexts(app.routes))
    return [route for route in found if isinstance(route, StrictRoute)]


async def _read_body(request: Request, limit: int) -> bytes:
    """The body's bytes. Raises Problem 413 and 415."""
    headers = request.headers
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise Problem(415, "unsupported-encoding", "Send the body without Content-Encoding.")
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and len(length) <= 15 and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise Problem(400, "body-incomplete", "The connection closed before the body's end.") from None
    if size and not _is_json(headers.get("content-type", "")):
        raise Problem(415, "unsupported-media-type", "Send Content-Type: application/json.")
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> Problem:
    return Problem(413, "body-too-large", f"The body is larger than {limit} bytes.", limit=limit)


def _is_json(content_type: str) -> bool:
    """Whether a Content-Type names JSON in UTF-8."""
    kind, _, rest = content_type.partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        return False
    for part in rest.lower().split(";"):
        name, _, value = part.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            return False
    return True
