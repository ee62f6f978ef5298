"""The outermost layer of the app, in plain ASGI: request ids, access log, metrics, unexpected errors.

An exception that nobody expected becomes a 500 problem with the request id and one log record with its
traceback; the caller sees neither its text nor its kind.

Requests that went well are logged at DEBUG: pollers would drown the rest. Refused and slow ones are logged at
INFO; who created or changed a task is in the audit lines.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import uuid_utils
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import problem_of, render
from perdure.observability import logs, traces
from perdure.observability.metrics import Metrics

log: Final = logging.getLogger("perdure.access")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}\Z")
_SLOW: Final = 1.0  # seconds
_UNTRACED: Final = frozenset({"/healthz", "/readyz", "/metrics"})  # asked every few seconds, and of no task
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Edge:
    """Wraps the whole app."""

    def __init__(self, app: ASGIApp, *, trusted_proxies: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._trusted = parse_networks(trusted_proxies)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _accepted_id(scope) or uuid_utils.uuid7().hex
        scope.setdefault("state", {})["request_id"] = request_id
        token = logs.request_id.set(request_id)
        started = time.perf_counter()
        status = 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            with _traced(scope) as span:
                try:
                    await self._app(scope, receive, tell)
                except Exception as error:
                    problem = problem_of(error)
                    if problem.status == 500:
                        about = {"method": scope["method"], "route": _route(scope)}
                        log.exception("request failed", extra=about)
                    if status:
                        raise  # the reply has begun: the server cuts it, so that it cannot pass for whole
                    await render(problem, request_id)(scope, receive, tell)
                finally:
                    _tell_span(span, scope, status, request_id)
        finally:
            self._record(scope, status, time.perf_counter() - started)
            logs.request_id.reset(token)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        self._metrics.observe_http(scope["method"], route, status or 499, seconds)
        level = logging.DEBUG if 0 < status < 400 and seconds < _SLOW else logging.INFO
        if log.isEnabledFor(level):
            log.log(
                level,
                "request",
                extra={
                    "method": scope["method"],
                    "route": route or "unmatched",
                    "status": status,
                    "ms": round(seconds * 1000, 2),
                    "client": client_address(scope, self._trusted),
                },
            )


def parse_networks(texts: Sequence[str]) -> tuple[_Network, ...]:
    """Addresses and CIDRs of proxies. Raises ValueError naming the setting."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"PERDURE_TRUSTED_PROXIES: {error}; give addresses or CIDRs") from None


def client_address(scope: Scope, trusted: tuple[_Network, ...]) -> str | None:
    """The address the request came from.

    `X-Forwarded-For` is believed only from a trusted proxy, and read from the right: the first entry that is
    no trusted proxy is the client. Junk stops the reading at the last address that was sure.
    """
    client = scope.get("client")
    address = client[0] if client else None
    if not trusted or address is None:
        return address
    hops = [
        part.strip()
        for name, value in scope["headers"]
        if name == b"x-forwarded-for"
        for part in value.decode("latin-1").split(",")
    ]
    while hops and _is_trusted(address, trusted):
        hop = _bare_address(hops.pop())
        if hop is None:
            break
        address = hop
    return address


def _is_trusted(address: str, trusted: tuple[_Network, ...]) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(ip in network for network in trusted if network.version == ip.version)


def _bare_address(hop: str) -> str | None:
    """The address of one hop, without brackets and port; None for junk."""
    text = hop
    if hop.startswith("["):
        text = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        text = hop.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _accepted_id(scope: Scope) -> str | None:
    found = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return found[0].decode("ascii") if len(found) == 1 and _REQUEST_ID.match(found[0]) else None


def _traced(scope: Scope) -> AbstractContextManager[traces.SpanHandle]:
    """A server span, child of the caller's `traceparent` where it sends a sound one."""
    if scope["path"] in _UNTRACED:
        return nullcontext(traces.SpanHandle())
    sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
    return traces.span(scope["method"], parent=sent[0] if len(sent) == 1 else None, kind="server")


def _tell_span(span: traces.SpanHandle, scope: Scope, status: int, request_id: str) -> None:
    route = _route(scope) or "unmatched"
    span.rename(f"{scope['method']} {route}")
    span.set("http.request.method", scope["method"])
    span.set("http.route", route)
    span.set("http.response.status_code", status)
    span.set("perdure.request.id", request_id)
    if status >= 500 or status == 0:
        span.fail(str(status or "cut off"))


def _route(scope: Scope) -> str | None:
    """The route's template, never the path: a path holds what a caller wrote."""
    return getattr(scope.get("route"), "path", None)
