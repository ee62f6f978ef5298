"""Executors from the catalogue: what cannot be served is said, and the rest is served."""

from __future__ import annotations

import logging

import pytest

from perdure.llm.executors import BrokenExecutor, build_executors
from perdure.llm.openai import OpenAIExecutor, chat_url
from perdure.llm.python import PythonExecutor
from perdure.llm.simulated import SimulatedExecutor
from perdure.models import parse_catalogue
from perdure.observability.redact import redact
from perdure.task.errors import ErrorCode as Code
from tests.support.generation import attempt

CATALOGUE = parse_catalogue(
    """
    [pools.local]
    [pools.other]
    [models.plain]
    pool = "local"
    base_url = "http://model:8080/v1"
    [models.secured]
    pool = "local"
    base_url = "https://model/v1/"
    api_key_env = "MODEL_KEY"
    [models.by-env]
    pool = "local"
    base_url_env = "MODEL_URL"
    base_url = "http://fallback/v1"
    [models.only-env]
    pool = "local"
    base_url_env = "NO_SUCH_URL"
    [models.bad-url]
    pool = "local"
    base_url = "model:8080"
    [models.python]
    pool = "local"
    executor = "python"
    import_path = "examples.score_document:score"
    [models.no-module]
    pool = "local"
    executor = "python"
    import_path = "nowhere:f"
    [models.sim]
    pool = "local"
    executor = "simulated"
    [models.elsewhere]
    pool = "other"
    executor = "simulated"
    """
)
ENV = {"MODEL_KEY": "sk-canary-5554443332", "MODEL_URL": "http://named/v1"}


async def test_every_model_of_the_pool_has_an_executor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        executors = build_executors(CATALOGUE, "local", ENV)
    kinds = {name: type(executor) for name, executor in executors.items()}
    assert kinds == {
        "plain": OpenAIExecutor,
        "secured": OpenAIExecutor,
        "by-env": OpenAIExecutor,
        "only-env": BrokenExecutor,
        "bad-url": BrokenExecutor,
        "python": PythonExecutor,
        "no-module": BrokenExecutor,
        "sim": SimulatedExecutor,
    }
    for executor in executors.values():
        await executor.aclose()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert any("NO_SUCH_URL" in line for line in told)
    assert "canary" not in str(told)
    assert redact("the key is sk-canary-5554443332") == "the key is [redacted]"


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("only-env", Code.MODEL_UNKNOWN, "NO_SUCH_URL"),
        ("bad-url", Code.MODEL_UNKNOWN, "base_url"),
        ("no-module", Code.MODEL_UNKNOWN, "nowhere"),
        ("secured", Code.UPSTREAM_AUTH, "MODEL_KEY"),
    ],
)
async def test_tasks_of_a_broken_model_fail_with_the_reason(model: str, code: Code, words: str) -> None:
    executor = build_executors(CATALOGUE, "local", {})[model]
    fault = (await attempt(executor)).failed
    assert (fault.code, fault.retryable, fault.refused) == (code, False, False)
    assert words in fault.message
    await executor.aclose()


@pytest.mark.parametrize("key", ["naïve", "two\nlines", "   "])
async def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    executor = build_executors(CATALOGUE, "local", {"MODEL_KEY": key})["secured"]
    fault = (await attempt(executor)).failed
    assert fault.code is Code.UPSTREAM_AUTH
    assert key.strip() not in fault.message or not key.strip()


def test_addresses() -> None:
    assert chat_url("http://h:1/v1/") == "http://h:1/v1/chat/completions"
    for url in ("h:1/v1", "ftp://h/v1", "http://", "http://h/v1?key=secret", "http://user:pw@h/v1?x=1"):
        with pytest.raises(ValueError, match="no HTTP base URL") as caught:
            chat_url(url)
        assert "secret" not in str(caught.value)
        assert "pw" not in str(caught.value)
