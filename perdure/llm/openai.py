"""The `openai` executor: streaming chat completions from any OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import orjson

from perdure.contracts import Params, TaskResult, Usage
from perdure.llm.accumulate import Accumulator, OutputTooLargeError, Step
from perdure.llm.base import Delta, Job
from perdure.llm.breaker import Breaker, BreakerState, Ticket
from perdure.llm.faults import truncated_fault
from perdure.llm.quote import texts_of
from perdure.llm.resume import Plan, Seam, from_start, plan_request
from perdure.llm.wire import Waits, stream_chunks, too_large
from perdure.models import Model
from perdure.task.errors import ErrorCode, TaskFault
from perdure.task.text import one_line

NO_ANSWER: Final = "no_answer"  # finished without text, refusal or tool call
PROMPT_CUT: Final = "prompt_probably_cut"  # the server counted far fewer prompt tokens than were sent
_LEAST_TO_JUDGE: Final = 8000  # characters of prompt below which no cut is guessed
_CHARS_PER_TOKEN: Final = 14  # far more than any tokenizer reaches on prose

_REFUSALS: Final = (ErrorCode.CONNECT_TIMEOUT,)  # beside `refused` itself: nobody was there


class OpenAIExecutor:
    """Generates on one model server. `name` is the model's id, `api_key` goes out as a bearer token."""

    def __init__(
        self,
        name: str,
        model: Model,
        base_url: str,
        client: httpx.AsyncClient,
        *,
        api_key: str | None = None,
        breaker: Breaker | None = None,
    ) -> None:
        self._name = name
        self._model = model
        self._url = chat_url(base_url)
        self._client = client
        self._headers = {
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": "perdure",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._breaker = breaker or Breaker()

    def state(self) -> BreakerState:
        """The breaker's state, for operators."""
        return self._breaker.state()

    async def aclose(self) -> None:
        """Closes the client and every connection."""
        await self._client.aclose()

    async def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Yields the answer as it grows; the last delta holds the result. Raises TaskFault."""
        body = request_body(self._model, self._name, job.params)
        plan = plan_request(self._model, body, job.checkpoint)
        if plan.restart:
            yield Delta(restart=True)
        if not plan.tokens_left:  # the attempt before made all of it and lost only the last word
            yield Delta(
                result=TaskResult(
                    text=plan.text,
                    reasoning=plan.reasoning or None,
                    finish_reason="length",
                    model=self._name,
                    resumed=True,
                )
            )
            return
        began = False
        async with aclosing(self._generate(job, plan)) as deltas:
            try:
                async for delta in deltas:
                    began = True
                    yield delta
                return
            except TaskFault as fault:
                if fault.code is not ErrorCode.INVALID_REQUEST or not plan.prefix or began:
                    raise
                why = fault.message
        # This server refuses to continue; the request itself may be right, so it goes from the start.
        yield Delta(restart=True)
        async with aclosing(self._generate(job, from_start(plan, body, why))) as deltas:
            async for delta in deltas:
                yield delta

    async def _generate(self, job: Job, plan: Plan) -> AsyncGenerator[Delta, None]:
        """One request. Deltas are yielded per network read."""
        hide = texts_of(job.params)
        answer = _Answer(plan, job.limits.max_output_bytes)
        ticket = self._breaker.enter()
        try:
            reads = stream_chunks(
                self._client,
                self._url,
                encode_body(plan.body),
                self._headers | job.headers,
                Waits(self._model.first_token_timeout, self._model.token_timeout),
                hide,
            )
            async with aclosing(reads):
                async for chunks in reads:
                    ticket.answered()
                    if delta := answer.take(chunks):
                        yield delta
            yield answer.end(self._name, _warnings(answer, hide))
        except TaskFault as fault:
            _tell(ticket, fault)
            raise
        finally:
            ticket.leave()


def _tell(ticket: Ticket, fault: TaskFault) -> None:
    if fault.refused or fault.code in _REFUSALS:
        ticket.refused()
    elif fault.code not in (ErrorCode.FIRST_TOKEN_TIMEOUT, ErrorCode.STREAM_TRUNCATED):
        ticket.answered()  # it said something; silence says nothing


class _Answer:
    """The answer of one request, joined to what stood."""

    def __init__(self, plan: Plan, max_bytes: int) -> None:
        self.plan = plan
        self.total = Accumulator(max_bytes)
        self._seam: Seam = plan.seam()
        self._max_bytes = max_bytes
        self._text: list[str] = [plan.text]
        self._reasoning: list[str] = [plan.reasoning]
        self._usage: Usage | None = None
        self.output = False

    def take(self, chunks: list[Any]) -> Delta | None:
        """The delta of one network read; None where it brought nothing to tell."""
        try:
            steps = [self.total.add(chunk) for chunk in chunks]
        except OutputTooLargeError:
            raise too_large(self._max_bytes, "the output") from None
        return self._delta(steps)

    def _delta(self, steps: list[Step]) -> Delta | None:
        text = self._seam.feed("".join(step.text for step in steps))
        return self._told(text, "".join(step.reasoning for step in steps), sum(step.tokens for step in steps))

    def _told(self, text: str, reasoning: str, tokens: int) -> Delta | None:
        self._text.append(text)
        self._reasoning.append(reasoning)
        self.output = self.output or tokens > 0
        news = self.total.usage if self.total.usage != self._usage else None
        self._usage = self.total.usage
        if not (text or reasoning or tokens or news):
            return None
        return Delta(text=text, reasoning=reasoning, tokens=tokens, usage=news)

    def end(self, name: str, warnings: list[str]) -> Delta:
        """The last delta. Raises TaskFault without a finish_reason: only that is proof of the end."""
        if self.total.finish_reason is None:
            raise truncated_fault(self.output)
        last = self.total.end()
        text = self._seam.feed(last.text) + self._seam.end()
        self._text.append(text)
        self._reasoning.append(last.reasoning)
        result = TaskResult(
            text="".join(self._text),
            finish_reason=one_line(self.total.finish_reason, 64),
            tool_calls=self.total.tools.result(),
            reasoning="".join(self._reasoning) or None,
            refusal=self.total.refusal or None,
            logprobs=self.total.logprobs,
            warnings=warnings or None,
            model=one_line(self.total.model or name, 200),
            resumed=bool(self.plan.text),
        )
        if not (result.text or result.refusal or result.tool_calls):
            result = result.model_copy(update={"warnings": [*warnings, NO_ANSWER]})
        return Delta(text=text, reasoning=last.reasoning, usage=self.total.usage, result=result)


def _warnings(answer: _Answer, texts: list[str]) -> list[str]:
    usage = answer.total.usage
    sent = sum(map(len, texts))
    counted = usage.prompt_tokens if usage else None
    cut = counted is not None and sent >= _LEAST_TO_JUDGE and counted * _CHARS_PER_TOKEN < sent
    return [PROMPT_CUT] if cut else []


def chat_url(base_url: str) -> str:
    """The address of chat completions below a base URL (`http://host:port/v1`). Raises ValueError."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(
            f"'{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}' is no HTTP base URL"
        )
    return base_url.rstrip("/") + "/chat/completions"


def request_body(model: Model, name: str, params: Params) -> dict[str, Any]:
    """The whole request as for a first attempt: the caller's params, our streaming, the operator's extras."""
    body: dict[str, Any] = {**params, "model": model.served_model or name, "stream": True}
    key = "max_completion_tokens" if params.get("max_completion_tokens") else "max_tokens"
    body[key] = min(int(params.get(key) or model.default_max_tokens), model.max_tokens)
    body["stream_options"] = {**_dict(params.get("stream_options")), "include_usage": True}
    extra = dict(model.extra_body)
    body["stream_options"].update(_dict(extra.pop("stream_options", None)))
    return body | extra


def _dict(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def encode_body(body: Mapping[str, Any]) -> bytes:
    """The request's JSON as bytes."""
    try:
        return orjson.dumps(body)
    except TypeError:  # an integer above 64 bits
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
