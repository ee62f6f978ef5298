"""Composition root of the API: builds every resource, hands it down, closes it in reverse.

    app = create_app(settings)         raises CatalogueError, UnsafeAuth, ValueError naming the setting

The API starts and serves while Temporal is down: its client connects at the first call.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from temporalio.client import Client
from temporalio.converter import PayloadCodec

from api import (
    admin,
    callback_secrets,
    callbacks,
    codec,
    events,
    health,
    openapi,
    problems,
    steer,
    submit,
    tasks,
)
from api.auth import Authenticator, check_host
from api.deps import Resources
from api.intake import Intake
from api.limits import Limits
from api.middleware import Edge, parse_networks
from api.pressure import Pressure
from api.readiness import Readiness
from api.signals import Signals
from api.strict_json import StrictRoute, routes_of
from perdure.callback.desk import CallbackDesk
from perdure.callback.guard import GuardPolicy
from perdure.dispatcher import Dispatcher
from perdure.engine_check import say_what_order_lacks
from perdure.live.feed import Feeds
from perdure.live.hub import Hub
from perdure.live.queue import Queues
from perdure.live.token import StreamTokens
from perdure.models import Catalogue, load_catalogue
from perdure.observability.gauges import StatsGauges
from perdure.observability.metrics import Metrics
from perdure.observability.page import Exposition
from perdure.observability.temporal_metrics import SdkMetrics
from perdure.settings import ApiSettings
from perdure.store.engine import Store, make_engine
from perdure.temporal import TemporalGate, connect, default_identity, make_converter
from workflows.probe import EngineProbe

log = logging.getLogger(__name__)


def create_app(settings: ApiSettings, *, sdk: SdkMetrics | None = None) -> FastAPI:
    """The app. Its lifespan builds `app.state.resources`. `sdk`: the Temporal SDK's runtime and metrics, one
    per process."""
    ground = _check(settings, sdk)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.resources = await _build(ground, stack)
            log.info("api ready", extra={"host": settings.host, "auth": settings.auth})
            yield
            app.state.resources.drain.set()

    app = FastAPI(title="Perdure", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    for part in (submit, tasks, steer, events, callbacks, callback_secrets, admin, codec, health):
        app.include_router(part.router)
    routes = routes_of(app)
    problems.install(app, lambda path: _methods(routes, path))
    openapi.install(app)
    ground.metrics.know_routes((method, route.path) for route in routes for method in route.methods or ())
    app.add_middleware(Edge, trusted_proxies=settings.trusted_proxies, metrics=ground.metrics)
    return app


@dataclass(frozen=True)
class _Ground:
    """What settings alone decide, read before anything starts, so that a mistake is said in one line."""

    settings: ApiSettings
    sdk: SdkMetrics | None
    catalogue: Catalogue
    metrics: Metrics
    guard: GuardPolicy
    codec: PayloadCodec
    secret_key: bytes | None


def _check(settings: ApiSettings, sdk: SdkMetrics | None) -> _Ground:
    """Raises CatalogueError, UnsafeAuth, PayloadKeyError or ValueError, each naming the setting."""
    check_host(settings)
    parse_networks(settings.trusted_proxies)
    catalogue = load_catalogue(settings.models)
    codec = make_converter(settings).payload_codec
    assert codec is not None
    guard = GuardPolicy.from_settings(settings)
    return _Ground(settings, sdk, catalogue, Metrics(catalogue), guard, codec, _secret_key(settings))


def _methods(routes: list[StrictRoute], path: str) -> set[str]:
    """The methods of every route at this path."""
    return {method for route in routes if route.path_regex.match(path) for method in route.methods or ()}


async def _build(ground: _Ground, stack: AsyncExitStack) -> Resources:
    """Every resource, in the order in which one needs the other; the stack closes them in reverse."""
    settings, sdk, catalogue, metrics = ground.settings, ground.sdk, ground.catalogue, ground.metrics
    identity = default_identity("api")
    url = settings.database_url.get_secret_value()
    store = Store(make_engine(url, pool_size=settings.database_pool, application_name="perdure-api"))
    stack.push_async_callback(store.aclose)
    client: Client = await connect(
        settings, lazy=True, identity=identity, runtime=sdk.runtime if sdk else None
    )
    connected = partial(
        connect, settings, identity=identity, runtime=sdk.runtime if sdk else None, patience=0
    )
    check = asyncio.create_task(say_what_order_lacks(connected, EngineProbe, catalogue.pools))
    stack.push_async_callback(_stop, check)
    gate = TemporalGate(client)
    dispatcher = Dispatcher(store, gate, catalogue, metrics, identity)
    running = asyncio.create_task(_keep_dispatching(dispatcher), name="dispatcher")
    stack.push_async_callback(_stop, running)
    intake = Intake(store.tasks, dispatcher)
    stack.push_async_callback(intake.aclose)
    queues = Queues(store.stats, store.workers, store.lines, store.dispatch, catalogue)
    hub = Hub(store.tasks, gate, queues=queues)
    stack.push_async_callback(hub.aclose)
    feeds = Feeds(store.news, hub)
    stack.push_async_callback(feeds.aclose)
    signals = Signals(gate, hub)
    stack.push_async_callback(signals.aclose)
    desk = CallbackDesk.from_settings(settings, store.secrets, ground.guard)
    stack.push_async_callback(desk.aclose)
    return Resources(
        settings=settings,
        catalogue=catalogue,
        store=store,
        gate=gate,
        dispatcher=dispatcher,
        hub=hub,
        queues=queues,
        feeds=feeds,
        stream_tokens=StreamTokens(ground.secret_key),
        signals=signals,
        metrics=metrics,
        exposition=Exposition(metrics, sdk, StatsGauges(metrics, store)),
        readiness=Readiness(store, gate, catalogue),
        authenticator=Authenticator(settings, store),
        limits=Limits(settings),
        pressure=Pressure(settings, catalogue, store.stats),
        intake=intake,
        guard=ground.guard,
        desk=desk,
        codec=ground.codec,
        secret_key=ground.secret_key,
    )


async def _keep_dispatching(dispatcher: Dispatcher) -> None:
    """Runs the dispatcher for the life of the process: a fault in it must not end dispatch for good."""
    while True:
        try:
            await dispatcher.run()
        except Exception:
            log.exception("the dispatcher failed; it starts again")
            await asyncio.sleep(1.0)


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancels until it ends: a cancel that meets a driver's own clean-up, or the end of what is awaited, can
    come out as another error, or as none."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.5)


def _secret_key(settings: ApiSettings) -> bytes | None:
    """PERDURE_SECRET_KEY, decoded. Raises ValueError naming it."""
    if settings.secret_key is None:
        return None
    try:
        return base64.b64decode(settings.secret_key.get_secret_value().partition(",")[0], validate=True)
    except ValueError:
        raise ValueError("PERDURE_SECRET_KEY is not base64; make one with: openssl rand -base64 32") from None
