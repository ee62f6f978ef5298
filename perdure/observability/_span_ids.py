"""Span ids that can be chosen: the task's span has an id made from the task id (see `traces`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

_forced: ContextVar[int | None] = ContextVar("forced_span_id", default=None)


class SpanIds(RandomIdGenerator):
    """Random ids, but for the one span that is opened inside `forced`."""

    def generate_span_id(self) -> int:
        """The chosen id if there is one, else a random one."""
        return _forced.get() or super().generate_span_id()

    @contextmanager
    def forced(self, span_id: int) -> Iterator[None]:
        """The span opened inside gets this id."""
        token = _forced.set(span_id)
        try:
            yield
        finally:
            _forced.reset(token)
