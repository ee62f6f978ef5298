from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from perdure.embedded import catalogue, plan
from perdure.embedded.plan import Options, PlanError, Ports, Secrets
from perdure.embedded.temporal import EmbeddedTemporal, server_settings
from perdure.models import parse_catalogue

ENVIRON = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "TEMPORAL_ADDRESS": "prod:7233",
    "TEMPORAL_API_KEY": "secret",
    "PGPASSWORD": "secret",
    "DATABASE_URL": "postgres://prod",
    "PERDURE_API_KEY": "sk_x",
    "PERDURE_DATABASE_URL": "postgres://prod",
    "PERDURE_CALLBACK_SECRET": "secret",
    "PERDURE_RETENTION_DAYS": "5",
    "MODEL_KEY": "for the model server",
}
SECRETS = Secrets("the-secret-key", "the-callback-secret")


def test_ports_are_the_documented_ones() -> None:
    assert Ports.of(None) == Ports(8000, 7233, 8233, 8080, 5433, 9464)
    assert Ports.of(19000) == Ports(19000, 19001, 19002, 19003, 19004, 19010)
    for base in (0, -5, 65_501, 70_000):
        with pytest.raises(PlanError, match="--port-base"):
            Ports.of(base)


def test_ports_to_check_are_those_that_are_used() -> None:
    ports = Ports.of(19000)
    assert set(ports.used(model=True, workers=3).values()) == {*range(19000, 19005), 19010, 19011, 19012}
    assert ports.model not in ports.used(model=False, workers=3).values()


def base(**more: str) -> dict[str, str]:
    return plan.base_environment(ENVIRON | more, Ports.of(19000), Path("/d/models.toml"), "http://m/v1")


def test_nothing_of_the_callers_temporal_reaches_the_stack() -> None:
    env = base()
    assert "TEMPORAL_API_KEY" not in env
    assert env["TEMPORAL_ADDRESS"] == "127.0.0.1:19001"
    assert env["PERDURE_MODEL_URL"] == "http://m/v1"
    assert "PERDURE_MODEL_URL" not in plan.base_environment(
        {"PERDURE_MODEL_URL": "http://old"}, Ports(), Path("m"), None
    )


def test_gpu_worker_sees_no_database_and_no_secret() -> None:
    env = plan.gpu_environment(base(), 19012)
    assert "secret" not in env.values()
    assert not [name for name in env if "DATABASE" in name or "CALLBACK" in name or name.startswith("PG")]
    assert "PERDURE_API_KEY" not in env
    assert env["MODEL_KEY"] == "for the model server"
    assert env["PERDURE_METRICS_PORT"] == "19012"


def test_api_and_workers_with_rows_get_theirs() -> None:
    env = plan.database_environment(
        base(),
        database_url="postgresql://own",
        secrets=SECRETS,
        ports=Ports.of(19000),
        model_keys=["MODEL_KEY"],
    )
    assert env["PERDURE_DATABASE_URL"] == "postgresql://own"
    assert env["PERDURE_SECRET_KEY"] == "the-secret-key"
    assert env["PERDURE_CALLBACK_SECRET"] == "the-callback-secret"
    assert env["PERDURE_AUTH"] == "none"
    assert (env["PERDURE_HOST"], env["PERDURE_PORT"]) == ("127.0.0.1", "19000")
    assert env["PERDURE_RETENTION_DAYS"] == "5"
    assert "MODEL_KEY" not in env


def test_auth_of_the_caller_is_kept() -> None:
    env = plan.database_environment(
        base(PERDURE_AUTH="keys"), database_url="x", secrets=SECRETS, ports=Ports()
    )
    assert env["PERDURE_AUTH"] == "keys"


def test_built_in_models_stand_at_the_ports_of_the_stack() -> None:
    content = catalogue.builtin_models(base_url="http://127.0.0.1:19003/v1")
    found = parse_catalogue(catalogue.to_toml(content, "a head\nof two lines"))
    assert found.models["smollm2-135m"].base_url == "http://127.0.0.1:19003/v1"
    assert found.models["smollm2-135m"].served_model == "embedded"
    assert found.models["smollm2-135m"].pool == found.models["simulated"].pool == "local"
    assert list(found.pools) == ["local"]


def test_without_a_model_only_the_simulated_one_is_left() -> None:
    assert list(catalogue.builtin_models(base_url=None)["models"]) == ["simulated"]


def test_another_server_keeps_the_model_id_and_loses_what_is_only_known_of_ours() -> None:
    content = catalogue.builtin_models(base_url="http://gpu/v1", served_model="org/big", foreign=True)
    model = parse_catalogue(catalogue.to_toml(content)).models["smollm2-135m"]
    assert model.api_key_env is None
    assert (model.served_model, model.resume, model.context_tokens) == ("org/big", "none", None)
    with_key = catalogue.builtin_models(base_url="http://gpu/v1", foreign=True, key=True)
    assert with_key["models"]["smollm2-135m"]["api_key_env"] == "PERDURE_MODEL_API_KEY"


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://gpu:8000", "http://gpu:8000/v1"),
        ("http://gpu:8000/", "http://gpu:8000/v1"),
        (" https://gpu/openai/v1/ ", "https://gpu/openai/v1"),
    ],
)
def test_model_url_is_made_whole(given: str, normal: str) -> None:
    assert catalogue.normal_base_url(given) == normal
    assert plan.model_url(Options(model_url=given), Ports()) == normal


@pytest.mark.parametrize("url", ["gpu:8000", "ftp://gpu", "http://", "x"])
def test_model_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="PERDURE_MODEL_URL"):
        plan.model_url(Options(model_url=url), Ports())


def test_no_model_wins_over_a_url() -> None:
    assert plan.model_url(Options(model=False, model_url="http://x"), Ports()) is None
    assert plan.model_url(Options(), Ports.of(19000)) == "http://127.0.0.1:19003/v1"


def test_toml_is_read_back_as_it_was() -> None:
    content = {
        "types": ["a", 'b"\\\n'],
        "pools": {"a.b": {"slots": 2, "share": 0.5, "on": True}, "empty": {}},
        "deep": {"er": {"x": "é\u2028"}},
    }
    assert tomllib.loads(catalogue.to_toml(content)) == content


def test_temporal_gets_the_settings_file_as_flags(tmp_path: Path) -> None:
    line = EmbeddedTemporal(tmp_path, 7001, 7002).command()
    flags = list(pairwise(line))
    assert ("--dynamic-config-value", "matching.enableFairness=true") in flags
    assert ("--dynamic-config-value", 'history.timerProcessorMaxTimeShift="50ms"') in flags
    assert ("--sqlite-pragma", "journal_mode=WAL") in flags
    assert ("--search-attribute", "TaskStatus=Keyword") in flags
    assert ("--ui-port", "7002") in flags
    assert line.count("--dynamic-config-value") == len(server_settings())


def test_settings_with_two_values_for_one_key_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("a.b:\n  - value: 1\n    constraints: {namespace: x}\n  - value: 2\n")
    with pytest.raises(ValueError, match=r"a\.b"):
        server_settings(file)
