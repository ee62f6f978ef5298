"""How a command ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, Final, NoReturn

from perdure.client import ApiRefused, ClientError

DONE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
CANCELLED: Final = 3
UNREACHABLE: Final = 4
REFUSED: Final = 5
INTERRUPTED: Final = 130

_BY_STATUS: Final = {"FAILED": FAILED, "CANCELLED": CANCELLED}


class UsageError(Exception):
    """The command line cannot be carried out as it stands."""


def of_task(task: dict[str, Any]) -> int:
    """The exit code of a task's outcome."""
    return _BY_STATUS.get(task["status"], DONE)


def run(command: Coroutine[Any, Any, int]) -> NoReturn:
    """Runs a command to its exit code. What went wrong is one line on stderr."""
    try:
        code = asyncio.run(command)
    except UsageError as error:
        code = _say(error, USAGE)
    except ApiRefused as error:
        code = _say(error, REFUSED)
    except ClientError as error:
        code = _say(error, UNREACHABLE)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # `perdure list | head`
        sys.stderr.close()
        code = DONE
    raise SystemExit(code)


def _say(error: Exception, code: int) -> int:
    print(f"perdure: {error}", file=sys.stderr, flush=True)
    return code
