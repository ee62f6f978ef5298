"""A transport that opens sockets to allowed addresses only.

    transport = guarded_transport(policy, resolver)
    async with httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False) as client: …

Checking a name first and connecting by name later leaves a gap in which its answer may change. So the name
is resolved once, here: every answer must pass, the socket is opened to the numeric address that passed, and
the peer is compared afterwards. TLS still names and verifies the host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import httpcore
import httpx

from perdure.callback.addresses import Address
from perdure.callback.guard import CallbackRejected, GuardPolicy

MAX_ADDRESSES: Final = 4  # tried of one name
MAX_ANSWER_BYTES: Final = 64 * 1024  # read from one receiver, headers included
MAX_CONNECTIONS: Final = 1000  # the pool's; the deliverer's own limits are far lower
_RESOLVER_THREADS: Final = 16


class Resolver(Protocol):
    """Names to addresses."""

    async def resolve(self, host: str, port: int) -> list[Address]:
        """All addresses of `host`, best first. Raises OSError when there are none."""
        ...


class SystemResolver:
    """The system's resolver, in threads of its own: a look-up cannot be cancelled, and hostile DNS must not
    use up the threads that others need."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, "callback-dns")

    async def resolve(self, host: str, port: int) -> list[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _getaddrinfo, host, port)
        return list(dict.fromkeys(ipaddress.ip_address(info[4][0]) for info in found))

    def close(self) -> None:
        """Ends the threads; a look-up that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _getaddrinfo(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)


class AnswerTooLarge(Exception):  # noqa: N818 - said of the receiver
    """The receiver sent more than MAX_ANSWER_BYTES."""


class NameNotFound(httpcore.ConnectError):
    """The host has no address."""


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens the sockets of the pool. Raises CallbackRejected, which httpx passes through as it is."""

    def __init__(
        self,
        policy: GuardPolicy,
        resolver: Resolver,
        *,
        opener: httpcore.AsyncNetworkBackend | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._opener = opener or httpcore.AnyIOBackend()
        self._max_bytes = max_bytes

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolves, checks, connects and checks again, all within `timeout` seconds, TLS included."""
        clock = asyncio.get_running_loop().time
        ends = clock() + (5.0 if timeout is None else timeout)
        addresses = await self._addresses(host, port, ends - clock())
        fault: Exception | None = None
        for number, address in enumerate(addresses):
            share = (ends - clock()) / (len(addresses) - number)  # the last one may use what is left
            if share <= 0:
                break
            try:
                stream = await self._opener.connect_tcp(
                    str(address), port, share, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                fault = error
                continue
            try:
                self._check_peer(stream, address, host, port)
            except CallbackRejected:
                await stream.aclose()
                raise
            return _Bounded(stream, self._max_bytes, ends)
        raise fault or httpcore.ConnectTimeout()

    async def _addresses(self, host: str, port: int, timeout: float) -> list[Address]:
        """Every answer must pass: one bad address among good ones is how a name is turned around."""
        try:
            addresses = [ipaddress.ip_address(host)]
        except ValueError:
            try:
                addresses = await asyncio.wait_for(self._resolver.resolve(host, port), timeout)
            except TimeoutError:  # before OSError, which it is
                raise httpcore.ConnectTimeout("the look-up of the host's name took too long") from None
            except (OSError, UnicodeError):
                raise NameNotFound("the host's name has no address") from None
        if not addresses:
            raise NameNotFound("the host's name has no address")
        for address in addresses:
            self._policy.check_address(address, host, port)
        return addresses[:MAX_ADDRESSES]

    def _check_peer(
        self, stream: httpcore.AsyncNetworkStream, address: Address, host: str, port: int
    ) -> None:
        peer = stream.get_extra_info("server_addr")
        reached = ipaddress.ip_address(peer[0]) if peer else None
        if reached is None or reached != address:
            raise CallbackRejected(
                "address-not-allowed", "the socket reached another address than the one asked"
            )
        self._policy.check_address(reached, host, port)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise CallbackRejected("address-not-allowed", "callbacks do not go to local sockets")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Bounded(httpcore.AsyncNetworkStream):
    """A stream that counts what it reads and holds TLS to the connect time."""

    def __init__(self, inner: httpcore.AsyncNetworkStream, left: int, ends: float) -> None:
        self._inner = inner
        self._left = left
        self._ends = ends

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._left <= 0:
            raise AnswerTooLarge
        data = await self._inner.read(min(max_bytes, self._left), timeout)
        self._left -= len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        left = max(0.001, self._ends - asyncio.get_running_loop().time())
        stream = await self._inner.start_tls(ssl_context, server_hostname, left)
        return _Bounded(stream, self._left, self._ends)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def guarded_transport(
    policy: GuardPolicy,
    resolver: Resolver,
    *,
    ssl_context: ssl.SSLContext | None = None,
    opener: httpcore.AsyncNetworkBackend | None = None,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> httpx.AsyncHTTPTransport:
    """An httpx transport on a guarded pool: HTTP/1.1, a fresh connection for each request, no proxies.

    `ssl_context` defaults to httpx's own (certifi, or SSL_CERT_FILE where set). `opener` opens numeric
    addresses and is there for tests of what is asked of it. `max_bytes` is the most one answer may have.
    """
    context = ssl_context or httpx.create_ssl_context()
    transport = httpx.AsyncHTTPTransport(verify=context, trust_env=False)
    # The constructor takes no network backend; pyproject holds httpx's minor version for this line.
    transport._pool = httpcore.AsyncConnectionPool(
        ssl_context=context,
        max_connections=MAX_CONNECTIONS,
        max_keepalive_connections=0,  # a kept connection would keep an old decision
        http1=True,
        http2=False,
        retries=0,
        network_backend=GuardedBackend(policy, resolver, opener=opener, max_bytes=max_bytes),
    )
    return transport
