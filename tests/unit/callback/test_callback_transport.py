"""The guarded transport where the socket is opened: names, answers, peers, bytes, TLS, proxies."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx
import pytest

from perdure.callback.addresses import Address
from perdure.callback.guard import CallbackRejected, GuardPolicy
from perdure.callback.transport import GuardedBackend, SystemResolver, guarded_transport
from tests.support.addresses import CLOSED, OPEN
from tests.support.receiver import HANG, Names, Receiver, answer

LOOPBACK = GuardPolicy(nets=(ipaddress.ip_network("127.0.0.0/8"),), http=True, ports=frozenset())


class Opener(httpcore.AnyIOBackend):
    """Notes which numeric address each socket is opened to; `elsewhere` sends all of them there."""

    def __init__(self, elsewhere: str | None = None) -> None:
        self.opened: list[str] = []
        self._elsewhere = elsewhere

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.opened.append(host)
        return await super().connect_tcp(
            self._elsewhere or host, port, timeout, local_address, socket_options
        )


async def post(transport: httpx.AsyncHTTPTransport, url: str, body: bytes = b"{}") -> int:
    request = httpx.Request(
        "POST",
        url,
        content=body,
        extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), 10)},
    )
    response = await transport.handle_async_request(request)
    await response.aread()
    await response.aclose()
    return response.status_code


async def refusal(transport: httpx.AsyncHTTPTransport, url: str) -> str:
    with pytest.raises(CallbackRejected) as caught:
        await post(transport, url)
    await transport.aclose()
    return caught.value.code


@pytest.mark.parametrize(("address", "why"), CLOSED)
async def test_a_name_that_leads_to_a_closed_address_opens_no_socket(address: str, why: str) -> None:
    opener = Opener()
    transport = guarded_transport(GuardPolicy(), Names([address]), opener=opener)
    assert await refusal(transport, "https://receiver.example/") == "address-not-allowed", why
    assert opener.opened == []


@pytest.mark.parametrize("address", OPEN)
async def test_a_name_that_leads_to_an_open_address_is_tried_there(address: str) -> None:
    opener = Opener(elsewhere="127.0.0.1")  # nothing here may really go out
    backend = GuardedBackend(GuardPolicy(), Names([address]), opener=opener)
    with pytest.raises((httpcore.ConnectError, CallbackRejected)):  # nobody listens, or the peer is another
        await backend.connect_tcp("receiver.example", 443, 5)
    assert opener.opened == [str(ipaddress.ip_address(address))]


async def test_one_closed_answer_among_open_ones_refuses_the_name() -> None:
    opener = Opener()
    transport = guarded_transport(GuardPolicy(), Names(["8.8.8.8", "10.0.0.1"]), opener=opener)
    assert await refusal(transport, "https://receiver.example/") == "address-not-allowed"
    assert opener.opened == []


async def test_a_name_that_changes_its_answer_gains_nothing() -> None:
    """Rebinding: the first answer is allowed, the second is not. The first is what is connected to; the
    next request asks anew and is refused before any socket."""
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    opener = Opener()
    async with Receiver() as receiver:
        transport = guarded_transport(LOOPBACK, names, opener=opener)
        assert await post(transport, receiver.url(host="receiver.example")) == 204
        assert names.asked == ["receiver.example"]  # one look-up per connection, no second one to turn
        assert opener.opened == ["127.0.0.1"]
        assert await refusal(transport, receiver.url(host="receiver.example")) == "address-not-allowed"
    assert opener.opened == ["127.0.0.1"]
    assert receiver.requests[0]["host"] == f"receiver.example:{receiver.port}"


async def test_a_socket_that_ends_up_elsewhere_is_closed_before_a_byte_is_sent() -> None:
    async with Receiver() as receiver:
        opener = Opener(elsewhere="127.0.0.1")
        policy = GuardPolicy(http=True, ports=frozenset())
        transport = guarded_transport(policy, Names(["8.8.8.8"]), opener=opener)
        assert await refusal(transport, receiver.url(host="receiver.example")) == "address-not-allowed"
        assert receiver.requests == []


async def test_the_peer_must_be_the_address_that_was_asked_even_where_both_are_open() -> None:
    async with Receiver() as receiver:
        transport = guarded_transport(LOOPBACK, Names(["127.0.0.2"]), opener=Opener(elsewhere="127.0.0.1"))
        assert await refusal(transport, receiver.url(host="receiver.example")) == "address-not-allowed"
        assert receiver.requests == []


async def test_ports_are_checked_at_the_socket_too() -> None:
    transport = guarded_transport(GuardPolicy(http=True), Names(["8.8.8.8"]), opener=Opener())
    assert await refusal(transport, "http://receiver.example:25/") == "port-not-allowed"


async def test_a_dead_address_does_not_hide_a_live_one() -> None:
    async with Receiver() as receiver:
        names = Names(["127.0.0.2", "127.0.0.3", "127.0.0.1"])  # nothing listens on the first two
        transport = guarded_transport(LOOPBACK, names)
        assert await post(transport, receiver.url(host="receiver.example")) == 204
        await transport.aclose()


async def test_names_without_an_answer_and_names_that_never_answer() -> None:
    class Nobody:
        async def resolve(self, host: str, port: int) -> list[Address]:
            raise socket.gaierror(-2, "Name or service not known")

    class Never:
        async def resolve(self, host: str, port: int) -> list[Address]:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(httpcore.ConnectError, match="no address"):
        await GuardedBackend(LOOPBACK, Nobody()).connect_tcp("receiver.example", 80, 5)
    with pytest.raises(httpcore.ConnectError, match="no address"):
        await GuardedBackend(LOOPBACK, Names([])).connect_tcp("receiver.example", 80, 5)
    with pytest.raises(httpcore.ConnectTimeout, match="took too long"):
        await GuardedBackend(LOOPBACK, Never()).connect_tcp("receiver.example", 80, 0.05)


async def test_local_sockets_are_refused() -> None:
    with pytest.raises(CallbackRejected):
        await GuardedBackend(LOOPBACK, Names([])).connect_unix_socket("/var/run/docker.sock")


async def test_redirects_are_answers_and_cookies_are_forgotten() -> None:
    async with Receiver() as target, Receiver() as receiver:
        receiver.script = [answer(302, headers={"Location": target.url(), "Set-Cookie": "a=b"})]
        transport = guarded_transport(LOOPBACK, SystemResolver())
        assert await post(transport, receiver.url()) == 302
        assert await post(transport, receiver.url()) == 302
        await transport.aclose()
        assert target.connections == 0
        assert all(name.lower() != "cookie" for one in receiver.requests for name, _ in one.headers)


async def test_connections_are_not_kept() -> None:
    async with Receiver() as receiver:
        receiver.script = [[b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", HANG]]
        transport = guarded_transport(LOOPBACK, SystemResolver())
        for _ in range(3):
            assert await post(transport, receiver.url()) == 200
        await transport.aclose()
        assert receiver.connections == 3


async def test_proxies_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Receiver() as proxy, Receiver() as receiver:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        transport = guarded_transport(LOOPBACK, SystemResolver())
        assert await post(transport, receiver.url()) == 204
        await transport.aclose()
        assert (proxy.connections, receiver.connections) == (0, 1)


async def test_the_system_resolver_knows_localhost_and_uses_threads_of_its_own() -> None:
    resolver = SystemResolver()
    found = await resolver.resolve("localhost", 80)
    assert ipaddress.ip_address("127.0.0.1") in found or ipaddress.ip_address("::1") in found
    assert any(thread.name.startswith("callback-dns") for thread in threading.enumerate())
    with pytest.raises(OSError, match=r".+"):
        await resolver.resolve("no-such-name.invalid", 80)
    resolver.close()


def test_the_private_attribute_that_is_replaced_is_still_there() -> None:
    """httpx has no argument for a network backend; its minor version is held for this."""
    plain = httpx.AsyncHTTPTransport()
    assert isinstance(plain._pool, httpcore.AsyncConnectionPool)
    ours = guarded_transport(LOOPBACK, Names([]))
    assert isinstance(ours._pool._network_backend, GuardedBackend)
