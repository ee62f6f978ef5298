"""The OpenAPI document: FastAPI's own, with what holds for every call filled in.

Adds the security schemes, the refusals that any call can give, and the problem schema; takes away FastAPI's
default shape of a 422, which is not ours.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from api import examples
from api.params import ChatParams, SimulatedParams
from api.replies import ProblemReply, problem
from api.schemas import SubmitBody
from api.strict_json import marks_of, routes_of

_INTRODUCTION: Final = """
Perdure runs long LLM inference as durable tasks: submit and have an id at once, watch, cancel, prioritise;
the outcome is stored and delivered by a signed callback.

**Keys.** `Authorization: Bearer sk_…` (or `X-API-Key`). A key belongs to a user; what the user does not own
does not exist for them. A key with `act-as` may name a user in `Perdure-User`, or in a submit's `user_id`.

**JSON.** UTF-8, no duplicate keys, no NaN, integers within 64 bits, no U+0000, no lone surrogates, at most 64
levels, at most 1 MiB (bulk: 16 MiB). Unknown fields are refused.

**Errors.** `application/problem+json` (RFC 9457) with a stable `code` and the `request_id`.

**Params.** For chat models OpenAI's `messages`, `max_tokens`, `temperature`, `top_p`, `stop`, `seed`,
`response_format`, `tools`, `tool_choice` and what else the model server knows (schema `ChatParams`). The
`simulated` executor also takes `tokens` and `tokens_per_second`, and needs no `messages`. A `python`
executor's params are its own.

**Times** are UTC ISO 8601 with six fractional digits and `Z`; durations are seconds.
"""
_TAGS: Final = [
    {"name": "tasks", "description": "Submit, read, list, steer."},
    {"name": "events", "description": "Watch tasks by server-sent events."},
    {"name": "callbacks", "description": "Deliveries of outcomes, their secrets, and redelivery."},
    {"name": "queues", "description": "Models, pools, what waits and runs; pausing."},
    {"name": "usage", "description": "Tokens and seconds by user, model and day."},
    {"name": "health", "description": "For probes and scrapers."},
    {"name": "operators", "description": "For the Temporal UI."},
]
_SECURITY: Final[list[dict[str, list[str]]]] = [{"bearer": []}, {"apiKey": []}]
_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer sk_…`"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "streamToken": {"type": "apiKey", "in": "query", "name": "token", "description": "For a minute."},
}


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": {"type": "string", **schema},
    }


_KEY: Final = _header(
    "Idempotency-Key", "Makes the call safe to repeat.", pattern="^[!-~]+$", minLength=1, maxLength=255
)
_PREFER: Final = _header("Prefer", "`wait=N`: answer at the end, or after N seconds (60 at most).")
_MATCH: Final = _header("If-None-Match", "An `ETag`: 304 while nothing changed.")
_LAST: Final = _header("Last-Event-ID", "The last event that was read: go on after it.")
_HEADERS: Final = {  # request headers by the endpoint's name; endpoints read them themselves
    "submit": (_KEY, _PREFER),
    "rerun": (_KEY, _PREFER),
    "bulk": (_KEY,),
    "read": (_PREFER, _MATCH),
    "task_events": (_LAST,),
    "all_events": (_LAST,),
}
_NAMES: Final = {"TaskReply": "Task", "ProblemReply": "Problem", "SubmitBody": "Submit"}
_REF: Final = "#/components/schemas/{model}"


def install(app: FastAPI) -> None:
    """Makes `/openapi.json` serve the whole document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="Perdure",
        version=version("perdure"),
        summary="Durable, long-running LLM inference tasks.",
        description=_INTRODUCTION.strip(),
        routes=app.routes,
        tags=_TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    components = document.setdefault("components", {})
    components["securitySchemes"] = dict(_SCHEMES)
    schemas = components.setdefault("schemas", {})
    _, extra = models_json_schema(
        [(model, "validation") for model in (ProblemReply, SubmitBody, ChatParams, SimulatedParams)],
        ref_template=_REF,
    )
    for name, schema in extra["$defs"].items():
        schemas.setdefault(name, schema)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for route in routes_of(app):
        if not route.include_in_schema:
            continue
        for method in route.methods or ():
            _complete(document["paths"][route.path_format][method.lower()], route)
    return _renamed(document)


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the schemas that users meet under plain names."""
    schemas = document["components"]["schemas"]
    text = orjson.dumps(document).decode()
    for old, new in _NAMES.items():
        text = text.replace(f'"#/components/schemas/{old}"', f'"#/components/schemas/{new}"')
    renamed: dict[str, Any] = orjson.loads(text)
    kept = renamed["components"]["schemas"]
    renamed["components"]["schemas"] = {_NAMES.get(name, name): kept[name] for name in sorted(schemas)}
    for name, example in (("Task", examples.TASK), ("Problem", examples.PROBLEM)):
        renamed["components"]["schemas"][name]["examples"] = [example]  # here: FastAPI drops nulls before
    return renamed


def _complete(operation: dict[str, Any], route: APIRoute) -> None:
    """Adds to one operation what holds for all."""
    scope, _ = marks_of(route.endpoint)
    headers = _HEADERS.get(route.name, ())
    if headers:
        operation["parameters"] = [*operation.get("parameters", []), *headers]
    responses = operation["responses"]
    if "422" not in route.responses and 422 not in route.responses:
        responses.pop("422", None)
    if scope is not None:
        operation["security"] = _SECURITY
        operation["description"] = f"{operation.get('description', '')}\n\nScope: `{scope}`.".strip()
        responses.setdefault("401", problem("No valid key."))
        responses.setdefault("403", problem("The key lacks a scope, or may not act for the user."))
        responses.setdefault("422", problem("A value is refused; `errors` names it."))
    elif route.path_format.startswith("/v1"):
        operation["security"] = [*_SECURITY, {"streamToken": []}]
        responses.setdefault("403", problem("The key lacks a scope, or may not act for the user."))
    if operation.get("security"):
        responses.setdefault("503", problem("The database cannot be reached; try again.", retry=True))
    if "{" in route.path_format:
        responses.setdefault("404", problem("No such thing, as far as this key can see."))
    responses.setdefault("500", problem("A fault of ours; the request id finds it in the log."))
