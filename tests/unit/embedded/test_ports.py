from __future__ import annotations

import os
import socket
import sys

import pytest

from perdure.embedded.ports import free_port, free_ports, holder, is_free


def test_taken_port_is_seen_and_its_holder_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        if sys.platform == "linux":
            assert f"(pid {os.getpid()})" in (holder(port) or "")
    assert is_free(port)
    assert holder(port) is None


def test_port_held_on_every_address_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        assert not is_free(server.getsockname()[1])


def test_port_with_a_lingering_connection_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as every server does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server's side closes first and waits
            assert client.recv(1) == b""
    assert is_free(port)


@pytest.mark.parametrize("count", [1, 5])
def test_free_ports_differ(count: int) -> None:
    found = free_ports(count)
    assert len(set(found)) == count
    assert all(is_free(port) for port in [*found, free_port()])
