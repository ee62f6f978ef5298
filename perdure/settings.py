"""Settings from the environment: frozen, built only in the composition roots.

The Temporal connection is not here: it comes from the SDK's own environment configuration
(TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TLS, API key). GPU workers use `WorkerSettings`, which has no database.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

_CONFIG = SettingsConfigDict(env_prefix="PERDURE_", frozen=True, extra="ignore")


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class WorkerSettings(BaseSettings):
    """What every process may know."""

    model_config = _CONFIG

    models: Path = Path("models.toml")
    payload_key: SecretStr | None = None  # base64 of 16, 24 or 32 bytes; a comma separates retired keys
    drain_seconds: float = Field(30, ge=0, le=3600)
    metrics_port: int | None = Field(None, ge=0, le=65535)  # workers; None: no page
    metrics_host: str = "127.0.0.1"
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class DatabaseSettings(WorkerSettings):
    """Processes that read or write rows: API, control and callbacks workers."""

    database_url: SecretStr  # postgresql://user:password@host:port/name
    database_pool: int = Field(10, ge=1, le=200)
    secret_key: SecretStr | None = None  # base64 of 32 bytes: encrypts callback secrets at rest
    callback_secret: SecretStr | None = None  # one secret for all users
    callback_secret_previous: SecretStr | None = None  # still signed with while receivers change over
    retention_days: int = Field(30, ge=1, le=3650)


class CallbackSettings(DatabaseSettings):
    """The callbacks worker, and the API for checking URLs at submit."""

    callback_allow_hosts: Annotated[list[str], NoDecode] = Field(default_factory=list)
    callback_allow_cidrs: Annotated[list[str], NoDecode] = Field(default_factory=list)
    callback_allow_http: bool = False
    callback_ports: Annotated[list[int], NoDecode] = Field(default_factory=lambda: [443])  # empty: every port

    @field_validator("callback_allow_hosts", "callback_allow_cidrs", "callback_ports", mode="before")
    @classmethod
    def _lists(cls, value: object) -> object:
        return _split(value)


class ApiSettings(CallbackSettings):
    """The API process."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    auth: Literal["keys", "none"] = "keys"
    trusted_proxies: Annotated[list[str], NoDecode] = Field(default_factory=list)  # addresses or CIDRs
    submits_per_minute: int = Field(600, ge=1)  # tasks of one key
    bodies_per_minute: int = Field(1200, ge=1)  # requests with a body of one key
    max_waiting_per_user: int = Field(10_000, ge=1)
    max_streams_per_user: int = Field(50, ge=1)
    grace_seconds: float = Field(10, ge=0, le=600)  # SIGTERM to exit
    temporal_ui_url: str | None = None  # for links

    @field_validator("trusted_proxies", mode="before")
    @classmethod
    def _proxies(cls, value: object) -> object:
        return _split(value)

    @property
    def limits_apply(self) -> bool:
        """Rate, waiting, running and stream limits are off where auth is off."""
        return self.auth == "keys"
