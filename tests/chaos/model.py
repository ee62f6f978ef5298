"""A model server that cannot be trusted: right words, and faults from a seed."""

from __future__ import annotations

import random
from typing import Any, Final

from tests.support.model_server import Call, ModelServer, Steps, chunk, finish, reply, stream, usage

RATE: Final = 25.0  # words a second


def expected(words: int) -> str:
    """The one right text of a task that asked for so many words."""
    return " ".join(f"w{k}" for k in range(words))


class ChaosModel:
    """Continues from a trailing assistant message; about one answer in five goes wrong."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.server = ModelServer()
        self.server.script(self._answer)
        self.faults = 0
        self.words = 0  # streamed in all

    def _answer(self, call: Call) -> Steps:
        body: dict[str, Any] = call.body
        wanted = int(body["max_tokens"])
        last = body["messages"][-1]
        start = len(str(last["content"]).split()) if last["role"] == "assistant" else 0
        prompt = len(str(body["messages"][0]["content"]).split())
        dice = self._rng.random()
        if dice < 0.06:
            return self._fault(reply(503, '{"error": {"message": "loading"}}'))
        if dice < 0.09:
            return self._fault(reply(429, '{"error": {"message": "slow down"}}', Retry_After="1"))
        steps: list[Any] = []
        for made in range(wanted):
            if dice < 0.2 and made == wanted // 2:
                if dice < 0.14:
                    steps.append(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')
                return self._fault(stream(*steps))  # the end comes early
            k = start + made
            steps += [chunk(f"w{k}" if k == 0 else f" w{k}"), self._streamed, 1 / RATE]
        return stream(*steps, finish("length"), usage(prompt + start, wanted), b"data: [DONE]\n\n")

    def _fault(self, steps: Steps) -> Steps:
        self.faults += 1
        return steps

    def _streamed(self, call: Call) -> None:
        self.words += 1
