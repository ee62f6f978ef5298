"""Callbacks as callers see them: deliveries and their tries, redelivery, receivers that fail."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Path
from pydantic import Field
from starlette.responses import Response

from api.accept import record
from api.callback_replies import (
    DeliveriesReply,
    DeliveryReply,
    QueuedReply,
    ReceiversReply,
    ResumedReply,
)
from api.deps import PrincipalDep, ResourcesDep
from api.problems import Problem, not_found
from api.render import PRIVATE, json_response, time_text
from api.replies import INVALID, NOT_FOUND, REFUSED_BODY, problem
from api.schemas import Body, Time
from api.strict_json import StrictRoute, requires
from api.tasks import TaskId
from perdure import names
from perdure.store.rows import DeliveryRow, DeliveryState, Principal

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["callbacks"])
DeliveryId = Annotated[str, Path(description="`msg_` and 32 hex digits.", max_length=256)]
_BATCH: Final = 10_000  # deliveries that one call makes due


class RedeliverBody(Body):
    """Which deliveries: those created since a time, in one state."""

    since: Time
    until: Time | None = Field(None, description="Created before this.")
    state: DeliveryState = Field("DEAD", description="The state they are in now.")
    origin: Annotated[str, Field(strict=True, max_length=2048)] | None = Field(
        None, description="Of one receiver only, as `GET /v1/callback-receivers` names it."
    )


class ResumeBody(Body):
    origin: Annotated[str, Field(strict=True, max_length=2048, examples=["https://receiver.example"])]


@router.get(
    "/tasks/{task_id}/callbacks",
    summary="A task's callbacks and every try",
    responses={200: {"model": DeliveriesReply, "description": "At most one delivery."}, 404: NOT_FOUND},
)
@requires("tasks:read")
async def deliveries(task_id: TaskId, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Empty until the task is final, and when its outcome calls nobody back."""
    rows = None
    if names.is_task_id(task_id):
        rows = await resources.store.deliveries.list_for_task(principal, task_id)
    if rows is None:
        raise not_found()
    return json_response({"data": [_delivery(row, principal) for row in rows]}, 200, PRIVATE)


@router.post(
    "/tasks/{task_id}/callbacks/{delivery_id}/redeliver",
    status_code=202,
    summary="Send a callback again",
    responses={
        202: {"model": DeliveryReply, "description": "It is due now."},
        404: NOT_FOUND,
        409: problem("A try is in flight; ask again when it ended.", retry=True),
        422: INVALID,
    },
)
@requires("callbacks:write")
async def redeliver(
    task_id: TaskId, delivery_id: DeliveryId, principal: PrincipalDep, resources: ResourcesDep
) -> Response:
    """In any state: the same id and the same bytes, signed anew, within about five seconds. Asked twice
    before it is sent, it is sent once."""
    kind, row = "unknown", None
    if names.is_task_id(task_id) and names.is_delivery_id(delivery_id):
        kind, row = await resources.store.deliveries.redeliver(principal, task_id, delivery_id)
    if row is None:
        raise not_found()
    if kind == "in_flight":
        raise Problem(
            409,
            "delivery-in-flight",
            "A try of this delivery is in flight. Read its outcome, then ask again if you still want to.",
            headers={"Retry-After": "5"},
        )
    record("callback redelivered", principal, task_id, delivery_id=delivery_id)
    return json_response(_delivery(row, principal), 202, PRIVATE)


@router.post(
    "/callbacks/redeliver",
    status_code=202,
    summary="Send many callbacks again",
    responses={202: {"model": QueuedReply, "description": "How many are due now."}, **REFUSED_BODY},
)
@requires("callbacks:write")
async def redeliver_since(body: RedeliverBody, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Yours, created since a time and in one state (DEAD where not given), up to 10,000 a call. An admin key
    reaches everybody's."""
    queued = await resources.store.deliveries.redeliver_since(
        principal, body.since, body.state, body.until, body.origin, _BATCH
    )
    record("callbacks redelivered", principal, state=body.state, queued=queued)
    return json_response({"queued": queued, "has_more": queued == _BATCH}, 202, PRIVATE)


@router.get(
    "/callback-receivers",
    summary="Receivers that fail or are suspended",
    responses={200: {"model": ReceiversReply, "description": "Those that answer well are not listed."}},
)
@requires("tasks:read")
async def receivers(principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """A receiver is a scheme, host and port. One that let five deliveries die and took none for five days is
    suspended: its deliveries are kept, and sent when it is resumed."""
    rows = await resources.store.deliveries.suspended(principal)
    data = [
        {
            "origin": row.origin,
            "user_id": row.user_id,
            "failing_since": time_text(row.failing_since),
            "suspended_at": time_text(row.suspended_at),
            "reason": row.reason,
            "dead": row.dead,
            "waiting": row.waiting,
        }
        for row in rows
    ]
    return json_response({"data": data}, 200, PRIVATE)


@router.post(
    "/callback-receivers/resume",
    status_code=202,
    summary="Resume a suspended receiver",
    responses={
        202: {"model": ResumedReply, "description": "What was kept is due now."},
        404: problem("None of your receivers of that name is suspended."),
        **REFUSED_BODY,
    },
)
@requires("callbacks:write")
async def resume(body: ResumeBody, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Ends the suspension; every delivery that was kept is sent."""
    queued = await resources.store.deliveries.resume(principal, body.origin)
    if queued is None:
        raise Problem(404, "receiver-not-suspended", "There is no suspended receiver of that name.")
    record("callback receiver resumed", principal, receiver=body.origin, queued=queued)
    return json_response({"origin": body.origin, "queued": queued}, 202, PRIVATE)


def _delivery(row: DeliveryRow, principal: Principal) -> dict[str, Any]:
    """A delivery object. Only its owner sees the URL's query: it may hold a credential."""
    own = row.user_id == principal.user_id
    return {
        "delivery_id": row.delivery_id,
        "event": row.event,
        "url": row.url if own else row.url.partition("?")[0],
        "state": row.state,
        "tries": [
            {
                "number": one.number,
                "at": time_text(one.at),
                "status": one.status,
                "duration_ms": one.duration_ms,
                "error": one.error,
                "address": one.address,
                "sample": one.sample,
            }
            for one in row.tries
        ],
        "next_try_at": time_text(row.next_try_at),
        "created_at": time_text(row.created_at),
    }
