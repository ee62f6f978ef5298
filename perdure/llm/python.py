"""The `python` executor: an async generator of yours, in the worker's own process.

    async def score(params, checkpoint, report):
        done = checkpoint.state["page"] if checkpoint else 0
        for number, page in enumerate(params["pages"][done:], done):
            yield f"page {number}: {await rate(page)}\\n"        text, appended to the result
            report(100 * (number + 1) // len(params["pages"]), state={"page": number + 1})

`import_path = "package.module:function"` in models.toml names it. It may yield text, a number (progress,
0-99), a `Delta`, or a dict with a Delta's fields (`{"text": "...", "state": {...}}` sets both at once);
`report(progress, message, state=...)` tells progress from anywhere, other threads included. The last yield
may hold `result`; without one the text is the result. Returning normally is the proof of success.

`state` is the checkpoint: any JSON up to 128 KiB. A later attempt gets the last Beat as `checkpoint`, with
its `state` and its `text` exactly as they stood when that state was reported; text that came after is dropped
and made again. A function that never reports a state starts over, with `checkpoint` None.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import threading
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import orjson
from pydantic import ValidationError

from perdure.contracts import Beat, Params, TaskResult
from perdure.llm.base import Delta, Job
from perdure.task.errors import ErrorCode, TaskFault
from perdure.task.text import clean, clean_json, one_line

log = logging.getLogger(__name__)

MAX_STATE_BYTES: Final = 128 * 1024
Function = Callable[[Params, Beat | None, "Report"], AsyncGenerator[Any, None]]


class BadFunctionError(ValueError):
    """import_path names nothing usable; the message says why."""


def load_function(import_path: str) -> Function:
    """The async generator function of `package.module:function`. Raises BadFunctionError."""
    module, _, name = import_path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # an import runs any code, so anything may come out of it
        reason = f"{type(error).__name__}: {one_line(str(error), 200)}"
        raise BadFunctionError(f"import_path '{import_path}' cannot be imported ({reason})") from error
    if not inspect.isasyncgenfunction(found):
        raise BadFunctionError(
            f"import_path '{import_path}' is no async generator function; write `async def` and `yield`"
        )
    return found  # type: ignore[no-any-return] # checked by inspect


class Report:
    """What a function calls to tell how far it is. Safe from any thread."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def __call__(self, progress: int | None = None, message: str | None = None, *, state: Any = None) -> None:
        """`progress` 0-99; `message` up to 500 characters; `state` any JSON, the checkpoint from now on."""
        self._inbox.put(_delta({"progress": progress, "message": message, "state": state}))


