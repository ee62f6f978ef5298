"""The embedded Temporal server: what it is started with has arrived."""

from __future__ import annotations

import sqlite3
from datetime import timedelta

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from perdure import names
from perdure.embedded.temporal import EmbeddedTemporal


async def test_search_attributes_are_registered_as_keywords(temporal_client: Client) -> None:
    found = await temporal_client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=temporal_client.namespace)
    )
    for attribute in names.SEARCH_ATTRIBUTES:
        assert found.custom_attributes[attribute.name] == IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD


async def test_closed_runs_are_kept_for_three_days(temporal_client: Client) -> None:
    described = await temporal_client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=temporal_client.namespace)
    )
    assert described.config.workflow_execution_retention_ttl.ToTimedelta() >= timedelta(hours=72)


def test_database_keeps_a_write_ahead_log(temporal_server: EmbeddedTemporal) -> None:
    with sqlite3.connect(f"file:{temporal_server.root / 'temporal.db'}?mode=ro", uri=True) as database:
        assert database.execute("pragma journal_mode").fetchone() == ("wal",)
