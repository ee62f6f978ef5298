"""Events -> chunks: what one event of a chat completion stream says. Pure.

Every field is optional, a field of the wrong type counts as absent, unknown fields are ignored. Only the
first choice is read. A streamed chunk (`delta`) and a whole completion (`message`) are read alike.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import orjson

from perdure.contracts import Usage
from perdure.llm.sse import Event
from perdure.task.text import clean_json

_DONE: Final = b"[DONE]"
_MAX_COUNT: Final = 2**53


@dataclass(frozen=True, slots=True)
class ToolPart:
    """A fragment of one tool call. None: the fragment does not say."""

    index: int | None = None
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk. Strings are as the server sent them: they may hold half a surrogate pair."""

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    tools: tuple[ToolPart, ...] = ()
    logprobs: tuple[Any, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    model: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether it holds real output. A role, an empty delta or a usage report is none."""
        return bool(self.text or self.reasoning or self.refusal or self.tools)


@dataclass(frozen=True, slots=True)
class UpstreamError:
    """An error object. `status`: the HTTP status where it names one; `words`: its type and code."""

    message: str
    status: int | None = None
    words: tuple[str, ...] = ()


class Done:
    """`[DONE]`."""


class NotJsonError(ValueError):
    """A chunk that should be JSON and is not."""


def read_event(event: Event) -> Chunk | UpstreamError | Done | None:
    """What the event says; None where it says nothing. Raises NotJsonError for a broken chunk.

    An event that was cut off by the end of the stream counts only if its data is whole.
    """
    data = event.data.strip()
    if event.bare:
        return _read_bare(data)
    if data == _DONE:
        return Done()
    try:
        value = parse_json(data) if data else None
    except NotJsonError:
        if event.cut:
            return None
        if event.name == "error":
            return UpstreamError(data.decode(errors="replace"))
        if data.startswith(b"{"):
            raise
        return None  # a keep-alive of somebody's own making
    if event.name == "error":
        if isinstance(value, dict):
            return find_error(value) or _error(value, {})
        return UpstreamError(_text(value) or "an error event without a message")
    if not isinstance(value, dict):
        return None
    return find_error(value) or read_chunk(value)


def _read_bare(data: bytes) -> UpstreamError | None:
    """A document where events should be. Legal as unknown fields, so only an error or HTML is taken up."""
    if data.startswith(b"<"):
        return UpstreamError("an HTML page in place of a stream", words=("html",))
    try:  # whatever stands after the document does not matter
        document, _ = json.JSONDecoder().raw_decode(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return find_error(document)


def parse_json(data: bytes) -> Any:
    """JSON as model servers write it: NaN, Infinity and lone surrogates included. Raises NotJsonError.

    Bytes that are no UTF-8 become U+FFFD.
    """
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise NotJsonError("not JSON") from error


def read_chunk(value: dict[str, Any]) -> Chunk:
    """A chunk, or a whole completion, from its JSON object."""
    choice = _first_choice(value.get("choices"))
    delta = _dict(choice.get("delta")) or _dict(choice.get("message"))
    text, thought = _content(delta.get("content"))
    return Chunk(
        text=text or _text(choice.get("text")),
        reasoning=thought or _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")),
        refusal=_text(delta.get("refusal")),
        tools=_tools(delta),
        logprobs=_logprobs(choice.get("logprobs")),
        finish_reason=_text(choice.get("finish_reason")) or None,
        usage=_usage(value.get("usage")),
        model=_text(value.get("model")) or None,
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _first_choice(choices: Any) -> dict[str, Any]:
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index") in (None, 0):
            return choice
    return {}


def _content(content: Any) -> tuple[str, str]:
    """Content as (text, reasoning). Some servers send a list of parts, thoughts among them."""
    if not isinstance(content, list):
        return _text(content), ""
    text, thought = "", ""
    for part in map(_dict, content):
        if part.get("type") in ("thinking", "reasoning"):
            inner = part.get("thinking") or part.get("text")
            thought += _content(inner)[0] if isinstance(inner, list) else _text(inner)
        else:
            text += _text(part.get("text"))
    return text, thought


def _tools(delta: dict[str, Any]) -> tuple[ToolPart, ...]:
    calls = delta.get("tool_calls")
    parts = [_tool(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if isinstance(old := delta.get("function_call"), dict):  # the form before tool_calls
        parts.append(_tool({"index": 0, "function": old}))
    return tuple(parts)


def _tool(call: dict[str, Any]) -> ToolPart:
    function = _dict(call.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, dict | list):
        arguments = json.dumps(clean_json(arguments), ensure_ascii=False)
    return ToolPart(
        index=_count(call.get("index")),
        id=_text(call.get("id")) or None,
        name=_text(function.get("name")) or None,
        arguments=_text(arguments),
    )


def _logprobs(value: Any) -> tuple[Any, ...]:
    content = _dict(value).get("content")
    return tuple(content) if isinstance(content, list) else ()


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    prompt, completion = _count(value.get("prompt_tokens")), _count(value.get("completion_tokens"))
    if prompt is None and completion is None:
        return None
    return Usage(prompt_tokens=prompt, completion_tokens=completion)


def _count(value: Any) -> int | None:
    """A whole number from 0 to 2**53, however it is written; None for anything else."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT:
        return value
    return None


def find_error(value: Any) -> UpstreamError | None:
    """The error object that a JSON value is or holds, whatever its dialect; None where it holds none."""
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if isinstance(error, dict) and error:
        return _error(error, value)
    if isinstance(error, str) and error:
        return _error({"message": error}, value)
    if error and error is not False:
        return UpstreamError("an error without a message")
    if value.get("object") == "error":
        return _error(value, {})
    if "choices" in value or "usage" in value:
        return None
    told = value.get("message") or value.get("detail")
    if told and ("detail" in value or _status(value.get("code")) or _status(value.get("status"))):
        return _error({**value, "message": told}, {})
    return None


def _error(error: dict[str, Any], around: dict[str, Any]) -> UpstreamError:
    message = error.get("message") or error.get("detail")
    if not isinstance(message, str) or not message:
        message = json.dumps(message, ensure_ascii=True)[:500] if message else "an error without a message"
    named = [error.get(key) for key in ("code", "type", "status", "error_type")]
    named += [around.get(key) for key in ("code", "status", "error_type", "type")]
    status = next((found for found in map(_status, named) if found), None)
    words = tuple(word for word in named if isinstance(word, str) and word and not word.isdigit())
    return UpstreamError(message, status, words)


def _status(value: Any) -> int | None:
    number = (
        int(value)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3
        else value
    )
    return (
        number if isinstance(number, int) and not isinstance(number, bool) and 400 <= number <= 599 else None
    )
