"""The model call as a span, with OpenTelemetry's GenAI attributes. Their names stand here and nowhere else.

    with model_call(model_id, model, params) as call:
        headers = {"traceparent": traces.current_traceparent()}
        ...
        answered(call, result, usage, first_token)

Content (messages, output, tool arguments) is never an attribute.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from perdure.contracts import Params, TaskResult, Usage
from perdure.models import Model
from perdure.observability.traces import SpanHandle, Value, span

_SETTINGS: Final = {  # parameter -> attribute; numbers only
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
}


def model_call(model_id: str, model: Model | None, params: Params) -> AbstractContextManager[SpanHandle]:
    """A client span around one request to a model. `model` is None where the worker does not know it."""
    served = (model.served_model if model else None) or model_id
    attributes: dict[str, Value | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": model.executor if model else None,
        "gen_ai.request.model": served,
    }
    for name, attribute in _SETTINGS.items():
        if (number := _number(params.get(name))) is not None:
            attributes[attribute] = number
    return span(f"chat {served}", kind="client", attributes=attributes)


def answered(call: SpanHandle, result: TaskResult, usage: Usage, first_token: float | None) -> None:
    """What came back: figures and names. `first_token` in seconds after the attempt's start."""
    call.set("gen_ai.response.model", result.model)
    if result.finish_reason:
        call.set("gen_ai.response.finish_reasons", [result.finish_reason])
    call.set("gen_ai.usage.input_tokens", usage.prompt_tokens)
    call.set("gen_ai.usage.output_tokens", usage.completion_tokens)
    call.set("gen_ai.response.time_to_first_chunk", first_token)


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
