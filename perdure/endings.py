"""How a command begins and ends: settings from the environment, mistakes in one line, exit codes."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from perdure.settings import WorkerSettings

    _S = TypeVar("_S", bound=WorkerSettings)


def leave(code: object) -> NoReturn:
    """Ends the process. With the Temporal SDK loaded, without tearing the interpreter down.

    Threads of the SDK's core may call into an interpreter that is going away, which aborts the process (seen
    after a connect that failed). What is registered to run at exit runs.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if "temporalio.bridge.temporal_sdk_bridge" not in sys.modules:
        raise SystemExit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed by the other side
            pass
    os._exit(code if isinstance(code, int) else 0)


def fail(message: object, code: int = 2) -> NoReturn:
    """Ends with one line on stderr. Code 2 is a mistake in the configuration, 1 a fault of the moment."""
    print(f"perdure: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns what a user can mend into one line and an exit code. The rest is a bug, with its traceback."""
    try:
        yield
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        fail(_innermost(error), code)


def exit_code(error: BaseException) -> int | None:
    """2 for a mistake in the configuration, 1 for what is away or taken now, None for anything else.

    Told by name: to import the store for its errors would load a database driver into GPU workers.
    """
    error = _innermost(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"StoreError", "EngineUnavailable", "PortTaken"}:
        return 1
    if "SecretsUnavailable" in names:
        return 2
    ours = type(error).__module__.split(".")[0] in ("perdure", "api", "workers", "activities")
    return 2 if ours and isinstance(error, ValueError) else None


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def settings(kind: type[_S]) -> _S:
    """Settings from the environment; a mistake ends the command."""
    from pydantic import ValidationError

    try:
        return kind()
    except ValidationError as error:
        fail("; ".join(f"{_variable(e['loc'])}: {_reason(e)}" for e in error.errors()))


def _variable(place: tuple[int | str, ...]) -> str:
    return f"PERDURE_{str(place[0]).upper()}" if place else "settings"


def _reason(error: Any) -> str:
    return "is not set" if error["type"] == "missing" else str(error["msg"])
