"""Failures as Temporal keeps them: without secrets, for everybody who may read a history.

An exception's text and traceback would go into the history as they are, with what a library puts into its
messages: a URL with its token, an input it refuses.
"""

from __future__ import annotations

from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultFailureConverter, PayloadConverter

from perdure.observability.redact import redact


class RedactingFailureConverter(DefaultFailureConverter):
    """The SDK's own converter, with the messages and stack traces of the whole chain redacted."""

    def to_failure(
        self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure
    ) -> None:
        """Fills `failure` from an exception and its causes."""
        super().to_failure(exception, payload_converter, failure)
        link = failure
        while True:
            link.message = redact(link.message)
            link.stack_trace = redact(link.stack_trace)
            if not link.HasField("cause"):
                return
            link = link.cause
