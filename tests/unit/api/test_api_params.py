"""Params: what no model takes is refused at its place, what any may take passes unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.params import check_params
from api.problems import Problem
from perdure.models import Model

CHAT = Model(pool="p", executor="openai", base_url="http://127.0.0.1:1/v1", max_tokens=1000)
REMOTE = CHAT.model_copy(update={"allow_image_urls": True})
SIMULATED = Model(pool="p", executor="simulated")
PYTHON = Model(pool="p", executor="python", import_path="a.b:c", max_input_bytes=100)
PNG = "data:image/png;base64,aGk="


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def said(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "go"}, message]}


def image(url: Any) -> dict[str, Any]:
    return user([{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": url}}])


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "params",
    [
        user("hi"),
        user(""),
        user("hi", max_tokens=1, temperature=0, top_p=1.0, stop="x", seed=-5),
        user("hi", max_tokens=1000, stop=["a", "b"], stream=False, n=1, logprobs=True, top_logprobs=20),
        user("hi", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}),
        user("hi", tools=[TOOL], tool_choice="auto"),
        user("hi", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
        user("hi", chat_template_kwargs={"enable_thinking": False}, min_tokens=5, guided_regex="a+"),
        user([{"type": "text", "text": "hi"}]),
        image(PNG),
        user([{"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}]),
        said({"role": "assistant", "content": None, "tool_calls": [CALL]}),
        said({"role": "assistant", "tool_calls": [CALL]}),
        said({"role": "assistant", "content": "text", "tool_calls": [CALL]}),
        said({"role": "assistant", "content": None, "refusal": "no"}),
        said({"role": "tool", "tool_call_id": "c1", "content": "42"}),
        said({"role": "system", "content": "be brief"}),
        said({"role": "developer", "content": "be brief"}),
        said({"role": "user", "content": "hi", "name": "ann"}),
    ],
)
def test_legal_params_pass_unchanged(params: dict[str, Any]) -> None:
    assert json.loads(check_params("m", CHAT, params)) == params


@pytest.mark.parametrize(
    ("params", "pointer"),
    [
        ({}, "/params/messages"),
        ({"prompt": "hi"}, "/params/prompt"),
        (user("hi", prompt="hi"), "/params/prompt"),
        ({"messages": []}, "/params/messages"),
        ({"messages": "hi"}, "/params/messages"),
        ({"messages": ["hi"]}, "/params/messages/0"),
        ({"messages": [{"content": "hi"}]}, "/params/messages/0/role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "/params/messages/0/role"),
        (user(None), "/params/messages/0/content"),
        (user([]), "/params/messages/0/content"),
        (user({"text": "hi"}), "/params/messages/0/content"),
        (user(5), "/params/messages/0/content"),
        (user([{"type": "text"}]), "/params/messages/0/content/0"),
        (user([{"type": "telepathy"}]), "/params/messages/0/content/0"),
        (user(["hi"]), "/params/messages/0/content/0"),
        (said({"role": "assistant", "content": None}), "/params/messages/1/content"),
        (said({"role": "assistant", "content": None, "tool_calls": []}), "/params/messages/1/tool_calls"),
        (said({"role": "assistant", "tool_calls": [{"id": "x"}]}), "/params/messages/1/tool_calls/0"),
        (said({"role": "user", "content": "x", "tool_calls": [CALL]}), "/params/messages/1/tool_calls"),
        (said({"role": "tool", "content": "42"}), "/params/messages/1/tool_call_id"),
        (said({"role": "user", "content": "hi", "name": "a\nb"}), "/params/messages/1/name"),
        (user("hi", max_tokens=0), "/params/max_tokens"),
        (user("hi", max_tokens=True), "/params/max_tokens"),
        (user("hi", max_tokens=1.0), "/params/max_tokens"),
        (user("hi", max_tokens="5"), "/params/max_tokens"),
        (user("hi", max_tokens=1001), "/params/max_tokens"),
        (user("hi", max_completion_tokens=1001), "/params/max_completion_tokens"),
        (user("hi", max_tokens=16_777_217), "/params/max_tokens"),
        (user("hi", temperature=2.1), "/params/temperature"),
        (user("hi", temperature="hot"), "/params/temperature"),
        (user("hi", top_p=-0.1), "/params/top_p"),
        (user("hi", stop=5), "/params/stop"),
        (user("hi", stop=[""]), "/params/stop"),
        (user("hi", stop=["x"] * 17), "/params/stop"),
        (user("hi", seed=1.5), "/params/seed"),
        (user("hi", n=2), "/params/n"),
        (user("hi", stream=True), "/params/stream"),
        (user("hi", model="other"), "/params/model"),
        (user("hi", stream_options={}), "/params/stream_options"),
        (user("hi", tools=[]), "/params/tools"),
        (
            user("hi", tools=[{"type": "function", "function": {"name": "a b"}}]),
            "/params/tools/0/function/name",
        ),
        (user("hi", tool_choice="maybe"), "/params/tool_choice"),
        (user("hi", response_format={"type": "xml"}), "/params/response_format/type"),
        (user("hi", logit_bias={"1": 101}), "/params/logit_bias/1"),
    ],
)
def test_hopeless_params_are_refused_at_their_place(params: dict[str, Any], pointer: str) -> None:
    with pytest.raises(Problem) as caught:
        check_params("m", CHAT, params)
    assert caught.value.status == 422
    assert caught.value.errors[0].pointer == pointer


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "http://127.0.0.1/x.png",
        "http://2130706433/x.png",
        "gopher://example.com/",
        "data:image/png;base64,@@@@",
        "data:image/png;base64,",
        "data:text/html;base64,aGk=",
        "data:image/png,plain",
        5,
        None,
    ],
)
@pytest.mark.parametrize("model", [CHAT, REMOTE])
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_urls_that_make_the_model_server_fetch_are_refused(url: Any, model: Model, kind: str) -> None:
    with pytest.raises(Problem) as caught:
        check_params("m", model, user([{"type": kind, kind: {"url": url}}]))
    assert caught.value.status == 422
    assert str(caught.value.errors[0].pointer).startswith("/params/messages/0/content/0")


def test_public_urls_pass_only_where_the_model_allows_them() -> None:
    params = image("https://example.com/cat.png")
    assert json.loads(check_params("m", REMOTE, params)) == params
    with pytest.raises(Problem):
        check_params("m", CHAT, params)


def test_images_stand_in_what_users_and_tools_say() -> None:
    part = {"type": "image_url", "image_url": {"url": PNG}}
    with pytest.raises(Problem):
        check_params("m", CHAT, said({"role": "assistant", "content": [part]}))


def test_simulated_checks_chat_params_too() -> None:
    assert check_params("s", SIMULATED, {}) == "{}"
    assert check_params("s", SIMULATED, {"tokens": 5, "tokens_per_second": 0.5})
    for wrong in (
        {"tokens": -1},
        {"tokens": True},
        {"tokens_per_second": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"max_tokens": 0},
        {"temperature": 3},
        {"prompt": "x"},
    ):
        with pytest.raises(Problem):
            check_params("s", SIMULATED, wrong)


def test_a_python_executor_takes_what_it_likes_within_its_size() -> None:
    assert check_params("p", PYTHON, {"anything": [1, {"a": None}]}) == '{"anything":[1,{"a":null}]}'
    with pytest.raises(Problem) as caught:
        check_params("p", PYTHON, {"text": "x" * 100})
    assert (caught.value.status, caught.value.code) == (413, "input-too-large")


def test_input_beyond_the_models_limit_is_too_large() -> None:
    with pytest.raises(Problem) as caught:
        check_params("m", CHAT, user("x" * CHAT.max_input_bytes))
    assert (caught.value.status, caught.value.code) == (413, "input-too-large")
