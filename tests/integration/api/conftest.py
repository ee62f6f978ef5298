"""The API on a real Postgres, with Temporal down: submits are kept and nothing starts.

Fixtures: `api` (no keys, user dev), `keyed` (keys), both through ASGI without a socket; `served`, the same as
`keyed` behind uvicorn on a real port; `settings`, for `running_app` and `serving_app` with other settings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from perdure.settings import ApiSettings
from perdure.store import Store
from tests.integration.api.harness import MODELS, Api, running_app, serving_app


@pytest.fixture(autouse=True)
def _temporal_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> ApiSettings:
    models = tmp_path / "models.toml"
    models.write_text(MODELS)
    return ApiSettings(
        database_url=SecretStr(database_url),
        models=models,
        auth="none",
        port=0,
        submits_per_minute=100_000,
        bodies_per_minute=100_000,
        grace_seconds=5,
        callback_secret=SecretStr("a-secret-for-tests-of-the-api-edge"),
    )


@pytest.fixture
async def api(settings: ApiSettings, store: Store) -> AsyncIterator[Api]:
    """Without keys: one user, dev, who may do everything."""
    async with running_app(settings, store) as one:
        yield one


@pytest.fixture
async def keyed(settings: ApiSettings, store: Store) -> AsyncIterator[Api]:
    """With keys; the client sends as alice."""
    async with running_app(settings.model_copy(update={"auth": "keys"}), store) as one:
        one.client.headers.update(await one.key("alice"))
        yield one


@pytest.fixture
async def served(settings: ApiSettings, store: Store) -> AsyncIterator[Api]:
    """With keys, on a real port; the client sends as alice."""
    async with serving_app(settings.model_copy(update={"auth": "keys"}), store) as one:
        one.client.headers.update(await one.key("alice"))
        yield one