class PythonExecutor:
    """Runs one function. `name` is the model's id."""

    def __init__(self, name: str, function: Function, path: str) -> None:
        self._name = name
        self._function = function
        self._path = path

    async def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Yields what the function yields and reports. Raises TaskFault (`internal` for its exceptions)."""
        ledger = _Ledger()
        checkpoint, opening = ledger.resume(job.checkpoint)
        if opening is not None:
            yield opening
        inbox = _Inbox()
        pump = asyncio.create_task(self._pump(job.params, checkpoint, inbox))
        try:
            while not (pump.done() and inbox.empty):
                await inbox.wait(pump)
                for delta in inbox.take():
                    yield ledger.enter(delta)
            pump.result()
        finally:
            pump.cancel()
            await asyncio.wait([pump])
            if not pump.cancelled():
                pump.exception()  # seen: nothing is lost, it was raised above or nobody waits for it any more
        result = ledger.result or TaskResult(finish_reason="stop")
        filled = {"text": result.text or ledger.text, "model": result.model or self._name}
        yield Delta(result=result.model_copy(update={**filled, "resumed": checkpoint is not None}))

    async def _pump(self, params: Params, checkpoint: Beat | None, inbox: _Inbox) -> None:
        try:
            async with aclosing(self._function(params, checkpoint, Report(inbox))) as steps:
                async for step in steps:
                    inbox.put(_delta(step))
                    await asyncio.sleep(0)  # lets the reader take it, and a cancel in
        except TaskFault:
            raise
        except Exception as error:
            # The exception's text may hold the prompt, so only its type and where it was raised are told.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error(
                "a model function failed",
                extra={"function": self._path, "error": type(error).__name__, "where": where},
            )
            raise TaskFault(
                ErrorCode.INTERNAL,
                f"the function {self._path} raised {type(error).__name__}; the worker's log says where",
            ) from error

    async def aclose(self) -> None:
        """Holds nothing."""


class _Inbox:
    """Deltas on their way from the function to the reader, from any thread."""

    def __init__(self) -> None:
        self._items: deque[Delta] = deque()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def put(self, delta: Delta) -> None:
        self._items.append(delta)
        if threading.get_ident() == self._thread:
            self._news.set()
        else:
            self._loop.call_soon_threadsafe(self._news.set)

    @property
    def empty(self) -> bool:
        return not self._items

    async def wait(self, pump: asyncio.Task[None]) -> None:
        """Waits for a delta or for the pump's end."""
        if self._items:
            return
        self._news.clear()
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait([news, pump], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    def take(self) -> list[Delta]:
        taken = []
        while self._items:
            taken.append(self._items.popleft())
        return taken


class _Ledger:
    """Keeps with each state how much text stood when it was reported, so that both are continued together."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._chars = 0
        self._tokens = 0
        self.result: TaskResult | None = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def resume(self, beat: Beat | None) -> tuple[Beat | None, Delta | None]:
        """The checkpoint as the function gets it, and the delta that drops what does not stand."""
        if beat is None:
            return None, None
        mark = beat.state if isinstance(beat.state, dict) else {}
        if beat.text is None or mark.get("state") is None:
            return None, Delta(restart=True)
        chars, tokens = int(mark["chars"]), int(mark["tokens"])
        self._parts, self._chars, self._tokens = [beat.text[:chars]], chars, tokens
        given = beat.model_copy(
            update={"state": mark["state"], "text": beat.text[:chars], "output_tokens": tokens}
        )
        if chars == len(beat.text) and tokens == beat.output_tokens:
            return given, None
        return given, Delta(
            restart=True,
            keep_chars=chars,
            keep_tokens=tokens,
            state=beat.state,
            progress=beat.progress,
        )

    def enter(self, delta: Delta) -> Delta:
        if delta.restart:
            self._parts, self._chars, self._tokens = [], 0, 0
        self._parts.append(delta.text)
        self._chars += len(delta.text)
        self._tokens += delta.tokens
        self.result = delta.result or self.result  # told once the function has returned
        mark = {"state": delta.state, "chars": self._chars, "tokens": self._tokens}
        return delta.model_copy(update={"result": None, "state": None if delta.state is None else mark})


def _delta(step: Any) -> Delta:
    """What a function yielded or reported, as a clean Delta. Raises TaskFault for anything else."""
    if isinstance(step, str):
        step = {"text": step}
    elif isinstance(step, int | float) and not isinstance(step, bool):
        step = {"progress": int(step)}
    try:
        delta = step if isinstance(step, Delta) else Delta.model_validate(step)
        changes: dict[str, Any] = {"text": clean(delta.text), "reasoning": clean(delta.reasoning)}
        changes["message"] = None if delta.message is None else one_line(delta.message)
        if (changes["text"] or changes["reasoning"]) and not delta.tokens:
            changes["tokens"] = 1
        if delta.state is not None:
            changes["state"] = _json(delta.state)
            if len(orjson.dumps(changes["state"])) > MAX_STATE_BYTES:
                raise _bad(f"a state larger than {MAX_STATE_BYTES} bytes; keep large data elsewhere")
        if delta.result is not None:
            changes["result"] = TaskResult.model_validate(_json(delta.result.model_dump()))
        if delta.progress is not None:
            changes["progress"] = min(99, max(0, delta.progress))
    except (ValidationError, TypeError, ValueError) as error:
        raise _bad(f"a {type(step).__name__} that is no text, number or Delta, or holds no JSON") from error
    return delta.model_copy(update=changes)


def _json(value: Any) -> Any:
    """The value as JSON keeps it. Raises TypeError where it cannot."""
    return orjson.loads(orjson.dumps(clean_json(value)))


def _bad(what: str) -> TaskFault:
    return TaskFault(ErrorCode.INTERNAL, f"the model function yielded {what}", retryable=False)
