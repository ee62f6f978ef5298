"""`service`: one API in this process, on a real port and a real Postgres, with Temporal down.
`stack`: three API processes and their workers, one for all tests of this folder; `proxy`: before them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from perdure.settings import ApiSettings
from perdure.store import Store
from tests.integration.live.service import Service, serving
from tests.integration.live.stack import Proxy, Stack
from tests.support.tasks import CATALOGUE_TEXT


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


@pytest.fixture
def settings(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ApiSettings:
    """An API with keys, five database connections and no Temporal."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    (tmp_path / "models.toml").write_text(CATALOGUE_TEXT)
    return ApiSettings(
        database_url=SecretStr(database_url),
        models=tmp_path / "models.toml",
        database_pool=5,
        secret_key=SecretStr("c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U="),
        max_streams_per_user=1000,
        grace_seconds=6,
        port=0,
    )


@pytest.fixture
async def service(settings: ApiSettings, store: Store) -> AsyncIterator[Service]:
    async with serving(settings, store) as one:
        yield one
