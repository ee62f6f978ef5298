"""`perdure dev` and `perdure demo`: runs the local stack until Ctrl-C or SIGTERM, and says what happens."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from perdure import demo
from perdure.embedded.datadir import DataDir
from perdure.embedded.plan import Options
from perdure.embedded.stack import START_SECONDS, Stack, StackError
from perdure.models import CatalogueError, load_catalogue

_DEMO_MARK = "demo.done"  # in the data folder: the first start's task has been run
_T = TypeVar("_T")


class StoppedError(Exception):
    """Somebody stopped us first."""


def say(line: str) -> None:
    """One line for people. A closed terminal is no reason to stop."""
    try:
        print(line, flush=True)
    except OSError:
        pass


def complain(error: Exception) -> None:
    print(f"perdure: {error}", file=sys.stderr, flush=True)


async def run(options: Options) -> int:
    """Brings the stack up, prints where everything is, and waits for the end."""
    began = time.monotonic()
    stack = Stack(options, say)
    async with stop_signals(stack) as stopped:
        try:
            await _unless(stopped, stack.up())
            say(_ready_block(stack, time.monotonic() - began))
            first = asyncio.create_task(_first_task(stack))
            await stopped.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        except StoppedError:
            pass
        except StackError as error:
            complain(error)
            return error.code
        finally:
            await stack.down()
    say("stopped")
    return 0


async def run_demo(options: Options) -> int:
    """One task on the stack that runs, else on one that lives as long as the task. 0 when it is COMPLETED."""
    data = DataDir(options.data_dir)
    try:
        report = await _demo_on_running(data) if data.in_use() else await _demo_on_own(Stack(options, say))
    except StoppedError:
        return 130
    except StackError as error:
        complain(error)
        return error.code
    except demo.DemoError as error:
        complain(error)
        return 1
    say(report.last_line)
    return 0 if report.completed else 1


async def _demo_on_running(data: DataDir) -> demo.Report:
    deadline = time.monotonic() + START_SECONDS  # it may be starting
    while (found := data.read_dev()) is None:
        if time.monotonic() > deadline or not data.in_use():
            raise demo.DemoError(f"the stack on {data.root} does not become ready; see {data.logs}")
        await asyncio.sleep(0.2)
    try:
        chosen = demo.choose_model(load_catalogue(Path(found["models"])))
    except CatalogueError as error:
        raise demo.DemoError(str(error)) from error
    return await _shown(demo.Target(found["urls"]["api"], found["urls"]["temporal_ui"], chosen, _api_key()))


async def _demo_on_own(stack: Stack) -> demo.Report:
    async with stop_signals(stack) as stopped:
        try:
            say("starting the stack, for this task only …")
            await _unless(stopped, stack.up())
            (stack.data.root / _DEMO_MARK).touch()
            return await _unless(stopped, _shown(_target(stack)))
        finally:
            await stack.down()


async def _shown(target: demo.Target) -> demo.Report:
    report = await demo.watch(target)
    for line in report.lines():
        say(line)
    return report


def _target(stack: Stack) -> demo.Target:
    model = demo.choose_model(stack.catalogue)
    return demo.Target(stack.urls["api"], stack.urls["temporal_ui"], model, _api_key())


def _api_key() -> str | None:
    return os.environ.get("PERDURE_API_KEY")


@asynccontextmanager
async def stop_signals(stack: Stack) -> AsyncIterator[asyncio.Event]:
    """An event that Ctrl-C, SIGTERM or a closed terminal sets. The second signal kills every child."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopped.is_set():
            stack.kill()
            return
        stopped.set()
        say("stopping (once more to kill)")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine returns. Raises StoppedError when the stop comes first, and cancels it."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StoppedError
        return task.result()
    finally:
        stop.cancel()
        task.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


def _ready_block(stack: Stack, seconds: float) -> str:
    rows = [
        ("API", stack.urls["api"]),
        ("OpenAPI", stack.urls["openapi"]),
        ("Temporal UI", stack.urls["temporal_ui"]),
        ("Models", ", ".join(stack.catalogue.models) or "none"),
    ]
    if "model" in stack.urls:
        rows.append(("Model server", stack.urls["model"]))
    rows += [("Data and logs", str(stack.data.root)), ("Stop", "Ctrl-C")]
    lines = [f"  {name:<14} {value}" for name, value in rows]
    return "\n".join(["", f"Perdure is ready ({seconds:.1f} s)", "", *lines, ""])


async def _first_task(stack: Stack) -> None:
    """One real task on the first start, so that there is something to see."""
    mark = stack.data.root / _DEMO_MARK
    if stack.options.models is not None or mark.exists():
        return
    mark.touch()
    try:
        await demo.first_task(_target(stack), say)
    except demo.DemoError as error:
        say(f"the first task could not be run: {error}")
