"""What a local stack consists of: options, ports, and the environment and command of each process. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.embedded import catalogue
from perdure.embedded.temporal import NAMESPACE

HOST = "127.0.0.1"
DRAIN_SECONDS = 2.5  # of GPU workers when the stack stops: they hand their checkpoints over
GRACE_SECONDS = 1.5  # of the API

# What a GPU worker must never see. It may stand in any network that reaches Temporal.
_NOT_FOR_GPU = (
    "PERDURE_DATABASE_",
    "PERDURE_SECRET_KEY",
    "PERDURE_CALLBACK_",
    "PERDURE_API_KEY",
    "DATABASE_URL",
    "PG",
)


class PlanError(ValueError):
    """The options do not fit together; the message says what to change."""


@dataclass(frozen=True)
class Options:
    """The options of `perdure dev`, as given."""

    data_dir: Path = Path(".perdure")
    port_base: int | None = None
    models: Path | None = None
    gpu_workers: int = 1
    model: bool = True  # False: --no-model
    model_url: str | None = None  # PERDURE_MODEL_URL

    @property
    def embedded_model(self) -> bool:
        """Whether the stack runs a model server of its own."""
        return self.model and not self.model_url


@dataclass(frozen=True)
class Ports:
    """Where everything listens. `metrics` is the first of the pages of control, callbacks and GPU workers."""

    api: int = 8000
    temporal: int = 7233
    temporal_ui: int = 8233
    model: int = 8080
    postgres: int = 5433
    metrics: int = 9464

    @classmethod
    def of(cls, base: int | None) -> Ports:
        """The usual ports, or N, N+1, N+2, N+3, N+4 and from N+10. Raises PlanError."""
        if base is None:
            return cls()
        if not 1 <= base <= 65_500:
            raise PlanError(f"--port-base {base}: give a port between 1 and 65500")
        return cls(base, base + 1, base + 2, base + 3, base + 4, base + 10)

    def used(self, *, model: bool, workers: int) -> dict[str, int]:
        """Every port of a stack by what listens there; `workers` counts those with a metrics page."""
        ports = {
            "the API": self.api,
            "Temporal": self.temporal,
            "the Temporal UI": self.temporal_ui,
            "the model server": self.model,
            "Postgres": self.postgres,
        }
        if not model:
            del ports["the model server"]
        return ports | {f"metrics of worker {n}": self.metrics + n for n in range(workers)}


@dataclass(frozen=True)
class Secrets:
    """Made once per data folder; those of the environment come first."""

    secret_key: str
    callback_secret: str


def command(*words: str) -> list[str]:
    """A command of ours. -P: a folder of the caller's that is called `api` must not hide our own package."""
    return [sys.executable, "-P", "-m", "perdure", *words]


def base_environment(
    environ: Mapping[str, str], ports: Ports, models: Path, model_url: str | None
) -> dict[str, str]:
    """What every process of the stack gets: the caller's environment with our Temporal and models put in.

    The caller's Temporal settings (another cluster, its certificates) must not reach the embedded server.
    """
    env = {name: value for name, value in environ.items() if not name.startswith("TEMPORAL_")}
    env |= {
        "TEMPORAL_ADDRESS": f"{HOST}:{ports.temporal}",
        "TEMPORAL_NAMESPACE": NAMESPACE,
        "TEMPORAL_CONFIG_FILE": os.devnull,
        "PERDURE_MODELS": str(models),
        "PYTHONUNBUFFERED": "1",
    }
    env.pop("PERDURE_MODEL_URL", None)
    if model_url:
        env["PERDURE_MODEL_URL"] = model_url
    env.setdefault("PERDURE_LOG_FORMAT", "console")
    env.setdefault("PERDURE_DRAIN_SECONDS", str(DRAIN_SECONDS))
    env.setdefault("NO_COLOR", "1")  # they write to files
    return env


def gpu_environment(base: Mapping[str, str], metrics_port: int) -> dict[str, str]:
    """A GPU worker's: no database, no secret of a caller."""
    env = {name: value for name, value in base.items() if not name.startswith(_NOT_FOR_GPU)}
    return env | {"PERDURE_METRICS_PORT": str(metrics_port)}


def database_environment(
    base: Mapping[str, str],
    *,
    database_url: str,
    secrets: Secrets,
    ports: Ports,
    model_keys: Iterable[str] = (),
) -> dict[str, str]:
    """That of API, control and callbacks worker. `model_keys`: variables that only GPU workers may read."""
    env = {name: value for name, value in base.items() if name not in set(model_keys)}
    env |= {
        "PERDURE_DATABASE_URL": database_url,
        "PERDURE_SECRET_KEY": secrets.secret_key,
        "PERDURE_CALLBACK_SECRET": secrets.callback_secret,
        "PERDURE_HOST": HOST,
        "PERDURE_PORT": str(ports.api),
        "PERDURE_TEMPORAL_UI_URL": f"http://{HOST}:{ports.temporal_ui}",
    }
    env.setdefault("PERDURE_AUTH", "none")
    env.setdefault("PERDURE_GRACE_SECONDS", str(GRACE_SECONDS))
    env.setdefault("PERDURE_CALLBACK_ALLOW_CIDRS", "127.0.0.0/8,::1/128")
    env.setdefault("PERDURE_CALLBACK_ALLOW_HTTP", "true")
    env.setdefault("PERDURE_CALLBACK_PORTS", "")  # every port
    return env


def urls(ports: Ports, *, model_url: str | None, workers: Iterable[str]) -> dict[str, str]:
    """Where to reach what, for people and for dev.json. `workers` in the order of their metrics ports."""
    found = {
        "api": f"http://{HOST}:{ports.api}",
        "openapi": f"http://{HOST}:{ports.api}/openapi.json",
        "metrics": f"http://{HOST}:{ports.api}/metrics",
        "temporal": f"{HOST}:{ports.temporal}",
        "temporal_ui": f"http://{HOST}:{ports.temporal_ui}",
    }
    if model_url:
        found["model"] = model_url
    for n, worker in enumerate(workers):
        found[f"metrics:{worker}"] = f"http://{HOST}:{ports.metrics + n}/metrics"
    return found


def model_url(options: Options, ports: Ports) -> str | None:
    """Where the model server is; None with --no-model. Raises PlanError."""
    if not options.model:
        return None
    if options.model_url is None:
        return catalogue.embedded_base_url(ports.model)
    try:
        return catalogue.normal_base_url(options.model_url)
    except ValueError as error:
        raise PlanError(str(error)) from error
