"""Continue a generation from its checkpoint: what is sent, and how what comes back is joined.

    plan = plan_request(model, body, checkpoint)      what to send, what stands already
    seam = plan.seam(); seam.feed(text); seam.end()   new text without an echo, without doubled white space

Chat templates trim the text they are given, so the prefix goes out without its trailing white space and the
seam drops from the answer what of it comes again. Nothing that was shown is taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from perdure.contracts import Beat
from perdure.models import Model

_SHORTEST_ECHO: Final = 16  # characters: a shorter repeat may be the model's own
_STRUCTURED: Final = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
    "json_schema",
)
_TOKEN_KEYS: Final = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True)
class Plan:
    """One request. `text` and `reasoning` stand already and are continued; `prefix` is what is sent of them.

    `tokens_left` 0: nothing is to be made any more. `restart`: a checkpoint was there and is dropped; `why`.
    """

    body: dict[str, Any]
    tokens_left: int
    text: str = ""
    reasoning: str = ""
    prefix: str = ""
    may_echo: bool = False
    restart: bool = False
    why: str = ""

    def seam(self) -> Seam:
        """Joins the answer to `text`."""
        return Seam(self.prefix, self.text[len(self.text.rstrip()) :], self.may_echo)


def plan_request(model: Model, body: Mapping[str, Any], checkpoint: Beat | None) -> Plan:
    """How to ask for what is missing. `body` is the whole request as for a first attempt, with max_tokens."""
    limit = token_limit(body)
    fresh = Plan(dict(body), limit)
    if checkpoint is None or not (checkpoint.output_tokens or checkpoint.text or checkpoint.reasoning):
        return fresh
    why = why_not(model, body, checkpoint)
    if why:
        return replace(fresh, restart=True, why=why)
    text = checkpoint.text or ""
    left = max(0, limit - checkpoint.output_tokens)
    prefix = text.rstrip()
    return Plan(
        _continued(model, body, prefix, left) if prefix else _limited(body, left),
        left,
        text=text,
        reasoning=checkpoint.reasoning,
        prefix=prefix,
        may_echo=model.resume == "prefix_flag" or _tellable(prefix),
    )


def from_start(plan: Plan, body: Mapping[str, Any], why: str) -> Plan:
    """The same request from its beginning, after the server refused to continue."""
    return Plan(dict(body), token_limit(body), restart=True, why=why)


def why_not(model: Model, body: Mapping[str, Any], checkpoint: Beat) -> str:
    """Why this generation cannot be continued; empty when it can."""
    if model.resume == "none":
        return "the model is not set up to continue (resume in models.toml)"
    if checkpoint.text is None:
        return "the checkpoint holds no text"
    if not checkpoint.text:
        return (
            "the model was cut off in mid-thought" if checkpoint.reasoning else "there is no text to continue"
        )
    if body.get("tools") or body.get("functions"):
        return "tools are in use"
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        return "a response_format is asked for"
    if any(body.get(key) for key in _STRUCTURED):
        return "structured output is asked for"
    if (body.get("n") or 1) != 1:
        return "more than one answer is asked for (n)"
    if body.get("logprobs") or body.get("top_logprobs"):
        return "logprobs are asked for"
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "there are no messages"
    if _is_assistant(messages[-1]) and not isinstance(messages[-1].get("content"), str):
        return "the last message is the assistant's and holds no plain text"
    return ""


def token_limit(body: Mapping[str, Any]) -> int:
    """The output tokens that a request asks for at most."""
    return next(int(body[key]) for key in _TOKEN_KEYS if body.get(key))


def _limited(body: Mapping[str, Any], left: int) -> dict[str, Any]:
    limited = {key: left for key in _TOKEN_KEYS if body.get(key)}
    if isinstance(least := body.get("min_tokens"), int):
        limited["min_tokens"] = max(0, least - (token_limit(body) - left))
    return {**body, **limited}


def _continued(model: Model, body: Mapping[str, Any], prefix: str, left: int) -> dict[str, Any]:
    messages = list(body["messages"])
    if _is_assistant(messages[-1]):  # the caller's own prefill: both make one turn
        last = messages.pop()
        message = {**last, "content": last["content"] + prefix}
    else:
        message = {"role": "assistant", "content": prefix}
    if model.resume == "prefix_flag":
        message["prefix"] = True
    request = _limited(body, left) | {"messages": [*messages, message]}
    if model.resume == "continue_final_message":
        request |= {"add_generation_prompt": False, "continue_final_message": True}
    return request


def _tellable(prefix: str) -> bool:
    """Whether a repeat of it can be told from the model's own words, which begin with white space then."""
    return len(prefix) >= _SHORTEST_ECHO and not prefix[0].isspace()


def _is_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


class Seam:
    """Joins an answer, in any pieces, to the text that stands.

    An answer that begins with the whole prefix repeats it and loses it, unless the prefix is itself a repeat
    (then nobody can tell). Of the white space that stands at the seam, what comes again is dropped.
    """

    def __init__(self, prefix: str, space: str, may_echo: bool) -> None:
        self._prefix = prefix if prefix and may_echo and not _repeats(prefix) else ""
        self._space = space
        self._held = ""
        self._searching = bool(self._prefix)

    def feed(self, text: str) -> str:
        """New text; may hold back characters while they could still be an echo."""
        if not self._searching:
            return self._after_space(text)
        self._held += text
        if len(self._held) < len(self._prefix) and self._prefix.startswith(self._held):
            return ""
        return self._release()

    def end(self) -> str:
        """What was held back, once nothing more comes."""
        return self._release() if self._searching else ""

    def _release(self) -> str:
        self._searching = False
        held, self._held = self._held, ""
        return self._after_space(held.removeprefix(self._prefix))

    def _after_space(self, text: str) -> str:
        at = 0
        while self._space and at < len(text):
            if text[at] != self._space[0]:
                self._space = ""
                break
            self._space = self._space[1:]
            at += 1
        return text[at:]


def _repeats(prefix: str) -> bool:
    """Whether the prefix is one stretch of text over and over, so that more of it may be no echo."""
    half = len(prefix) // 2
    start = prefix[: min(64, max(1, half))]
    shift = prefix.find(start, 1)
    while 0 < shift <= half:
        if prefix.startswith(prefix[shift:]):
            return True
        shift = prefix.find(start, shift + 1)
    return False
