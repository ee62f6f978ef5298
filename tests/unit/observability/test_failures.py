"""What Temporal is told of an exception: everything but its secrets, through the whole chain of causes."""

from __future__ import annotations

import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.exceptions import ApplicationError

from perdure.observability.failures import RedactingFailureConverter
from perdure.settings import WorkerSettings
from perdure.temporal import make_converter

CANARY = "F41lureC4n4ry"


def chain() -> ApplicationError:
    """An error with a cause, each with a secret in its text and in its traceback."""
    try:
        try:
            raise ValueError(f"1 error\n  input_value='{CANARY}', input_type=str")
        except ValueError as cause:
            raise ApplicationError(
                f"POST https://u:{CANARY}@h/x?token={CANARY} failed", {"kept": 1}, type="kind"
            ) from cause
    except ApplicationError as error:
        return error


def test_no_secret_stands_in_a_failure_or_its_causes() -> None:
    converter = make_converter(WorkerSettings())
    failure = Failure()
    converter.failure_converter.to_failure(chain(), converter.payload_converter, failure)
    assert CANARY not in str(failure)
    assert failure.message == "POST https://h/x failed"
    assert "test_failures.py" in failure.stack_trace
    assert failure.cause.application_failure_info.type == "ValueError"
    assert failure.application_failure_info.type == "kind"
    back = converter.failure_converter.from_failure(failure, converter.payload_converter)
    assert isinstance(back, ApplicationError)
    assert back.details[0] == {"kept": 1}


@pytest.mark.parametrize("error", [RuntimeError(""), KeyboardInterrupt(), BaseException("x" * 100_000)])
def test_any_exception_becomes_a_failure(error: BaseException) -> None:
    converter = make_converter(WorkerSettings())
    failure = Failure()
    RedactingFailureConverter().to_failure(error, converter.payload_converter, failure)
    assert failure.HasField("application_failure_info")
