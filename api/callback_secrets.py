"""Callback secrets of the caller, and a test event signed with them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from fastapi import APIRouter
from pydantic import AliasChoices, Field
from starlette.responses import Response

from api.accept import record
from api.callback_replies import IssuedReply, SecretsReply, TestReply
from api.deps import PrincipalDep, Resources, ResourcesDep
from api.problems import FieldError, Problem, invalid, too_many
from api.render import json_response, time_text
from api.replies import REFUSED_BODY, problem
from api.schemas import Body, CallbackUrl
from api.strict_json import StrictRoute, requires
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

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["callbacks"])
_NO_STORE: Final = {"Cache-Control": "no-store"}
_NO_SECRET: Final = problem("The operator set no key to keep secrets with.")


class TestBody(Body):
    """`callback_url`, as a submit spells it, is taken as well."""

    url: CallbackUrl = Field(validation_alias=AliasChoices("url", "callback_url"))


class RotateBody(Body):
    overlap_hours: Annotated[float, Field(strict=True, ge=0, le=MAX_OVERLAP_HOURS)] = Field(
        OVERLAP_HOURS, description="How long the secret before stays valid. 0: it ends now."
    )


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
