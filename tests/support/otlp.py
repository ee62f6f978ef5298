"""An OTLP/HTTP collector in the test's process, on a real socket.

with Collector() as collector:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
    ...
    spans = collector.wait_for(lambda spans: "task" in {one.name for one in spans})
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """One received span. Ids are hex; times are nanoseconds; `failed` is the status ERROR."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    failed: bool
    message: str
    attributes: dict[str, Any] = field(default_factory=dict)


class Collector:
    """Listens on loopback and keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""  # everything received, for canary searches
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: object) -> None:
                pass  # requests are asserted on, not printed

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """What OTEL_EXPORTER_OTLP_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(self, enough: Callable[[list[Span]], bool], seconds: float = 20) -> list[Span]:
        """The spans once `enough` says so. Raises AssertionError with what came instead."""
        end = time.monotonic() + seconds
        with self._changed:
            while not enough(self.spans):
                if not self._changed.wait(max(0, end - time.monotonic())) and time.monotonic() >= end:
                    raise AssertionError(f"spans so far: {[one.name for one in self.spans]}")
            return list(self.spans)

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = []
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                found += [_span(service, one) for one in scope.spans]
        with self._changed:
            self.raw += body
            self.spans += found
            self._changed.notify_all()


def _span(service: str, one: Any) -> Span:
    return Span(
        service=service,
        name=one.name,
        kind=one.kind,
        trace_id=one.trace_id.hex(),
        span_id=one.span_id.hex(),
        parent_id=one.parent_span_id.hex(),
        start=one.start_time_unix_nano,
        end=one.end_time_unix_nano,
        failed=one.status.code == 2,
        message=one.status.message,
        attributes=_attributes(one.attributes),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
