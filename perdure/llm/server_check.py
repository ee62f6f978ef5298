"""The questions that `perdure models check` asks a model server, all at temperature 0."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import httpx

from perdure.contracts import Beat, TaskResult, Usage
from perdure.llm.base import Delta, Job
from perdure.llm.check_report import Finding, Report
from perdure.llm.executors import api_key, build_executor, model_url
from perdure.llm.openai import OpenAIExecutor
from perdure.models import Model
from perdure.task.errors import TaskFault

Dialect = Literal["trailing", "continue_final_message", "prefix_flag"]
DIALECTS: Final[tuple[Dialect, ...]] = ("trailing", "continue_final_message", "prefix_flag")

_QUESTION: Final = "Write two short sentences about a bridge over a river."
_TOKENS: Final = 40
_LONG: Final = 400  # tokens of the request that is given up
_WATCH: Final = 5.0  # seconds that the server has to notice
# Gauges of requests in work: vLLM, SGLang, llama.cpp, TGI.
_RUNNING: Final = re.compile(
    r"^(?:vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing"
    r"|tgi_batch_current_size)(?:\{[^}]*\})? ([0-9.e+]+)$",
    re.MULTILINE,
)


@dataclass
class _Answer:
    """What one request brought. Times are seconds after its start."""

    text: str = ""
    reads: list[tuple[float, str]] = field(default_factory=list)
    tokens: int = 0
    usage: Usage | None = None
    result: TaskResult | None = None
    restarted: bool = False
    first: float | None = None
    last: float = 0.0

    @property
    def made(self) -> int:
        """Tokens, as exactly as the server tells."""
        return (self.usage.completion_tokens if self.usage else None) or self.tokens


class ServerCheck:
    """The questions to one server."""

    def __init__(self, name: str, model: Model, env: Mapping[str, str]) -> None:
        self._name = name
        self._model = model
        self._env = env
        self._base_url = model_url(name, model, env)
        self._findings: list[Finding] = []

    async def run(self) -> Report:
        """Asks everything; stops at the first thing without which nothing else makes sense."""
        try:
            whole = await self._ask(_TOKENS)
        except TaskFault as fault:
            self._find("answers", False, f"{fault.code}: {fault.message}")
            return Report(self._name, self._findings, usable=False)
        self._find("answers", True, f"first output after {whole.first or 0:.2f} s")
        streams = self._streams(whole)
        self._usage(whole)
        speed = _speed(whole)
        self._find("speed", None if speed is None else True, _speed_says(speed))
        resume = await self._dialects(whole)
        await self._disconnect()
        return Report(
            self._name,
            self._findings,
            usable=streams,
            resume=resume,
            tokens_per_second=speed,
            lines=self._lines(resume),
        )

    def _find(self, name: str, ok: bool | None, says: str) -> None:
        self._findings.append(Finding(name, ok, says))

    def _streams(self, whole: _Answer) -> bool:
        pieces = len(whole.reads)
        ok = pieces >= 3
        says = f"{pieces} pieces" if ok else "the answer came in one piece; cancel and progress need a stream"
        self._find("streams", ok, says)
        return ok

    def _usage(self, whole: _Answer) -> None:
        usage = whole.usage
        if usage is None or usage.completion_tokens is None:
            self._find("usage", False, "none reported; usage of tasks will be unknown")
        else:
            says = f"{usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens"
            self._find("usage", True, says)

    async def _dialects(self, whole: _Answer) -> str:
        """Finds the dialect in which a text is continued as if it had never been cut."""
        cut = _cut(whole)
        if cut is None:
            self._find("continues a text", None, "the answer is too short to cut")
            return "none"
        again = await self._quietly(self._ask(_TOKENS))
        steady = again is not None and again.text == whole.text
        known = [d for d in DIALECTS if d == self._model.resume]
        exact = ""
        for dialect in [*known, *(d for d in DIALECTS if d not in known)]:
            verdict = await self._dialect(dialect, cut, whole, steady)
            if verdict and not exact:
                exact = dialect
        return exact or "none"

    async def _dialect(self, dialect: Dialect, cut: Beat, whole: _Answer, steady: bool) -> bool:
        name = f"continues: {dialect}"
        try:
            rest = await self._ask(_TOKENS, resume=dialect, checkpoint=cut)
        except TaskFault as fault:
            self._find(name, False, f"{fault.code}: {fault.message}")
            return False
        if rest.restarted:
            self._find(name, False, "the server refuses a last message from the assistant")
            return False
        joined = rest.result.text if rest.result else ""
        if rest.made >= whole.made and len(rest.reads) > 1:
            self._find(name, False, "the server begins its answer again")
            return False
        if joined == whole.text:
            self._find(name, True, "the continued text equals the uninterrupted one")
            return True
        if steady:
            self._find(name, False, "the continued text differs from the uninterrupted one")
            return False
        self._find(name, None, "cannot be judged: at temperature 0 the server says something else each time")
        return False

    async def _disconnect(self) -> None:
        """Whether the server stops when the client goes away, as far as its own figures tell."""
        name = "stops on disconnect"
        async with httpx.AsyncClient(trust_env=False, timeout=2.0, headers=self._credentials()) as client:
            if await self._running(client) is None:
                self._find(name, None, "the server shows no count of running requests (/metrics, /slots)")
                return
            try:
                seen = await self._give_up(client)
            except TaskFault as fault:
                self._find(name, None, f"{fault.code}: {fault.message}")
                return
            if not seen:
                self._find(name, None, "the request was over before it could be given up")
                return
            began = time.monotonic()
            while time.monotonic() - began < _WATCH:
                if not await self._running(client):
                    self._find(name, True, f"within {time.monotonic() - began:.1f} s")
                    return
                await asyncio.sleep(0.1)
        self._find(name, False, f"still at work {_WATCH:.0f} s later; cancelled tasks go on using the GPU")

    async def _give_up(self, client: httpx.AsyncClient) -> bool:
        """Starts a long answer and leaves after its first words; whether the server was seen at work."""
        executor = self._executor("none")
        seen = False
        try:
            async with aclosing(executor.run(self._job(_LONG, None))) as deltas:
                async for delta in deltas:
                    seen = bool(await self._running(client))
                    if seen or delta.result:
                        break
        finally:
            await executor.aclose()
        return seen

    async def _running(self, client: httpx.AsyncClient) -> int | None:
        """How many requests the server works on now; None where it does not say."""
        root = self._base_url.rstrip("/").removesuffix("/v1")
        try:
            slots = await client.get(root + "/slots")
            if slots.status_code == 200 and isinstance(found := slots.json(), list):
                return sum(bool(isinstance(slot, dict) and slot.get("is_processing")) for slot in found)
            metrics = await client.get(root + "/metrics")
        except (httpx.HTTPError, ValueError):
            return None
        counts = [float(count) for count in _RUNNING.findall(metrics.text)] if metrics.is_success else []
        return int(sum(counts)) if counts else None

    async def _ask(
        self, tokens: int, *, resume: str | None = None, checkpoint: Beat | None = None
    ) -> _Answer:
        """One request. Raises TaskFault."""
        executor = self._executor(resume or "none")
        answer, began = _Answer(), time.monotonic()
        try:
            async with aclosing(executor.run(self._job(tokens, checkpoint))) as deltas:
                async for delta in deltas:
                    _note(answer, delta, time.monotonic() - began)
        finally:
            await executor.aclose()
        return answer

    async def _quietly(self, asking: Any) -> _Answer | None:
        try:
            return cast(_Answer, await asking)
        except TaskFault:
            return None

    def _executor(self, resume: str) -> OpenAIExecutor:
        model = self._model.model_copy(update={"resume": resume})
        return cast(OpenAIExecutor, build_executor(self._name, model, self._env))

    def _job(self, tokens: int, checkpoint: Beat | None) -> Job:
        return Job(
            task_id="check",
            attempt=1 if checkpoint is None else 2,
            params={
                "messages": [{"role": "user", "content": _QUESTION}],
                "max_tokens": tokens,
                "temperature": 0,
                "seed": 1,
            },
            checkpoint=checkpoint,
        )

    def _credentials(self) -> dict[str, str]:
        key = api_key(self._name, self._model, self._env)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _lines(self, resume: str) -> list[str]:
        model = self._model
        address = (
            f'base_url_env = "{model.base_url_env}"'
            if model.base_url_env
            else f'base_url = "{model.base_url}"'
        )
        table = (
            f"[models.{self._name}]"
            if re.fullmatch(r"[A-Za-z0-9_-]+", self._name)
            else f'[models."{self._name}"]'
        )
        lines = [table, f'pool = "{model.pool}"', 'executor = "openai"', address]
        if model.api_key_env:
            lines.append(f'api_key_env = "{model.api_key_env}"')
        if model.served_model:
            lines.append(f'served_model = "{model.served_model}"')
        return [*lines, f'resume = "{resume}"']


def _note(answer: _Answer, delta: Delta, now: float) -> None:
    answer.restarted = answer.restarted or delta.restart
    if delta.text or delta.reasoning:
        answer.first = now if answer.first is None else answer.first
        answer.last = now
        answer.reads.append((now, delta.text))
    answer.text += delta.text
    answer.tokens += delta.tokens
    answer.usage = delta.usage or answer.usage
    answer.result = delta.result or answer.result


def _speed(whole: _Answer) -> float | None:
    spent = whole.last - (whole.first or 0.0)
    return (whole.made - 1) / spent if whole.made > 1 and spent > 0 else None


def _speed_says(speed: float | None) -> str:
    return "too few tokens to tell" if speed is None else f"{speed:.1f} tokens per second"


def _cut(whole: _Answer) -> Beat | None:
    """A checkpoint from the middle of the answer, at the border of two pieces."""
    half = whole.reads[: len(whole.reads) // 2]
    text = "".join(piece for _, piece in half)
    if not text.strip() or len(half) == len(whole.reads):
        return None
    return Beat(attempt=1, text=text, output_tokens=max(1, round(_TOKENS * len(text) / len(whole.text))))
