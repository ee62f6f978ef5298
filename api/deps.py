"""What endpoints may ask for: the resources that the lifespan built, and who asks.

    async def submit(principal: PrincipalDep, resources: ResourcesDep) -> Response: ...

A route is marked with `api.strict_json.requires(scope)` or `public`; the principal is settled before its body
is read, and `PrincipalDep` only hands it on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from temporalio.converter import PayloadCodec

from api.auth import Authenticator
from api.intake import Intake
from api.limits import Limits
from api.pressure import Pressure
from api.readiness import Readiness
from api.signals import Signals
from perdure.callback.desk import CallbackDesk
from perdure.callback.guard import GuardPolicy
from perdure.dispatcher import Dispatcher
from perdure.live.feed import Feeds
from perdure.live.hub import Hub
from perdure.live.queue import Queues
from perdure.live.token import StreamTokens
from perdure.models import Catalogue
from perdure.observability.metrics import Metrics
from perdure.observability.page import Exposition
from perdure.settings import ApiSettings
from perdure.store.engine import Store
from perdure.store.rows import Principal
from perdure.temporal import TemporalGate


@dataclass
class Resources:
    """Everything one API process holds. Built by the lifespan, found at `app.state.resources`."""

    settings: ApiSettings
    catalogue: Catalogue
    store: Store
    gate: TemporalGate
    dispatcher: Dispatcher
    hub: Hub
    queues: Queues
    feeds: Feeds
    stream_tokens: StreamTokens
    signals: Signals
    metrics: Metrics
    exposition: Exposition
    readiness: Readiness
    authenticator: Authenticator
    limits: Limits
    pressure: Pressure
    intake: Intake
    guard: GuardPolicy
    desk: CallbackDesk
    codec: PayloadCodec
    secret_key: bytes | None = None  # PERDURE_SECRET_KEY, decoded
    drain: asyncio.Event = field(default_factory=asyncio.Event)  # set when the process stops


def resources_of(request: Request) -> Resources:
    """The process's resources."""
    found: Resources = request.app.state.resources
    return found


def principal_of(request: Request) -> Principal:
    """Who asks, as the route settled it before the body was read."""
    found: Principal = request.state.principal
    return found


async def _resources(request: Request) -> Resources:
    return resources_of(request)


async def _principal(request: Request) -> Principal:
    return principal_of(request)


ResourcesDep = Annotated[Resources, Depends(_resources)]
PrincipalDep = Annotated[Principal, Depends(_principal)]
