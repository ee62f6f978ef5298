"""One HTTP exchange with one receiver, bounded by the clock and in bytes.

sender = Sender(policy)
answer = await sender.send(url, body, headers)      never raises for what a receiver does
await sender.aclose()
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

import httpx

from perdure.callback.answer import SAMPLE_CHARS, Answer, judge_fault, judge_status, sample_of
from perdure.callback.guard import GuardPolicy, parse_url
from perdure.callback.sign import signatures_in
from perdure.callback.transport import MAX_ANSWER_BYTES, Resolver, SystemResolver, guarded_transport

CONNECT_SECONDS: Final = 5.0
TOTAL_SECONDS: Final = 30.0
BODY_SECONDS: Final = 5.0  # for the rest of an answer whose status is known

log = logging.getLogger(__name__)


@dataclass
class _Seen:
    """What is known of a try so far; it outlives the fault that ends it."""

    status: int | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    address: str | None = None
    data: bytearray = field(default_factory=bytearray)

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """httpcore's hook: notes the peer as soon as the socket is open."""
        if event == "connection.connect_tcp.complete":
            peer = info["return_value"].get_extra_info("server_addr")
            self.address = str(peer[0]) if peer else None


class Sender:
    """Sends. Holds the guarded pool and the resolver's threads for the life of a process.

    It drives the transport itself: without a client there are no cookies, redirects, proxies or `.netrc`,
    and no log line with a URL.
    """

    def __init__(
        self,
        policy: GuardPolicy,
        *,
        resolver: Resolver | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect_seconds: float = CONNECT_SECONDS,
        total_seconds: float = TOTAL_SECONDS,
    ) -> None:
        self.policy = policy
        self.total_seconds = total_seconds
        self._connect_seconds = connect_seconds
        self._own_resolver = SystemResolver() if resolver is None else None
        self._transport = guarded_transport(
            policy, resolver or self._own_resolver or SystemResolver(), ssl_context=ssl_context
        )

    async def send(self, url: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Posts `body` as it is. `headers` are those of `signed_headers`.

        Ends within `total_seconds` by the clock, whatever dribbles. 2xx is delivered whatever follows it.
        """
        begun, seen = monotonic(), _Seen()
        try:
            target = parse_url(url, self.policy)
            async with asyncio.timeout(self.total_seconds):
                await self._exchange(target.url, body, headers, seen)
            answer = judge_status(seen.status or 0, seen.headers, datetime.now(UTC))
        except Exception as error:
            if seen.status is not None:  # the status came; what broke after it does not count
                answer = judge_status(seen.status, seen.headers, datetime.now(UTC))
            else:
                answer = judge_fault(error)
                log.debug("callback try failed", extra={"fault": type(error).__name__})
        return dataclasses.replace(
            answer,
            address=seen.address,
            sample=sample_of(bytes(seen.data), signatures_in(headers)),
            duration_ms=round((monotonic() - begun) * 1000),
        )

    async def _exchange(self, url: httpx.URL, body: bytes, headers: dict[str, str], seen: _Seen) -> None:
        wait = self.total_seconds
        request = httpx.Request(
            "POST",
            url,
            headers=headers,
            content=body,
            extensions={
                "timeout": {"connect": self._connect_seconds, "read": wait, "write": wait, "pool": wait},
                "trace": seen.trace,
            },
        )
        response = await self._transport.handle_async_request(request)
        try:
            seen.status, seen.headers = response.status_code, response.headers
            async with asyncio.timeout(BODY_SECONDS):
                await _read_some(response, seen.data)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Closes the pool and the resolver."""
        await self._transport.aclose()
        if self._own_resolver is not None:
            self._own_resolver.close()


async def _read_some(response: httpx.Response, data: bytearray) -> None:
    """Reads to the end, so that the receiver sees no broken connection; keeps only what the log shows."""
    read = 0
    async for chunk in response.aiter_raw():
        read += len(chunk)
        data += chunk[: max(0, 4 * SAMPLE_CHARS - len(data))]
        if read >= MAX_ANSWER_BYTES:
            return
