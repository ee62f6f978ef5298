"""Logs: one JSON object a line, UTC, clean of secrets; a readable form for a terminal.

    setup_logging(settings, "api")
    logging.getLogger(__name__).info("task submitted", extra={"task_id": task_id})
    with bind(request_id=request_id): ...          every line inside carries it

Fields: time, level, event, logger, request_id, task_id, attempt, worker, trace_id, and what `extra` holds;
those without a value are left out. In workflows use `workflow.logger`: it is silent while history replays.
Whatever a message holds, a line stays a line: JSON escapes everything that is not printable ASCII.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, TextIO

import temporalio.activity
import temporalio.workflow
from pydantic import SecretStr

from perdure.observability.redact import protect, redact, redact_value
from perdure.settings import WorkerSettings

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
task_id: ContextVar[str | None] = ContextVar("task_id", default=None)
attempt: ContextVar[int | None] = ContextVar("attempt", default=None)
trace_id: ContextVar[str | None] = ContextVar("trace_id", default=None)
_CONTEXT: Final[dict[str, ContextVar[Any]]] = {
    "request_id": request_id,
    "task_id": task_id,
    "attempt": attempt,
    "trace_id": trace_id,
}

_FIRST: Final = ("time", "level", "event", "logger", "request_id", "task_id", "attempt", "worker", "trace_id")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TEMPORAL: Final = frozenset({"temporal_workflow", "temporal_activity", "temporal_log"})
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MAX_EXCEPTION: Final = 32_768  # characters of a traceback
# Loggers that write full URLs, statements with their values, or payloads below these levels.
_QUIET: Final = {
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "sqlalchemy.engine": logging.WARNING,
    "sqlalchemy.pool": logging.WARNING,
    "asyncio": logging.WARNING,
    "urllib3": logging.WARNING,
    "opentelemetry": logging.WARNING,
    "temporalio": logging.INFO,  # its worker writes whole results at DEBUG
}
# Their per-event lines are our own, better ones.
_OFF: Final = ("uvicorn.access",)


@contextmanager
def bind(
    *,
    request_id: str | None = None,
    task_id: str | None = None,
    attempt: int | None = None,
    trace_id: str | None = None,
) -> Iterator[None]:
    """Puts these fields on every line logged inside, also by tasks started there. None changes nothing."""
    values = {"request_id": request_id, "task_id": task_id, "attempt": attempt, "trace_id": trace_id}
    tokens = [
        (_CONTEXT[name], _CONTEXT[name].set(value)) for name, value in values.items() if value is not None
    ]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


def setup_logging(settings: WorkerSettings, process: str, *, stream: TextIO | None = None) -> None:
    """Sends every logger to `stream` (stderr) in our form, and protects the settings' secrets.

    `process` becomes the field `worker` (`api`, `control`, `gpu:local:0`). Called once, by a composition
    root; a second call replaces the first.
    """
    protect_settings(settings)
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(
        JsonFormatter(process) if settings.log_format == "json" else ConsoleFormatter(process)
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, _Handler):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(settings.log_level)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    for name in ("temporalio.activity", "temporalio.workflow"):  # our own lines, through the SDK's loggers
        logging.getLogger(name).setLevel(root.level)
    for name in _OFF:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    for name in ("uvicorn", "uvicorn.error"):  # uvicorn's own handlers would write a second, plain line
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    temporalio.activity.logger.activity_info_on_message = False  # the same facts come as fields
    temporalio.workflow.logger.workflow_info_on_message = False
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def protect_settings(settings: WorkerSettings) -> None:
    """Protects every secret that the settings hold, and the password inside a database URL."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            secret = value.get_secret_value()
            protect(secret, *secret.split(","))
            password = re.match(r"[a-z0-9+]+://[^:@/]*:([^@/]+)@", secret)
            protect(password[1] if password else None)


def fields(record: logging.LogRecord, process: str) -> dict[str, Any]:
    """A record as the fields of one line, redacted, the fixed ones first."""
    data: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "level": record.levelname,
        "event": redact_value(_message(record)),
        "logger": record.name,
        "worker": process,
    }
    data.update({name: value for name, variable in _CONTEXT.items() if (value := variable.get()) is not None})
    data.update(_temporal_fields(record, data))
    for name, value in vars(record).items():
        if name in _STANDARD or name in _TEMPORAL or value is None:
            continue
        key = name if name not in {"time", "level", "event", "logger"} else f"extra_{name}"
        data[key] = redact_value({name: value})[name]  # the name decides too: `api_key` is hidden
    if record.exc_info and record.exc_info[0]:
        data["exception"] = _exception_text(logging.Formatter().formatException(record.exc_info))
    elif record.exc_text:
        data["exception"] = _exception_text(record.exc_text)
    if record.stack_info:
        data["stack"] = _exception_text(record.stack_info)
    first = {name: data[name] for name in _FIRST if name in data}
    return first | data


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in printable ASCII."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = json.dumps(fields(record, self.process), ensure_ascii=True, separators=(",", ":"), default=str)
        return line.replace("\x7f", "\\u007f")


class ConsoleFormatter(logging.Formatter):
    """A readable line; a traceback follows it indented, so that no text can pass for a line of its own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        data = fields(record, self.process)
        time, level, event = data.pop("time"), data.pop("level"), data.pop("event")
        blocks = [data.pop(name) for name in ("exception", "stack") if name in data]
        worker = data.pop("worker")
        rest = " ".join(f"{_flat(name)}={_flat(value)}" for name, value in data.items())
        lines = [f"{time[11:23]} {level:<7} {_flat(worker)} {_flat(event)}  {rest}".rstrip()]
        for block in blocks:
            lines += [f"    | {_flat(line)}" for line in block.splitlines()]
        return "\n".join(lines)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines; a record that cannot be formatted becomes a line too, without its arguments."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        kind = sys.exc_info()[0]
        if kind is not None and issubclass(kind, OSError | ValueError) and self.stream.closed:
            return
        where = f"{record.name}:{record.lineno}"
        line = {"level": "ERROR", "event": "log record could not be written", "logger": where}
        try:
            self.stream.write(json.dumps(line | {"error": kind.__name__ if kind else ""}) + "\n")
        except (OSError, ValueError):
            pass  # the stream itself is gone; there is nowhere left to say so


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # wrong arguments must not lose the event; they are not shown, since they may be secret
        return f"{record.msg} (its arguments do not fit)"


def _temporal_fields(record: logging.LogRecord, data: dict[str, Any]) -> dict[str, Any]:
    """The task of a line that came through the SDK's activity or workflow logger."""
    info = getattr(record, "temporal_activity", None) or getattr(record, "temporal_workflow", None)
    if not isinstance(info, dict):
        return {}
    found: dict[str, Any] = {}
    workflow = info.get("workflow_id")
    if isinstance(workflow, str):
        found["task_id" if workflow.startswith("task_") else "workflow_id"] = workflow
    if info.get("activity_type"):
        found["activity"] = info["activity_type"]
    return {name: value for name, value in found.items() if name not in data}


def _exception_text(text: str) -> str:
    text = redact(text)
    return (
        text
        if len(text) <= _MAX_EXCEPTION
        else text[: _MAX_EXCEPTION // 2] + "\n…\n" + text[-_MAX_EXCEPTION // 2 :]
    )


def _flat(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("perdure").critical("uncaught exception", exc_info=(kind, error, trace))
