"""Executors from the catalogue: built once per worker, closed with it."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncGenerator, Mapping

import httpx

from perdure.llm.base import Delta, Executor, Job
from perdure.llm.openai import OpenAIExecutor, chat_url
from perdure.llm.python import BadFunctionError, PythonExecutor, load_function
from perdure.llm.simulated import SimulatedExecutor
from perdure.llm.wire import make_client
from perdure.models import Catalogue, Model
from perdure.observability.redact import protect, redact_url
from perdure.task.errors import ErrorCode, TaskFault

log = logging.getLogger(__name__)


class SetupError(ValueError):
    """A model cannot be served as it is configured. `code` is what its tasks fail with."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class BrokenExecutor:
    """Stands in for a model that cannot be served: each of its tasks fails at once and says what to do."""

    def __init__(self, error: SetupError) -> None:
        self._error = error
        self.code = error.code

    async def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Raises the fault."""
        if self._error:
            raise TaskFault(self._error.code, self._error.message)
        yield Delta()  # never reached; makes this a generator

    async def aclose(self) -> None:
        """Holds nothing."""


def build_executors(catalogue: Catalogue, pool: str, env: Mapping[str, str]) -> dict[str, Executor]:
    """An executor for each model of the pool, by model id. `env` holds base URLs and API keys by name.

    A model that cannot be served (a key is missing, a function cannot be imported) is logged and gets an
    executor that fails its tasks with the reason; the others are served.
    """
    executors: dict[str, Executor] = {}
    for name in catalogue.models_of(pool):
        try:
            executors[name] = build_executor(name, catalogue.models[name], env)
        except SetupError as error:
            log.error(
                "model cannot be served; its tasks will fail: %s",
                error.message,
                extra={"model_id": name, "error_code": str(error.code)},
            )
            executors[name] = BrokenExecutor(error)
    return executors


def build_executor(name: str, model: Model, env: Mapping[str, str]) -> Executor:
    """The executor of one model. Raises SetupError."""
    if model.executor == "simulated":
        return SimulatedExecutor(name)
    if model.executor == "python":
        path = model.import_path or ""
        try:
            return PythonExecutor(name, load_function(path), path)
        except BadFunctionError as error:
            raise SetupError(ErrorCode.MODEL_UNKNOWN, f"model '{name}': {error}") from error
    base_url = model_url(name, model, env)
    return OpenAIExecutor(name, model, base_url, _client(model, base_url), api_key=api_key(name, model, env))


def model_url(name: str, model: Model, env: Mapping[str, str]) -> str:
    """The base URL of an `openai` model; `base_url_env` wins where both are set. Raises SetupError."""
    named = env.get(model.base_url_env) if model.base_url_env else None
    base_url = named or model.base_url
    if not base_url:
        raise SetupError(
            ErrorCode.MODEL_UNKNOWN,
            f"model '{name}': set the environment variable {model.base_url_env} on the GPU worker to the "
            "base URL of its model server, for example http://127.0.0.1:8080/v1",
        )
    try:
        httpx.URL(chat_url(base_url))
    except (ValueError, httpx.InvalidURL) as error:
        raise SetupError(
            ErrorCode.MODEL_UNKNOWN,
            f"model '{name}': base_url {redact_url(base_url)} is not usable; write http://HOST:PORT/v1",
        ) from error
    return base_url


def api_key(name: str, model: Model, env: Mapping[str, str]) -> str | None:
    """The API key of an `openai` model, None where it needs none. Raises SetupError."""
    if model.api_key_env is None:
        return None
    key = env.get(model.api_key_env, "").strip()
    if not key:
        raise SetupError(
            ErrorCode.UPSTREAM_AUTH,
            f"model '{name}': the GPU worker has no API key; set {model.api_key_env} in its environment",
        )
    if not (key.isascii() and key.isprintable()):
        raise SetupError(
            ErrorCode.UPSTREAM_AUTH,
            f"model '{name}': the API key in {model.api_key_env} holds characters that no header can carry",
        )
    protect(key)
    return key


_tls: list[ssl.SSLContext] = []


def _client(model: Model, base_url: str) -> httpx.AsyncClient:
    """TLS contexts are large, so one without TLS gets none and all others share one."""
    if not base_url.startswith("https:"):
        return make_client(model.connect_timeout, verify=False)
    if not _tls:
        _tls.append(httpx.create_ssl_context(trust_env=False))
    return make_client(model.connect_timeout, verify=_tls[0])
