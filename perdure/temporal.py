"""The door to Temporal: connecting, and the API's bounded calls.

EngineUnavailable        Temporal did not answer in time; nothing is known about the effect
EngineRefused            Temporal refuses this very call as invalid
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import ValidationError
from temporalio.client import Client, WorkflowHandle
from temporalio.common import (
    Priority,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DataConverter
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.runtime import Runtime
from temporalio.service import RetryConfig, RPCError, RPCStatusCode

from perdure import names
from perdure.codec import Codec, parse_keys
from perdure.contracts import Beat, CancelRequest, TaskInput
from perdure.observability.failures import RedactingFailureConverter
from perdure.settings import WorkerSettings
from perdure.task.story import task_summary

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_CALL_SECONDS = 5.0  # in all, with the SDK's retries; its own time-outs bound one try only
_RETRY = RetryConfig(
    initial_interval_millis=50, max_interval_millis=500, max_elapsed_time_millis=4000, max_retries=3
)


class EngineUnavailable(Exception):  # noqa: N818 - says what is, not that we erred
    """Temporal did not answer in time; whether the call took effect is unknown."""


class EngineRefused(Exception):  # noqa: N818 - the same
    """Temporal refuses this call as invalid; it will refuse it again."""


def make_converter(settings: WorkerSettings) -> DataConverter:
    """Pydantic JSON, compressed, encrypted when PERDURE_PAYLOAD_KEY is set; failures carry no secret.

    Raises PayloadKeyError.
    """
    keys = parse_keys(settings.payload_key.get_secret_value()) if settings.payload_key else []
    return dataclasses.replace(
        pydantic_data_converter, payload_codec=Codec(keys), failure_converter_class=RedactingFailureConverter
    )


async def connect(
    settings: WorkerSettings,
    *,
    lazy: bool = False,
    identity: str | None = None,
    runtime: Runtime | None = None,
    patience: float = 60.0,
) -> Client:
    """A client from the SDK's environment configuration (TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TLS, ...).

    `lazy`: connects at the first call, so that a process serves while Temporal is down. Otherwise it tries
    for `patience` seconds and raises EngineUnavailable with the address.
    """
    config: dict[str, Any] = dict(ClientConfig.load_client_connect_config())
    config.setdefault("target_host", "127.0.0.1:7233")
    config.update(
        data_converter=make_converter(settings), identity=identity or default_identity(), runtime=runtime
    )
    if lazy:
        return await Client.connect(**config, lazy=True, retry_config=_RETRY)
    end = asyncio.get_running_loop().time() + patience
    delay = 0.2
    while True:
        try:
            return await Client.connect(**config)
        except RuntimeError as error:
            if asyncio.get_running_loop().time() + delay > end:
                where = config["target_host"]
                raise EngineUnavailable(
                    f"Temporal at {where} cannot be reached; check TEMPORAL_ADDRESS and that it runs"
                ) from error
            log.info("waiting for Temporal", extra={"address": config["target_host"]})
            await asyncio.sleep(delay)
            delay = min(2.0, delay * 2)


def default_identity(role: str = "perdure") -> str:
    """Who this process is, in histories and in `attempts[]`."""
    return f"{role}@{socket.gethostname()}:{os.getpid()}"


async def bounded(call: Awaitable[_T], seconds: float = _CALL_SECONDS) -> _T:
    """Awaits a call to Temporal for at most `seconds`. Raises EngineUnavailable or EngineRefused.

    NOT_FOUND and "already started" pass through: they are answers.
    """
    try:
        async with asyncio.timeout(seconds):  # wait_for would lose a cancel that meets the answer
            return await call
    except TimeoutError as error:
        raise EngineUnavailable("Temporal did not answer in time") from error
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise
        if error.status is RPCStatusCode.INVALID_ARGUMENT or _too_large(error):
            raise EngineRefused(str(error)) from error
        raise EngineUnavailable(f"Temporal: {error.status.name.lower()}") from error
    except RuntimeError as error:  # a lazy client's failed connect
        raise EngineUnavailable("Temporal cannot be reached") from error


def _too_large(error: RPCError) -> bool:
    """The message itself is above gRPC's limit: it will not shrink, though the status says "exhausted"."""
    return error.status is RPCStatusCode.RESOURCE_EXHAUSTED and "larger than max" in str(error)


