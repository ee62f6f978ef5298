"""What one attempt has made so far: deltas in, beats out. Pure, no clock.

The output starts with the checkpoint of the attempt before. A `restart` drops it and counts it as discarded.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import orjson

from perdure.contracts import MAX_CHECKPOINT_BYTES, MAX_RESULT_BYTES, Beat, Usage
from perdure.llm.base import Delta
from perdure.task.errors import ErrorCode, TaskFault

_BEAT_SECONDS: Final = 1.0
_BEAT_LONGEST: Final = 4.0
_BYTES_PER_SECOND: Final = 16 * 1024  # of compressed checkpoint, so that heartbeats stay cheap


class Track:
    """The output of one attempt. `changes` counts what has happened, so that a watcher sees news."""

    def __init__(self, attempt: int, checkpoint: Beat | None, max_output_bytes: int) -> None:
        self.attempt = attempt
        self.changes = 0
        self.own_tokens = 0  # made by this attempt, thrown away ones included
        self.output_tokens = checkpoint.output_tokens if checkpoint else 0
        self.resumed_from = self.output_tokens
        self.restarted = False
        self.discarded = 0
        self._usage: Usage | None = None
        self._counted = 0  # tokens of this attempt before the last restart
        self._text = _Text(checkpoint.text if checkpoint else None)
        self._reasoning = _Text(checkpoint.reasoning if checkpoint else None)
        self._state: Any = checkpoint.state if checkpoint else None
        self._message: str | None = None
        self._progress = checkpoint.progress if checkpoint else 0
        self._shown = 0  # what a beat of this attempt said already: progress never falls within an attempt
        self._limit = 0  # tokens that make 100 %
        self._max_bytes = max_output_bytes
        self._seq = 0

    def expect(self, tokens: int) -> None:
        """The output tokens that count as the whole; 0: the executor has a figure of its own."""
        self._limit = tokens
        if tokens:
            self._progress = max(self._progress, self._of_limit())

    def apply(self, delta: Delta) -> None:
        """Takes a delta in. Raises TaskFault `output_too_large`."""
        self.changes += 1
        if delta.restart:
            self._restart(delta)
        self._text.add(delta.text)
        self._reasoning.add(delta.reasoning)
        self.own_tokens += delta.tokens
        self.output_tokens += delta.tokens
        if delta.usage is not None:
            self._take_usage(delta.usage)
        if delta.message is not None:
            self._message = delta.message
        if delta.state is not None:
            self._state = delta.state
        if delta.progress is not None:
            self._progress = delta.progress
        elif self._limit and (delta.tokens or delta.usage):
            self._progress = self._of_limit()
        if self._text.size + self._reasoning.size > self._max_bytes:
            raise TaskFault(
                ErrorCode.OUTPUT_TOO_LARGE,
                f"the output is larger than {self._max_bytes} bytes; lower max_tokens, or raise the model's "
                "max_output_bytes",
            )

    def _restart(self, delta: Delta) -> None:
        kept = min(delta.keep_tokens, self.output_tokens)
        self.discarded += self.output_tokens - kept
        self.output_tokens = kept
        self.resumed_from = min(self.resumed_from, kept)
        self._counted = self.own_tokens
        self._text = _Text(self._text.value[: delta.keep_chars])
        if not delta.keep_chars and delta.state is None:
            self._reasoning, self._state, self.restarted = _Text(None), None, True
        self._progress = 0

    def _take_usage(self, usage: Usage) -> None:
        """The server's own count of this attempt's tokens replaces ours."""
        self._usage = usage
        if usage.completion_tokens is not None:
            ours = self.own_tokens - self._counted
            self.own_tokens += usage.completion_tokens - ours
            self.output_tokens += usage.completion_tokens - ours

    def _of_limit(self) -> int:
        return min(99, 100 * self.output_tokens // self._limit)

    @property
    def progress(self) -> int:
        """0-99, never below what a beat of this attempt said."""
        return max(self._shown, min(99, max(0, self._progress)))

    def beat(self) -> Beat:
        """The checkpoint now. Above MAX_CHECKPOINT_BYTES it has no text, and the next attempt starts over."""
        whole = self._beat(self._text.value, self._reasoning.value, self._state)
        if (
            self._text.size + self._reasoning.size > MAX_CHECKPOINT_BYTES
            or encoded_size(whole) > MAX_CHECKPOINT_BYTES
        ):
            return whole.model_copy(update={"text": None, "reasoning": "", "state": None})
        return whole

    def last_beat(self) -> Beat:
        """The output of an attempt that was cancelled: whole, cut only at what a result may hold."""
        text, reasoning = self._text.value, self._reasoning.value
        while encoded_size(beat := self._beat(text, reasoning, None)) > MAX_RESULT_BYTES:
            text, reasoning = text[: len(text) * 15 // 16], reasoning[: len(reasoning) * 15 // 16]
        return beat

    def final_beat(self) -> Beat:
        """The figures of an attempt that ended well; its text is in the result."""
        return self._beat("", "", None)

    def _beat(self, text: str | None, reasoning: str, state: Any) -> Beat:
        self._seq += 1
        self._shown = self.progress
        return Beat(
            attempt=self.attempt,
            seq=self._seq,
            progress=self._shown,
            text=text,
            reasoning=reasoning,
            output_tokens=self.output_tokens,
            resumed_from_tokens=self.resumed_from,
            restarted=self.restarted,
            prompt_tokens=self._usage.prompt_tokens if self._usage else None,
            discarded_tokens=self.discarded,
            state=state,
            message=self._message,
        )

    def usage(self, *, ended_well: bool) -> Usage:
        """This attempt's tokens. One that ended well has what the server reported (None: it did not say); one
        that was cut short never gets a report, so what we counted stands in."""
        reported = self._usage or Usage()
        completion = reported.completion_tokens if ended_well else self.own_tokens
        return Usage(
            prompt_tokens=reported.prompt_tokens,
            completion_tokens=completion,
            discarded_tokens=self.discarded,
        )


class _Text:
    """Text that grows: appended in pieces, joined when somebody looks."""

    def __init__(self, start: str | None) -> None:
        self._parts = [start] if start else []
        self.size = len(start.encode()) if start else 0

    def add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self.size += len(text) if text.isascii() else len(text.encode())

    @property
    def value(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


def encoded_size(beat: Beat) -> int:
    """Bytes of a beat as JSON."""
    return len(orjson.dumps(beat.model_dump()))


def beat_interval(beat: Beat, heartbeat_seconds: float) -> float:
    """Seconds until the next beat: 1 up to 16 KiB of compressed checkpoint, then size / 16 KiB, 4 at most;
    always well within the heartbeat time-out."""
    raw = orjson.dumps(beat.model_dump())
    size = len(raw) if len(raw) <= _BYTES_PER_SECOND else len(zlib.compress(raw, 1))
    wait = min(_BEAT_LONGEST, max(_BEAT_SECONDS, size / _BYTES_PER_SECOND))
    return min(wait, heartbeat_seconds / 2.5)
