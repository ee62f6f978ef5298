"""Callbacks as callers see them: deliveries and their tries, redelivery, receivers, secrets, a test event."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path
from pydantic import Field
from starlette.responses import Response

from api.accept import record
from api.callback_replies import (
    DeliveriesReply,
    DeliveryReply,
    IssuedReply,
    QueuedReply,
    ReceiversReply,
    ResumedReply,
    SecretsReply,
    TestReply,
)
from api.deps import PrincipalDep, Resources, ResourcesDep
from api.problems import FieldError, Problem, invalid, not_found, too_many
from api.render import PRIVATE, json_response, time_text
from api.replies import INVALID, NOT_FOUND, REFUSED_BODY, problem
from api.schemas import Body, CallbackUrl, Time
from api.strict_json import StrictRoute, requires
from api.tasks import TaskId
from perdure import names
from perdure.callback.desk import TooManyTests
from perdure.callback.guard import CallbackRejected, check_url
from perdure.callback.secrets import (
    MAX_ACTIVE,
    MAX_OVERLAP_HOURS,
    OVERLAP_HOURS,
    CallbackSecrets,
    SecretsFixed,
    SecretsUnavailable,
    TooManySecrets,
)
from perdure.store.rows import DeliveryRow, DeliveryState, Principal

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["callbacks"])
DeliveryId = Annotated[str, Path(description="`msg_` and 32 hex digits.", max_length=256)]
_NO_STORE: Final = {"Cache-Control": "no-store"}
_BATCH: Final = 10_000  # deliveries that one call makes due
_NO_SECRET: Final = problem("The operator set no key to keep secrets with.")


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


class TestBody(Body):
    url: CallbackUrl


class RotateBody(Body):
    overlap_hours: Annotated[float, Field(strict=True, ge=0, le=MAX_OVERLAP_HOURS)] = Field(
        OVERLAP_HOURS, description="How long the secret before stays valid. 0: it ends now."
    )


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


@router.post(
    "/callback-test",
    summary="Send a test event",
    responses={
        200: {"model": TestReply, "description": "How your receiver took it."},
        409: _NO_SECRET,
        **REFUSED_BODY,
    },
)
@requires("callbacks:write")
async def send_test(body: TestBody, principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """Sends one signed event `TEST` to a URL of yours, waits up to ten seconds and says how it went. Nothing
    is stored or tried again."""
    try:
        check_url(body.url, resources.guard)
    except CallbackRejected as error:
        raise _rejected(error.code, error.message) from None
    try:
        probe = await resources.desk.send_test(principal.user_id, body.url)
    except TooManyTests:
        raise too_many("too-many-tests", "Other test events are in flight; wait for them.", 10) from None
    except SecretsUnavailable as error:
        raise _no_secret(error) from None
    answer = probe.answer
    if answer.outcome == "blocked":  # the name leads where callbacks do not go
        code, _, message = (answer.error or "").partition(": ")
        raise _rejected(code, message)
    record("callback test sent", principal, delivery_id=probe.delivery_id, outcome=answer.outcome)
    fields = {
        "delivery_id": probe.delivery_id,
        "event": "TEST",
        "delivered": answer.verdict == "delivered",
        "status": answer.status,
        "duration_ms": answer.duration_ms,
        "error": answer.error,
        "address": answer.address,
        "sample": answer.sample,
    }
    return json_response(fields, 200, _NO_STORE)


@router.get(
    "/callback-secret",
    summary="Your callback secrets, without themselves",
    responses={200: {"model": SecretsReply, "description": "The current one first."}, 409: _NO_SECRET},
)
@requires("tasks:read")
async def secrets(principal: PrincipalDep, resources: ResourcesDep) -> Response:
    """`source` is `user` (yours), `operator` (one for all, set by the operator) or `unseen`: callbacks are
    signed, but nobody has been shown a secret yet; rotate to get one."""
    desk = _secrets(resources)
    now = datetime.now(UTC)
    data = [
        {
            "secret_id": one.secret_id,
            "created_at": time_text(one.created_at),
            "age_seconds": max(0, int((now - one.created_at).total_seconds())),
            "current": one.retires_at is None,
            "retires_at": time_text(one.retires_at),
        }
        for one in await desk.describe(principal.user_id)
    ]
    source: Literal["operator", "user", "unseen"] = "operator" if desk.fixed else "user" if data else "unseen"
    return json_response({"source": source, "data": data}, 200, _NO_STORE)


@router.post(
    "/callback-secret/rotate",
    summary="Make a new callback secret",
    responses={
        200: {"model": IssuedReply, "description": "Shown this once."},
        409: problem("The operator set one secret for all, or no key to keep secrets with."),
        **REFUSED_BODY,
    },
)
@requires("callbacks:write")
async def rotate(
    principal: PrincipalDep, resources: ResourcesDep, body: RotateBody | None = None
) -> Response:
    """The secret before stays valid for `overlap_hours` (24): `webhook-signature` carries both, and
    `X-Callback-Signature`, which holds one value, keeps the old one until then."""
    hours = body.overlap_hours if body else float(OVERLAP_HOURS)
    try:
        issued = await _secrets(resources).rotate(principal.user_id, hours)
    except SecretsFixed:
        raise Problem(
            409, "callback-secret-fixed", "The operator set one callback secret for all users; ask there."
        ) from None
    except TooManySecrets:
        raise Problem(
            409,
            "too-many-secrets",
            f"{MAX_ACTIVE} secrets are valid at once; wait until one retires, or give overlap_hours 0.",
        ) from None
    except SecretsUnavailable as error:
        raise _no_secret(error) from None
    record("callback secret rotated", principal, secret_id=issued.secret_id)
    fields = {
        "secret_id": issued.secret_id,
        "secret": issued.plain,
        "whsec": issued.whsec,
        "created_at": time_text(issued.created_at),
        "overlap_hours": int(hours) if hours.is_integer() else hours,
    }
    return json_response(fields, 200, _NO_STORE)


def _secrets(resources: Resources) -> CallbackSecrets:
    try:
        return resources.desk.secrets
    except SecretsUnavailable as error:
        raise _no_secret(error) from None


def _no_secret(error: SecretsUnavailable) -> Problem:
    return Problem(409, "callback-secret-unavailable", f"{error}.")


def _rejected(code: str, message: str) -> Problem:
    return invalid([FieldError("/url", code, message)], "callback-url-rejected")


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