class TemporalGate:
    """What API and dispatcher ask of Temporal, each call bounded."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def start_task(self, task: TaskInput, *, seconds: float = 2.0) -> bool:
        """Starts a task's workflow under its own id. False when it exists already, which is success too.

        Raises EngineUnavailable (the outcome is unknown: try the same id again) or EngineRefused.
        """
        attributes = _search_attributes(task) if task.search_attributes else TypedSearchAttributes.empty
        try:
            await bounded(
                self.client.start_workflow(
                    names.WF_INFERENCE_TASK,
                    task,
                    id=task.task_id,
                    task_queue=names.CONTROL_QUEUE,
                    id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                    id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                    search_attributes=attributes,
                    static_summary=task_summary(task),
                    priority=Priority(priority_key=task.lane),
                ),
                seconds,
            )
        except WorkflowAlreadyStartedError:
            return False
        return True

    async def signal_cancel(self, task_id: str, reason: str | None) -> bool:
        """Signals `cancel`. False when Temporal knows no open run: that is no success."""
        return await self._signal(task_id, names.SIG_CANCEL, CancelRequest(reason=reason))

    async def signal_priority(self, task_id: str, priority: str) -> bool:
        """Signals `set_priority`. False when Temporal knows no open run."""
        return await self._signal(task_id, names.SIG_SET_PRIORITY, priority)

    async def _signal(self, task_id: str, name: str, arg: Any) -> bool:
        try:
            await bounded(self._handle(task_id).signal(name, arg))
        except RPCError:
            return False
        return True

    async def describe_beat(self, task_id: str, *, seconds: float = 2.0) -> Beat | None:
        """The last heartbeat of the attempt that runs, None when none does. Raises EngineUnavailable."""
        try:
            described = await bounded(self._handle(task_id).describe(), seconds)
        except RPCError:
            return None
        for pending in described.raw_description.pending_activities:
            if pending.activity_type.name == names.ACT_GENERATE and pending.HasField("heartbeat_details"):
                payloads = pending.heartbeat_details.payloads
                try:
                    (beat,) = await self.client.data_converter.decode(payloads, [Beat])
                except (ValidationError, ValueError):
                    return None
                return beat if isinstance(beat, Beat) else None
        return None

    async def ping(self, *, seconds: float = 1.0) -> bool:
        """Whether Temporal answers."""
        try:
            await bounded(
                self.client.service_client.check_health(timeout=timedelta(seconds=seconds)), seconds
            )
        except (EngineUnavailable, EngineRefused, RPCError):
            return False
        return True

    async def search_attributes_registered(self) -> bool:
        """Whether all our search attributes are. An unregistered one would refuse every start."""
        from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest

        listed = await bounded(
            self.client.operator_service.list_search_attributes(
                ListSearchAttributesRequest(namespace=self.client.namespace)
            )
        )
        return all(key.name in listed.custom_attributes for key in names.SEARCH_ATTRIBUTES)

    def _handle(self, task_id: str) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(task_id)


def _search_attributes(task: TaskInput) -> TypedSearchAttributes:
    from temporalio.common import SearchAttributePair as Pair

    return TypedSearchAttributes(
        [
            Pair(names.SA_STATUS, "QUEUED"),
            Pair(names.SA_USER, names.search_value(task.user_id)),
            Pair(names.SA_MODEL, names.search_value(task.model_id)),
            Pair(names.SA_TYPE, names.search_value(task.task_type)),
            Pair(names.SA_PRIORITY, str(task.priority)),
        ]
    )
