"""The Temporal SDK's own metrics, brought to the page of the process.

    sdk = make_runtime()                     a composition root, once per process
    client = await connect(settings, runtime=sdk.runtime)
    sdk.text()                               Prometheus text of `temporal_*`, for `page.Exposition`

The SDK aggregates in its own threads and serves the figures on a loopback port that we read at a scrape. That
costs no Python per update and loses none, unlike draining a buffer of updates, and the SDK's families keep
their own label sets. Its log lines go to our logger, so that they are JSON and clean as well.
"""

from __future__ import annotations

import http.client
import logging
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from temporalio.runtime import (
    LogForwardingConfig,
    LoggingConfig,
    PrometheusConfig,
    Runtime,
    TelemetryConfig,
    TelemetryFilter,
)

from perdure.observability.metrics import TIME_BUCKETS

log = logging.getLogger(__name__)

_TRIES: Final = 5  # for a free port: another process may take it between our look and the SDK's bind
_READ_SECONDS: Final = 2.0
# Edges in seconds for the waits that an operator reads; the SDK's own end at ten seconds or so.
_LATENCIES: Final = (
    "activity_schedule_to_start_latency",
    "activity_execution_latency",
    "activity_succeed_endtoend_latency",
    "workflow_endtoend_latency",
    "workflow_task_schedule_to_start_latency",
    "request_latency",
)
_BUCKETS: Final = dict.fromkeys(_LATENCIES, TIME_BUCKETS)


@dataclass(frozen=True)
class SdkMetrics:
    """The runtime to hand to `connect`, and the loopback port of its figures."""

    runtime: Runtime
    port: int

    def text(self) -> bytes:
        """The SDK's metrics as Prometheus text; empty when they cannot be read. Blocks for 2 s at most."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_READ_SECONDS)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            log.warning("the Temporal SDK's metrics cannot be read", extra={"error": type(error).__name__})
            return b""
        finally:
            connection.close()


def make_runtime(heartbeat: timedelta = timedelta(seconds=60)) -> SdkMetrics:
    """A runtime whose metrics can be read and whose log goes to our logger.

    `heartbeat`: how often a worker tells the server that it lives. They are never off: the server pushes
    cancels over them. Raises OSError when no loopback port can be had.
    """
    logging_config = LoggingConfig(
        filter=TelemetryFilter(core_level="WARN", other_level="ERROR"),
        forwarding=LogForwardingConfig(logger=logging.getLogger("temporalio.core")),
    )
    for _ in range(_TRIES):
        port = _free_port()
        metrics = PrometheusConfig(
            bind_address=f"127.0.0.1:{port}",
            counters_total_suffix=True,
            unit_suffix=True,
            durations_as_seconds=True,
            histogram_bucket_overrides=_BUCKETS,
        )
        try:
            runtime = Runtime(
                telemetry=TelemetryConfig(logging=logging_config, metrics=metrics),
                worker_heartbeat_interval=heartbeat,
            )
        except ValueError as error:  # what the SDK raises for a port in use
            log.debug("port taken, trying another", extra={"port": port, "error": str(error)})
            continue
        return SdkMetrics(runtime, port)
    raise OSError("no free loopback port for the Temporal SDK's metrics")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
