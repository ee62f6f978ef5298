"""Log lines: one JSON object each, UTC, whatever a message holds, and no secret in any part of it."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from perdure.observability.logs import JsonFormatter, bind, setup_logging
from perdure.settings import DatabaseSettings, WorkerSettings

CANARY = "L0gC4n4ryWm9"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where our handler writes; the process's logging is put back afterwards."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers = root.handlers[:]
    known = [root, *(one for one in root.manager.loggerDict.values() if isinstance(one, logging.Logger))]
    levels = [(one, one.level) for one in known]
    yield io.StringIO()
    for one in root.manager.loggerDict.values():
        if isinstance(one, logging.Logger):
            one.setLevel(logging.NOTSET)  # those that the test made
    for one, level in levels:
        one.setLevel(level)
    root.handlers[:] = handlers
    sys.excepthook = hook
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    """What was written, one object a line."""
    return [json.loads(line) for line in stream.getvalue().split("\n") if line]


def test_a_line_has_the_fields_in_utc(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(), "gpu:local:0", stream=stream)
    with bind(request_id="req_1", task_id="task_1", attempt=2, trace_id="ab" * 16):
        logging.getLogger("perdure.demo").info("task submitted", extra={"model": "m", "tokens": 7})
    (line,) = lines(stream)
    time = datetime.fromisoformat(str(line.pop("time")))
    assert time.utcoffset() == timedelta(0)
    assert line == {
        "level": "INFO",
        "event": "task submitted",
        "logger": "perdure.demo",
        "request_id": "req_1",
        "task_id": "task_1",
        "attempt": 2,
        "worker": "gpu:local:0",
        "trace_id": "ab" * 16,
        "model": "m",
        "tokens": 7,
    }


def test_bound_fields_end_with_their_block(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(), "api", stream=stream)
    with bind(task_id="task_1"):
        pass
    logging.getLogger("x").warning("later")
    assert "task_id" not in lines(stream)[0]


@given(st.text(max_size=80), st.text(max_size=40))
def test_any_text_is_one_line_of_printable_ascii(message: str, value: str) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "%s", "args": (message,), "request_id": value})
    line = JsonFormatter("api").format(record)
    assert line.isascii()
    assert line.isprintable()
    assert isinstance(json.loads(line)["event"], str)


FORGERIES = [
    "a\r\nERROR fake",
    "a\x85ERROR fake",
    "a\u2028ERROR fake",
    "\x1b[31mred\x1b[0m",
    "\x00\x7f\ud800",
]


@pytest.mark.parametrize("text", FORGERIES)
@pytest.mark.parametrize("form", ["json", "console"])
def test_no_text_forges_a_line(stream: io.StringIO, text: str, form: str) -> None:
    setup_logging(WorkerSettings(log_format=form), "api", stream=stream)  # type: ignore[arg-type]
    with bind(request_id=text):
        logging.getLogger("x").info("upstream said %s", text, extra={"model": text, text: 1})
    written = stream.getvalue()
    assert len(written.splitlines()) == 1
    assert written[:-1].isprintable()


def test_a_console_traceback_is_indented_and_clean(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(log_format="console"), "api", stream=stream)
    try:
        raise ValueError("first\n12:00:00.000 ERROR forged\x1b[2J")
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert "failed" in first
    assert all(line.startswith("    | ") for line in rest)
    assert "\x1b" not in stream.getvalue()


def test_secrets_are_gone_from_message_args_extras_and_tracebacks(stream: io.StringIO) -> None:
    settings = DatabaseSettings(
        database_url=SecretStr(f"postgresql://perdure:pw{CANARY}@db/perdure"),
        callback_secret=SecretStr(f"cb-{CANARY}"),
        log_level="DEBUG",
    )
    setup_logging(settings, "api", stream=stream)
    log = logging.getLogger("x")
    log.debug("Authorization: Bearer %s", CANARY)
    log.info("secret cb-%s", CANARY, extra={"api_key": CANARY, "detail": {"url": f"https://h/?t={CANARY}"}})
    log.info({"password": CANARY})
    try:
        raise RuntimeError(f"cannot reach https://h/p?token={CANARY}, password pw{CANARY}")
    except RuntimeError:
        log.exception("failed", stack_info=True)
    assert len(lines(stream)) == 4
    assert CANARY not in stream.getvalue()


def test_arguments_that_do_not_fit_lose_no_line_and_are_not_shown() -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "%d and %d", "args": (CANARY,)})
    line = json.loads(JsonFormatter("api").format(record))
    assert line["event"] == "%d and %d (its arguments do not fit)"


def test_libraries_that_log_urls_and_statements_are_quiet_at_debug(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(log_level="DEBUG"), "api", stream=stream)
    for name in ("httpx", "httpcore.connection", "sqlalchemy.engine.Engine", "uvicorn.access"):
        logging.getLogger(name).info("GET https://h/secret")
    logging.getLogger("temporalio.worker._activity").debug("Completing activity with completion: text")
    assert lines(stream) == []
    logging.getLogger("temporalio.activity").debug("ours")
    assert len(lines(stream)) == 1


def test_a_quiet_library_is_no_louder_than_the_level_asks(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(log_level="ERROR"), "api", stream=stream)
    for name in ("httpx", "temporalio.client", "asyncio"):
        logging.getLogger(name).warning("noise")
    assert lines(stream) == []


def test_warnings_and_uncaught_exceptions_become_lines(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(), "api", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("odd thing", stacklevel=1)
    error = RuntimeError(f"password={CANARY}")
    sys.excepthook(RuntimeError, error, None)
    warned, uncaught = lines(stream)
    assert "odd thing" in str(warned["event"])
    assert uncaught["event"] == "uncaught exception"
    assert CANARY not in stream.getvalue()


def test_a_second_setup_replaces_the_first(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(), "one", stream=stream)
    setup_logging(WorkerSettings(), "two", stream=stream)
    logging.getLogger("x").info("hello")
    assert [line["worker"] for line in lines(stream)] == ["two"]


def test_a_level_below_the_set_one_is_not_written(stream: io.StringIO) -> None:
    setup_logging(WorkerSettings(log_level="WARNING"), "api", stream=stream)
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]
