"""Every Prometheus family of the product, in one object per process.

    metrics = Metrics(catalogue)
    metrics.tasks_submitted.labels(priority="HIGH", task_type="chat").inc()

Names are public (DESIGN §11). Every process exposes every family; known label sets stand at zero from the
start, so that the first failure is an increase. Label values come from the configuration: any other value
counts as `other`, whoever passes it, so no caller can make a series.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.process_collector import ProcessCollector

from perdure.contracts import AttemptOutcome
from perdure.models import Catalogue
from perdure.task.errors import ErrorCode
from perdure.task.states import CLASSES, FINAL, Status

OTHER: Final = "other"

# Two hours at the top, since tasks are long; an edge on each alert threshold (30 s); fine at the bottom,
# since the same edges serve HTTP.
TIME_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
)  # fmt: skip
TRIES_BUCKETS: Final = tuple(float(n) for n in range(1, 14))  # five quick tries and eight slow ones

# The rows' words, and two that say more of a failed attempt to whoever watches the workers.
ATTEMPT_OUTCOMES: Final[tuple[str, ...]] = (*get_args(AttemptOutcome), "refused", "timed_out")
TOKEN_KINDS: Final = ("prompt", "completion", "discarded")
CALLBACK_TRY_OUTCOMES: Final = ("success", "http_error", "timeout", "connect_error", "blocked", "error")
CALLBACK_DELIVERY_OUTCOMES: Final = ("delivered", "dead", "suspended")
REPAIR_KINDS: Final = ("committed", "terminated", "restarted", "failed", "cancel_signalled", "callback")
SLOT_STATES: Final = ("busy", "free")
HTTP_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
STATUS_CLASSES: Final = ("2xx", "3xx", "4xx", "5xx")
UNMATCHED: Final = "unmatched"  # the route label of a path that no route serves


class _Bounded:
    """Maps label values that the configuration does not know to `other`, and makes the known sets at zero."""

    _known: dict[str, frozenset[str]]
    _labelnames: Sequence[str]

    def know(self, **values: Iterable[str]) -> Self:
        """Sets the label values there may be, and makes every combination. Returns itself."""
        self._known = {name: frozenset(values[name]) for name in self._labelnames}
        for combination in itertools.product(*(values[name] for name in self._labelnames)):
            super().labels(*combination)  # type: ignore[misc]
        return self

    def labels(self, *args: object, **kwargs: object) -> Any:
        """The child of these label values, by position or by name."""
        given = dict(zip(self._labelnames, args, strict=False)) | kwargs
        bounded = {name: self._bound(name, value) for name, value in given.items()}
        return super().labels(**bounded)  # type: ignore[misc]

    def _bound(self, name: str, value: object) -> str:
        text = str(value)
        return text if text in self._known.get(name, ()) else OTHER


class BoundedCounter(_Bounded, Counter):
    """A counter whose label values are bounded."""


class BoundedGauge(_Bounded, Gauge):
    """A gauge whose label values are bounded."""


class BoundedHistogram(_Bounded, Histogram):
    """A histogram whose label values are bounded."""


class Metrics:
    """All families on one registry (a fresh one where none is given).

    Gauges of tasks, queues, slots and waiting callbacks are filled from SQL on the API's page; workers show
    them at zero. Durations are seconds.
    """

    def __init__(self, catalogue: Catalogue, registry: CollectorRegistry | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # `_created` doubles the page and no rule reads it
        self.catalogue = catalogue
        self.registry = registry or CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_*: CPU, memory, file descriptors
        self._tasks(catalogue)
        self._attempts(catalogue)
        self._callbacks()
        self._service()

    def _counter(self, name: str, text: str, **known: Iterable[str]) -> BoundedCounter:
        labels = tuple(known)
        return BoundedCounter(f"perdure_{name}", text, labels, registry=self.registry).know(**known)

    def _gauge(self, name: str, text: str, **known: Iterable[str]) -> BoundedGauge:
        labels = tuple(known)
        return BoundedGauge(f"perdure_{name}", text, labels, registry=self.registry).know(**known)

    def _times(self, name: str, text: str) -> Histogram:
        return Histogram(f"perdure_{name}_seconds", text, buckets=TIME_BUCKETS, registry=self.registry)

    def _tasks(self, catalogue: Catalogue) -> None:
        types = [*catalogue.task_types, OTHER]
        pools = list(catalogue.pools)
        final = [status for status in Status if status in FINAL]
        self.tasks_submitted = self._counter(
            "tasks_submitted", "Tasks accepted.", priority=CLASSES, task_type=types
        )
        self.tasks_finished = self._counter(
            "tasks_finished", "Tasks that reached a final state.", status=final, task_type=types
        )
        self.tasks = self._gauge("tasks", "Tasks by state, from the rows.", status=list(Status))
        self.queue_depth = self._gauge(
            "queue_depth",
            "Tasks that wait for a slot (PENDING and due, or QUEUED).",
            pool=pools,
            priority=CLASSES,
        )
        self.queue_oldest_wait = self._gauge(
            "queue_oldest_wait_seconds",
            "How long the oldest waiting task has waited.",
            pool=pools,
            priority=CLASSES,
        )
        self.queue_running = self._gauge(
            "queue_running", "Tasks that run (PROCESSING).", pool=pools, priority=CLASSES
        )
        self.model_waiting = self._gauge(
            "model_waiting", "Tasks that wait for a slot, by model.", model=list(catalogue.models)
        )
        self.model_workers = self._gauge(
            "model_workers", "Live workers that serve the model.", model=list(catalogue.models)
        )
        self.model_breakers_open = self._gauge(
            "model_breakers_open",
            "Live workers whose breaker for the model is not closed: its server refuses.",
            model=list(catalogue.models),
        )
        self.pool_slots = self._gauge(
            "pool_slots", "Slots of the pool's live workers.", pool=pools, state=SLOT_STATES
        )
        self.task_queue_wait = self._times(
            "task_queue_wait", "Consumption delay: created (or not_before) to the first attempt's start."
        )
        self.task_execution = self._times("task_execution", "First attempt's start to the final state.")
        self.task_total = self._times("task_total", "Created (or not_before) to the final state.")

    def _attempts(self, catalogue: Catalogue) -> None:
        self.attempts = self._counter("attempts", "Attempts that ended.", outcome=ATTEMPT_OUTCOMES)
        self.attempt_faults = self._counter(
            "attempt_faults",
            "Attempts that ended with a fault, by error code.",
            model=[*catalogue.models, OTHER],
            code=list(ErrorCode),
        )
        self.tokens = self._counter(
            "tokens", "Tokens read and made.", model=[*catalogue.models, OTHER], kind=TOKEN_KINDS
        )
        self.time_to_first_token = self._times(
            "time_to_first_token", "Request to the model server until its first output."
        )

    def _callbacks(self) -> None:
        self.callback_tries = self._counter(
            "callback_tries", "Tries to deliver a callback.", outcome=CALLBACK_TRY_OUTCOMES
        )
        self.callback_deliveries = self._counter(
            "callback_deliveries", "Callbacks that were settled.", outcome=CALLBACK_DELIVERY_OUTCOMES
        )
        self.callback_tries_per_delivery = Histogram(
            "perdure_callback_tries_per_delivery",
            "Tries that a settled callback took.",
            buckets=TRIES_BUCKETS,
            registry=self.registry,
        )
        self.callback_duration = self._times("callback_duration", "One try, connect to answer.")
        self.callbacks_waiting = Gauge(
            "perdure_callbacks_waiting", "Callbacks not yet delivered or dead.", registry=self.registry
        )

    def _service(self) -> None:
        self.reconciler_repairs = self._counter(
            "reconciler_repairs", "Rows that the reconciler settled.", kind=REPAIR_KINDS
        )
        self.workflows_stuck = Counter(
            "perdure_workflows_stuck",
            "Looks at a running workflow that cannot go on: its workflow task fails again and again.",
            registry=self.registry,
        )
        self.reconciler_last_run = Gauge(
            "perdure_reconciler_last_run_timestamp_seconds",
            "When this process last finished a reconciler pass (Unix time; 0: never).",
            registry=self.registry,
        )
        self.sse_streams = Gauge("perdure_sse_streams", "Open event streams.", registry=self.registry)
        self.http_requests = BoundedCounter(
            "perdure_http_requests",
            "HTTP requests by route template.",
            ("method", "route", "status"),
            registry=self.registry,
        ).know(method=(), route=(), status=())
        self.http_request_duration = BoundedHistogram(
            "perdure_http_request_duration_seconds",
            "HTTP request to the end of its reply.",
            ("method", "route"),
            buckets=TIME_BUCKETS,
            registry=self.registry,
        ).know(method=(), route=())
        self.stats_up = Gauge(
            "perdure_stats_up",
            "1 while the gauges that come from SQL are fresh; 0 where they are not read or Postgres is away.",
            registry=self.registry,
        )
        self.build_info = Gauge(
            "perdure_build_info",
            "1; the labels say what runs.",
            ("version", "python"),
            registry=self.registry,
        )
        self.build_info.labels(importlib.metadata.version("perdure"), platform.python_version()).set(1)

    def know_routes(self, routes: Iterable[tuple[str, str]]) -> None:
        """Makes the HTTP series of these (method, route template) pairs at zero. Any other pair is counted
        as `other` or `unmatched`."""
        pairs = [*routes, (OTHER, UNMATCHED)]
        methods = {method for method, _ in pairs} | set(HTTP_METHODS)
        templates = {route for _, route in pairs}
        self.http_requests._known = {
            "method": frozenset(methods),
            "route": frozenset(templates),
            "status": frozenset(STATUS_CLASSES),
        }
        self.http_request_duration._known = {"method": frozenset(methods), "route": frozenset(templates)}
        for method, route in pairs:
            self.http_request_duration.labels(method, route)
            for status in STATUS_CLASSES:
                self.http_requests.labels(method, route, status)

    def observe_http(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Counts one HTTP request. `route` is the template (`/v1/tasks/{task_id}`), None for an unknown path;
        `seconds` until the end of the reply."""
        template = route or UNMATCHED
        self.http_requests.labels(method, template, f"{status // 100}xx").inc()
        self.http_request_duration.labels(method, template).observe(seconds)
