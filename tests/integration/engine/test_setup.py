"""What `perdure migrate` tells Temporal, and what `perdure doctor` says of a server."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest
from temporalio.client import Client

from perdure import names
from perdure.doctor import check_engine
from perdure.embedded.temporal import EmbeddedTemporal
from perdure.engine_setup import RETENTION, missing_search_attributes, prepare, retention
from workflows.probe import EngineProbe


async def test_namespace_and_search_attributes_are_made_once(temporal_address: str) -> None:
    client = await Client.connect(temporal_address, namespace=f"ns-{uuid.uuid4().hex[:8]}")
    made, registered = await prepare(client)
    assert "made" in made
    for key in names.SEARCH_ATTRIBUTES:
        assert key.name in registered
    assert await missing_search_attributes(client) == []
    assert await retention(client) == RETENTION
    assert await prepare(client) == [
        f"namespace {client.namespace} exists",
        "search attributes are registered",
    ]


async def test_processes_that_prepare_at_once_all_succeed(temporal_address: str) -> None:
    namespace = f"ns-{uuid.uuid4().hex[:8]}"
    clients = [await Client.connect(temporal_address, namespace=namespace) for _ in range(4)]
    said = await asyncio.gather(*(prepare(client) for client in clients))
    assert all("does not let us" not in line for lines in said for line in lines), said
    assert await missing_search_attributes(clients[0]) == []


async def test_doctor_names_what_a_namespace_lacks(
    temporal_server: EmbeddedTemporal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal_server.address)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/dev/null")
    found = await check_engine(EngineProbe, tmp_path)
    assert [finding.level for finding in found] == ["ok", "ok", "ok"], found
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "nobody-made-this")
    found = await check_engine(EngineProbe, tmp_path)
    assert found[-1].level == "warning"
    assert "not_found" in found[-1].what
