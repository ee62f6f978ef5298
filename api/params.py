"""Whether a model can take these params: checked at submit, since a hopeless task would only fail later.

    text = check_params(model_id, model, params)   the params as JSON text; raises Problem 422 or 413

Chat models take OpenAI's shape. What is named here is checked; other keys pass unchanged, since model servers
know many more. Refused are shapes that no chat model accepts and what Perdure decides itself (`model`,
`stream`, `n` above 1). The `python` executor's params are its own: only their size is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from api.messages import check_messages
from api.problems import FieldError, Problem, invalid, pointer_of
from perdure.models import Model
from perdure.task.text import one_line

_OURS: Final = {
    "model": "the task's model_id names the model",
    "prompt": "a chat model takes messages",
    "stream_options": "Perdure reads the stream itself",
    "best_of": "a task has one result",
    "use_beam_search": "a task has one result",
}
_MAX_STOPS: Final = 16
_CHOICES: Final = ("none", "auto", "required")


def _stop(value: Any) -> Any:
    stops = value if isinstance(value, list) else [value]
    sound = len(stops) <= _MAX_STOPS and all(isinstance(one, str) and 1 <= len(one) <= 1000 for one in stops)
    if value is not None and not sound:
        raise ValueError(f"text, or a list of at most {_MAX_STOPS} texts of 1 to 1000 characters")
    return value


def _tool_choice(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in _CHOICES):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'one of {", ".join(_CHOICES)}, or {{"type": "function", "function": {{"name"}}}}')
    return value


def _no_stream(value: Any) -> Any:
    if value is not None and value is not False:
        raise ValueError("Perdure reads the stream itself; watch the task's events")
    return value


_Number = Annotated[float, Field(strict=True)]
_Flag = Annotated[bool, Field(strict=True)]
_Count = Annotated[int, Field(strict=True, ge=1, le=16_777_216)]
_Name = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
_Text = Annotated[str, Field(strict=True)]
_Bias = dict[str, Annotated[_Number, Field(ge=-100, le=100)]]


class _Open(BaseModel):
    """Known keys are checked, others pass."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Function(_Open):
    name: _Name
    description: _Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Open):
    type: Literal["function"]
    function: Function


class JsonSchema(_Open):
    name: _Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(_Open):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatParams(_Open):
    """What stands beside `messages`; those are checked apart."""

    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[_Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[_Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[_Number, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[_Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[_Number, Field(gt=0, le=10)] | None = None
    stop: Annotated[Any, AfterValidator(_stop)] = None
    seed: Annotated[int, Field(strict=True)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=1)] | None = None
    stream: Annotated[bool | None, BeforeValidator(_no_stream)] = None
    logprobs: _Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    logit_bias: Annotated[_Bias, Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = None
    parallel_tool_calls: _Flag | None = None
    user: Annotated[str, Field(strict=True, max_length=256)] | None = None


class SimulatedParams(ChatParams):
    """Params of the simulated executor: a chat model's, and how much to make how fast."""

    tokens: Annotated[int, Field(strict=True, ge=0, le=16_777_216)] | None = None
    tokens_per_second: Annotated[_Number, Field(gt=0, le=1_000_000_000)] | None = None


def check_params(model_id: str, model: Model, params: dict[str, Any]) -> str:
    """The params as JSON text, when the model can take them. Raises Problem 422 or 413."""
    if model.executor != "python":
        errors = list(_chat_errors(model, params))
        if errors:
            raise invalid(errors)
    raw = orjson.dumps(params)
    if len(raw) > model.max_input_bytes:
        raise Problem(
            413,
            "input-too-large",
            f"params have {len(raw)} bytes; {model_id} takes {model.max_input_bytes}.",
            limit=model.max_input_bytes,
        )
    return raw.decode()


def _chat_errors(model: Model, params: dict[str, Any]) -> Iterator[FieldError]:
    for name, why in _OURS.items():
        if name in params:
            yield FieldError(_pointer(name), "not-allowed", why)
    kind = SimulatedParams if model.executor == "simulated" else ChatParams
    try:
        kind.model_validate(params)
    except ValidationError as error:
        for item in error.errors(include_input=False, include_url=False):
            detail = one_line(item["msg"].removeprefix("Value error, "), 300)
            yield FieldError(_pointer(*item["loc"]), item["type"].replace("_", "-"), detail)
    else:
        for name in ("max_tokens", "max_completion_tokens"):
            if (params.get(name) or 0) > model.max_tokens:
                yield FieldError(_pointer(name), "less-than-equal", f"at most {model.max_tokens}")
    if "messages" not in params:
        if model.executor != "simulated":
            yield FieldError(_pointer("messages"), "missing", "a chat model needs messages")
        return
    for path, code, why in check_messages(params["messages"], remote=model.allow_image_urls):
        yield FieldError(_pointer("messages", *path), code, why)


def _pointer(*parts: object) -> str:
    return pointer_of(("params", *parts))
