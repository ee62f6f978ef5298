"""The catalogue: which models there are, which pool serves each, and how (`models.toml`).

    catalogue = load_catalogue(path)           raises CatalogueError with file, key and remedy

Secrets are not in it: `api_key_env` names an environment variable that the GPU worker alone reads.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perdure.contracts import MAX_RESULT_BYTES
from perdure.task.states import Priority

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # also a queue name, a path parameter and a metric label
_MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,63}$"


def _default_weights() -> dict[Priority, float]:
    return {Priority.HIGH: 6.0, Priority.NORMAL: 4.0, Priority.LOW: 2.0}


class CatalogueError(ValueError):
    """models.toml is missing or wrong; the message says where and how to mend it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pool(_Strict):
    """A GPU pool: one task queue, several workers."""

    slots: int = Field(5, ge=1, le=1000)  # per worker
    scheduling: Literal["strict", "weighted"] = "strict"
    max_wait: float = Field(300, gt=0)  # seconds per class before it moves up, under `strict`
    weights: dict[Priority, float] = Field(default_factory=_default_weights)  # under `weighted`
    window: int | None = Field(None, ge=1)  # attempts waiting in Temporal per class; max(32, 8 x slots)
    max_waiting: dict[Priority, int] = Field(default_factory=dict)  # 429 beyond


class Model(_Strict):
    """One model as callers name it (`model_id`)."""

    pool: str = Field(pattern=_NAME)
    executor: Literal["openai", "python", "simulated"] = "openai"
    base_url: str | None = None
    base_url_env: str | None = None
    api_key_env: str | None = None
    served_model: str | None = None  # the name sent upstream; the model's own where not given
    import_path: str | None = None  # python executor: "package.module:function"
    resume: Literal["none", "trailing", "continue_final_message", "prefix_flag"] = "none"
    max_input_bytes: int = Field(262_144, ge=1, le=1_048_576)
    max_output_bytes: int = Field(MAX_RESULT_BYTES, ge=1, le=MAX_RESULT_BYTES)
    default_max_tokens: int = Field(512, ge=1, le=16_777_216)
    max_tokens: int = Field(16_777_216, ge=1, le=16_777_216)  # the most a task may ask for
    context_tokens: int | None = Field(None, ge=1)
    connect_timeout: float = Field(5, gt=0)
    first_token_timeout: float = Field(120, gt=0)
    token_timeout: float = Field(60, gt=0)
    timeout_seconds: float = Field(1800, gt=0, le=86_400)  # one attempt
    queue_timeout_seconds: float | None = Field(None, gt=0)
    deadline_seconds: float | None = Field(None, gt=0)
    heartbeat_timeout: float = Field(10, ge=2)
    unavailable_patience: float = Field(600, ge=0)
    max_retries: int | None = Field(None, ge=0, le=20)
    allow_image_urls: bool = False  # remote ones; data: URLs pass within max_input_bytes
    extra_body: dict[str, Any] = Field(default_factory=dict)  # merged into each upstream request

    @model_validator(mode="after")
    def _fits_executor(self) -> Self:
        if self.executor == "openai" and not (self.base_url or self.base_url_env):
            raise ValueError("executor 'openai' needs base_url or base_url_env")
        if self.executor == "python" and not self.import_path:
            raise ValueError("executor 'python' needs import_path = \"package.module:function\"")
        return self


class User(_Strict):
    """What configuration says of one user; all optional."""

    weight: float = Field(1.0, gt=0, le=1000)  # share within a class
    max_running: int | None = Field(None, ge=1)


class Catalogue(_Strict):
    """Everything in models.toml. `task_types` bounds a metric label; others count as "other"."""

    task_types: list[str] = Field(default_factory=lambda: ["chat", "document", "code-review"])
    pools: dict[str, Pool] = Field(default_factory=dict)
    models: dict[str, Model] = Field(default_factory=dict)
    users: dict[str, User] = Field(default_factory=dict)
    max_running_per_user: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name in self.pools:
            if not re.match(_NAME, name):
                raise ValueError(f"pools.{name}: a pool name is letters, digits and . _ -, at most 64")
        for name, model in self.models.items():
            if not re.match(_MODEL_NAME, name):
                raise ValueError(
                    f"models.{name}: a model name is letters, digits and . _ : @ -, at most 64, "
                    "with no slash (it stands in paths); put the upstream's name in served_model"
                )
            if model.pool not in self.pools:
                raise ValueError(f"models.{name}.pool: there is no [pools.{model.pool}]; add that table")
        return self

    def pool_of(self, model_id: str) -> Pool:
        return self.pools[self.models[model_id].pool]

    def models_of(self, pool: str) -> list[str]:
        return [name for name, model in self.models.items() if model.pool == pool]

    def type_label(self, task_type: str) -> str:
        return task_type if task_type in self.task_types else "other"

    def model_label(self, model_id: str) -> str:
        return model_id if model_id in self.models else "other"

    def weight_of(self, user_id: str) -> float:
        user = self.users.get(user_id)
        return user.weight if user else 1.0


def parse_catalogue(text: str, *, where: str = "models.toml") -> Catalogue:
    """Parses models.toml's text. Raises CatalogueError."""
    try:
        return Catalogue.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{where}: not TOML: {error}") from error
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise CatalogueError(f"{where}: {lines}") from error


def load_catalogue(path: Path) -> Catalogue:
    """Reads models.toml. Raises CatalogueError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CatalogueError(
            f"{path}: cannot be read ({error.strerror}); set PERDURE_MODELS to the path of models.toml"
        ) from error
    return parse_catalogue(text, where=str(path))
