"""Whether the process lives, and whether it should be sent requests; the metrics page.

`/healthz` looks at nothing outside the process, so an outage elsewhere restarts nothing. `/readyz` is 200
when Postgres answers, its schema is current and the process is not stopping; Temporal's and the models' state
are in its body and never make it 503, since submits are kept without either.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from api.deps import ResourcesDep
from api.render import json_response
from api.replies import HealthReply, ReadyReply
from api.strict_json import StrictRoute, public
from perdure.observability.page import CONTENT_TYPE

router = APIRouter(route_class=StrictRoute, tags=["health"])
_NO_STORE: Final = {"Cache-Control": "no-store"}


@router.get(
    "/healthz",
    summary="The process lives",
    responses={200: {"model": HealthReply, "description": "It answers."}},
)
@public
async def healthz() -> Response:
    """Asks nobody."""
    return json_response({"status": "ok"}, 200, _NO_STORE)


@router.get(
    "/readyz",
    summary="The process takes requests",
    responses={
        200: {"model": ReadyReply, "description": "Postgres answers and its schema is current."},
        503: {"model": ReadyReply, "description": "Send requests elsewhere."},
    },
)
@public
async def readyz(resources: ResourcesDep) -> Response:
    """Says in words what is missing."""
    found = await resources.readiness.look()
    stopping = resources.drain.is_set()
    ready = found["postgres"] == "ok" and found["schema"] == "ok" and not stopping
    body = {"status": "ready" if ready else "not ready", **found, "stopping": stopping}
    return json_response(body, 200 if ready else 503, _NO_STORE)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    responses={
        200: {"description": "Text format 0.0.4.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
)
@public
async def metrics(resources: ResourcesDep) -> Response:
    """Counters of this process; gauges of tasks and queues from the rows."""
    return Response(await resources.exposition.render(), media_type=CONTENT_TYPE, headers=_NO_STORE)
