"""`stack`: three API processes and their workers, one for all tests of this folder; `proxy`: before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.live.stack import Proxy, Stack


@pytest.fixture(scope="session")
def running_stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def stack(running_stack: Stack) -> Stack:
    await running_stack.ready()
    return running_stack


@pytest.fixture
async def proxy(stack: Stack) -> AsyncIterator[Proxy]:
    proxy = Proxy(stack.ports)
    await proxy.start()
    yield proxy
    await proxy.aclose()
