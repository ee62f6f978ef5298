"""Chunks -> the answer: text, reasoning, refusal, tool calls, logprobs and usage, each in its own place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from perdure.contracts import Usage
from perdure.llm.chunks import Chunk, ToolPart
from perdure.task.text import clean, clean_json

_HIGH_SURROGATES: Final = ("\ud800", "\udbff")


class OutputTooLargeError(Exception):
    """The answer passed its limit of bytes."""


class Joiner:
    """Cleans text that comes in pieces: a surrogate pair split over two of them becomes one character."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, text: str) -> str:
        text = self._half + text
        self._half = text[-1:] if _HIGH_SURROGATES[0] <= text[-1:] <= _HIGH_SURROGATES[1] else ""
        return clean(text[:-1] if self._half else text)

    def end(self) -> str:
        """What is left: half a pair that never became whole."""
        half, self._half = self._half, ""
        return clean(half)


@dataclass
class _Call:
    index: int
    id: str | None = None
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class ToolCalls:
    """Puts tool calls together from their fragments, in the order of their indexes.

    A fragment without an index belongs to the call with its id, else to the last one. A new id under a known
    index is another call: some servers number every call 0.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, part: ToolPart) -> None:
        call = self._find(part)
        if call is None:
            call = self._open(part)
        call.id = call.id or part.id
        if part.name and part.name != call.name:  # a repeated name is no second half
            call.name += part.name
        if part.arguments:
            call.arguments.append(part.arguments)

    def _find(self, part: ToolPart) -> _Call | None:
        if part.id is not None:
            for call in self._calls:
                if call.id == part.id:
                    return call
        if part.index is None:
            last = self._calls[-1] if self._calls else None
            return last if part.id is None or (last and last.id is None) else None
        for call in reversed(self._calls):
            if call.index == part.index:
                return None if part.id and call.id else call
        return None

    def _open(self, part: ToolPart) -> _Call:
        used = {call.index for call in self._calls}
        index = part.index
        if index is None or index in used:
            index = max(used, default=-1) + 1
        call = _Call(index)
        self._calls.append(call)
        return call

    def result(self) -> list[dict[str, Any]] | None:
        """The calls in OpenAI's shape, None where there are none. A call without an id gets one."""
        calls = sorted(self._calls, key=lambda call: call.index)
        return [
            {
                "id": clean(call.id or f"call_{number}"),
                "type": "function",
                "function": {"name": clean(call.name), "arguments": clean("".join(call.arguments))},
            }
            for number, call in enumerate(calls)
        ] or None


@dataclass(frozen=True, slots=True)
class Step:
    """What one chunk added to the answer. `tokens` is as exact as the server lets it be."""

    text: str = ""
    reasoning: str = ""
    tokens: int = 0


class Accumulator:
    """The answer of one request so far. `max_bytes` bounds everything it keeps."""

    def __init__(self, max_bytes: int) -> None:
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.model: str | None = None
        self.refusal = ""
        self.tools = ToolCalls()
        self._logprobs: list[Any] = []
        self._joiners = (Joiner(), Joiner(), Joiner())
        self._left = max_bytes

    def add(self, chunk: Chunk) -> Step:
        """Takes a chunk in. Raises OutputTooLargeError."""
        logprobs = _storable(chunk.logprobs)
        self._bound(chunk, logprobs)
        text, thought, refusal = (
            joiner.feed(piece)
            for joiner, piece in zip(self._joiners, (chunk.text, chunk.reasoning, chunk.refusal), strict=True)
        )
        self.refusal += refusal
        for part in chunk.tools:
            self.tools.add(part)
        self._logprobs += logprobs
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage
        self.model = chunk.model or self.model
        tokens = (len(chunk.logprobs) or 1) if chunk.has_output else 0
        return Step(text, thought, tokens)

    def end(self) -> Step:
        """The last characters, once nothing more comes."""
        text, thought, refusal = (joiner.end() for joiner in self._joiners)
        self.refusal += refusal
        return Step(text, thought)

    @property
    def logprobs(self) -> Any | None:
        """In OpenAI's shape, every non-finite number null; None where there are none."""
        return {"content": self._logprobs} if self._logprobs else None

    def _bound(self, chunk: Chunk, logprobs: list[Any]) -> None:
        for text in (chunk.text, chunk.reasoning, chunk.refusal):
            self._left -= _size(text)
        for part in chunk.tools:
            self._left -= _size(part.arguments) + _size(part.name or "")
        if logprobs:
            self._left -= len(orjson.dumps(logprobs))
        if self._left < 0:
            raise OutputTooLargeError


def _storable(logprobs: tuple[Any, ...]) -> list[Any]:
    """Log probabilities as JSON holds them; those of a chunk that no JSON holds are left out."""
    clean_ones: list[Any] = [clean_json(one) for one in logprobs]
    try:
        orjson.dumps(clean_ones)
    except TypeError:  # an integer beyond 64 bits
        return []
    return clean_ones


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
