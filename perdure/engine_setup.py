"""What Temporal must know of us before the first task: the namespace and our search attributes.

Done by `perdure migrate`. When a server does not allow it (Temporal Cloud), the answer says what to add by
hand; tasks then run without search attributes.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from perdure import names
from perdure.settings import WorkerSettings
from perdure.temporal import EngineUnavailable, connect

RETENTION: Final = timedelta(days=7)  # of a namespace that we make: how long a closed run can be read
SHORTEST: Final = timedelta(hours=72)  # below this it is said
_PATIENCE: Final = 3.0  # seconds for a server that may not be there
_TRIES: Final = 20  # a namespace just made is known everywhere after a moment


async def prepare_from_environment(settings: WorkerSettings) -> list[str]:
    """Prepares the server of TEMPORAL_ADDRESS. Returns what was done, in lines for people; never raises for a
    server that is away or says no."""
    try:
        client = await connect(settings, patience=_PATIENCE)
    except EngineUnavailable as error:
        return [f"{error}; run `perdure migrate` again when it does, so that tasks carry search attributes"]
    return await prepare(client)


async def prepare(client: Client) -> list[str]:
    """Prepares the client's namespace; as above."""
    try:
        return [await _namespace(client), await _search_attributes(client)]
    except RPCError as error:
        wanted = ", ".join(f"{key.name} (Keyword)" for key in names.SEARCH_ATTRIBUTES)
        return [
            f"Temporal does not let us register anything ({error.status.name.lower()}): "
            f"add the search attributes {wanted} to namespace {client.namespace} yourself"
        ]


async def _namespace(client: Client) -> str:
    try:
        kept = await retention(client)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return await _make_namespace(client)
    return f"namespace {client.namespace} exists" + (
        "" if kept >= SHORTEST else f"; {retention_advice(kept)}"
    )


async def retention(client: Client) -> timedelta:
    """How long the namespace keeps closed runs. Raises RPCError."""
    described = await client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=client.namespace)
    )
    return described.config.workflow_execution_retention_ttl.ToTimedelta()


def retention_advice(kept: timedelta) -> str:
    """What to do about a namespace that forgets too soon: the reconciler reads closed runs."""
    return (
        f"closed runs are kept for {kept.total_seconds() / 3600:g} h, 7 days are recommended: "
        f"temporal operator namespace update --retention {RETENTION.days * 24}h"
    )


async def _make_namespace(client: Client) -> str:
    period = Duration()
    period.FromTimedelta(RETENTION)
    try:
        await client.workflow_service.register_namespace(
            RegisterNamespaceRequest(namespace=client.namespace, workflow_execution_retention_period=period)
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS:  # another process was quicker
            raise
    return f"namespace {client.namespace} made; closed runs are kept for {RETENTION.days} days"


async def _search_attributes(client: Client) -> str:
    missing = await missing_search_attributes(client)
    if not missing:
        return "search attributes are registered"
    keyword = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(
                namespace=client.namespace, search_attributes=dict.fromkeys(missing, keyword)
            )
        )
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS:
            raise
    return f"search attributes registered: {', '.join(missing)}"


async def missing_search_attributes(client: Client) -> list[str]:
    """Those of ours that the namespace lacks. Raises RPCError."""
    request = ListSearchAttributesRequest(namespace=client.namespace)
    for last in (*[False] * (_TRIES - 1), True):
        try:
            listed = await client.operator_service.list_search_attributes(request)
        except RPCError as error:
            if last or error.status is not RPCStatusCode.NOT_FOUND:
                raise
            await asyncio.sleep(0.5)  # the namespace was made a moment ago
        else:
            break
    return [key.name for key in names.SEARCH_ATTRIBUTES if key.name not in listed.custom_attributes]
