"""`POST /codec/decode`: shows the Temporal UI what payloads hold, to who may see them.

The UI sends a page of payloads from the browser; set its codec endpoint to `<this API>/codec`. Its origin
(PERDURE_TEMPORAL_UI_URL) alone is allowed to. An admin key is needed, where keys are.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from pydantic import ConfigDict, Field
from starlette.responses import Response
from temporalio.api.common.v1 import Payloads

from api.accept import record
from api.deps import PrincipalDep, ResourcesDep
from api.problems import FieldError, Problem, invalid
from api.render import json_response
from api.replies import REFUSED_BODY
from api.schemas import Body
from api.strict_json import StrictRoute, public, requires
from perdure.codec import PayloadKeyError
from perdure.settings import ApiSettings

router = APIRouter(prefix="/codec", route_class=StrictRoute, tags=["operators"])
_MAX_BYTES: Final = 16 * 1024 * 1024


class CodecBody(Body):
    """Temporal's `Payloads` as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Payloads")

    payloads: list[dict[str, Any]] = Field(max_length=1000)


@router.post(
    "/decode",
    summary="Decode payloads for the Temporal UI",
    responses={200: {"model": CodecBody, "description": "The payloads as they were."}, **REFUSED_BODY},
)
@requires("admin", max_body=_MAX_BYTES)
async def decode(
    body: CodecBody, request: Request, principal: PrincipalDep, resources: ResourcesDep
) -> Response:
    """Decompresses and decrypts; what is neither comes back as it is."""
    try:
        given = ParseDict(body.model_dump(), Payloads())
    except (ParseError, ValueError):
        raise invalid([FieldError("/payloads", "payload", "not Temporal's payloads")]) from None
    try:
        plain = await resources.codec.decode(given.payloads)
    except PayloadKeyError as error:
        raise Problem(422, "payload-key-missing", f"{error}.") from None
    except ValueError:
        raise invalid([FieldError("/payloads", "payload", "a payload is broken")]) from None
    record("payloads decoded", principal, count=len(plain))
    shown = MessageToDict(Payloads(payloads=plain))
    return json_response(
        {"payloads": shown.get("payloads", [])},
        200,
        _cors(resources.settings, request) | {"Cache-Control": "no-store"},
    )


@router.options("/decode", include_in_schema=False)
@public
async def preflight(request: Request, resources: ResourcesDep) -> Response:
    """What the browser asks first."""
    headers = _cors(resources.settings, request)
    if headers:
        headers |= {
            "Access-Control-Allow-Methods": "POST",
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Namespace",
            "Access-Control-Max-Age": "600",
        }
    return Response(status_code=204, headers=headers)


def _cors(settings: ApiSettings, request: Request) -> dict[str, str]:
    """The headers that let the UI's pages read the reply; none for other origins."""
    origin = request.headers.get("origin")
    if origin is None or settings.temporal_ui_url is None or origin != _origin(settings.temporal_ui_url):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Credentials": "true",
        "Vary": "Origin",
    }


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
