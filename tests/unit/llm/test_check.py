"""`perdure models check` against servers that can less than llama.cpp."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from perdure.llm.check import check_model, main, print_report
from perdure.llm.check_report import Report
from perdure.models import CatalogueError, parse_catalogue
from tests.support.model_server import DONE, Call, ModelServer, chunk, finish, reply, stream, usage

TEXT = "A bridge spans the river. People cross it every day and look at the water."


async def check(server: ModelServer, **model: str) -> Report:
    more = "\n".join(f'{key} = "{value}"' for key, value in model.items())
    text = f'[pools.p]\n[models.m]\npool = "p"\nbase_url = "{server.base_url}"\n{more}\n'
    return await check_model(parse_catalogue(text), "m", {})


def verdicts(report: Report) -> dict[str, bool | None]:
    return {finding.name: finding.ok for finding in report.findings}


def server_that(*, continues: str | None = None, counts: bool = True, pieces: bool = True) -> Any:
    """A server that writes TEXT; it goes on from a prefix in one dialect, or begins anew."""

    def script(call: Call) -> list[Any]:
        if call.method == "GET":
            return reply(404, "")
        last = call.body["messages"][-1]
        dialect = None
        if last["role"] == "assistant":
            dialect = "trailing"
            if last.get("prefix"):
                dialect = "prefix_flag"
            if call.body.get("continue_final_message"):
                dialect = "continue_final_message"
        left = TEXT[len(last["content"]) :] if dialect and dialect == continues else TEXT
        parts = [left[at : at + 5] for at in range(0, len(left), 5)] if pieces else [left]
        made = [step for part in parts for step in (chunk(part), 0.002)]
        return stream(*made, finish(), *([usage(5, len(parts))] if counts else []), DONE)

    return script


@pytest.mark.parametrize("dialect", ["trailing", "continue_final_message", "prefix_flag", None])
async def test_the_dialect_is_found(server: ModelServer, dialect: str | None) -> None:
    server.script(server_that(continues=dialect))
    report = await check(server)
    assert report.usable
    assert report.resume == (dialect or "none")
    assert f'resume = "{dialect or "none"}"' in report.lines
    found = verdicts(report)
    assert found["answers"]
    assert found["streams"]
    assert found["usage"]
    assert found["stops on disconnect"] is None  # it shows no figures


async def test_a_server_that_neither_streams_nor_counts(server: ModelServer) -> None:
    server.script(server_that(counts=False, pieces=False))
    report = await check(server)
    assert not report.usable
    assert verdicts(report)["streams"] is False
    assert verdicts(report)["usage"] is False


async def test_a_server_that_refuses(server: ModelServer) -> None:
    server.script(reply(401, '{"error": {"message": "who are you"}}'))
    report = await check(server)
    assert not report.usable
    assert report.findings[0].says.startswith("upstream_auth")


async def test_a_server_that_goes_on_for_nobody(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.llm.server_check._WATCH", 0.3)
    plain = server_that()

    def script(call: Call) -> list[Any]:
        if call.path == "/metrics":
            return reply(200, 'vllm:num_requests_running{model="m"} 1.0\n', "text/plain")
        return plain(call)

    server.script(script)
    assert verdicts(await check(server))["stops on disconnect"] is False


async def test_setup_mistakes_and_other_executors(server: ModelServer) -> None:
    report = await check(server, api_key_env="NO_SUCH_KEY")
    assert not report.usable
    assert "NO_SUCH_KEY" in report.findings[0].says
    catalogue = parse_catalogue('[pools.p]\n[models.s]\npool = "p"\nexecutor = "simulated"')
    assert (await check_model(catalogue, "s", {})).usable
    with pytest.raises(CatalogueError, match="nope"):
        await check_model(catalogue, "nope", {})


async def test_the_report_is_printed(server: ModelServer) -> None:
    server.script(server_that(continues="trailing"))
    out = io.StringIO()
    print_report(await check(server), Console(file=out, width=120))
    assert "trailing" in out.getvalue()
    assert "[models.m]" in out.getvalue()


def test_the_command_says_whether_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[pools.p]\n[models.s]\npool = "p"\nexecutor = "simulated"\n')
    assert main("s", path) == 0
    path.write_text(path.read_text() + '[models.k]\npool = "p"\nexecutor = "python"\nimport_path = "x:y"\n')
    assert main(None, path) == 1
    assert "x:y" in capsys.readouterr().out.replace("\n", "")
    assert json.dumps(main("s", path)) == "0"
