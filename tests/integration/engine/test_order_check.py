"""What a start-up says of a server whose order is not exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from temporalio.client import Client

from perdure.embedded.temporal import EmbeddedTemporal, server_settings
from perdure.engine_check import in_words, say_what_order_lacks
from perdure.probe import Order
from perdure.temporal import EngineUnavailable
from workflows.probe import EngineProbe

EXACT = ("high", "high", *["a", "b"] * 8, *["a"] * 16)
UNSHARED = ("high", "high", *["a"] * 24, *["b"] * 8)


@pytest.fixture(scope="module")
def unfair_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTemporal]:
    """One without fairness."""
    settings = {key: value for key, value in server_settings().items() if key != "matching.enableFairness"}
    server = EmbeddedTemporal(tmp_path_factory.mktemp("unfair"), settings=settings)
    server.start()
    yield server
    server.stop(5)


def _said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the check itself logged: other loggers may be at any level."""
    return [record for record in caplog.records if record.name == "perdure.engine_check"]


async def test_an_exact_server_is_said_so_once_it_answers(
    temporal_client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.engine_check._AGAIN", 0.01)
    asked: list[int] = []

    async def connected() -> Client:
        asked.append(1)
        if len(asked) < 3:
            raise EngineUnavailable("not yet")
        return temporal_client

    with caplog.at_level(logging.INFO, "perdure.engine_check"):
        await say_what_order_lacks(connected, EngineProbe, ["p", "q"], delay=0)
    (line,) = _said(caplog)
    assert (line.levelname, len(asked)) == ("INFO", 3)
    assert "exactly" in line.getMessage()


async def test_a_server_without_fairness_is_told_and_how_to_mend_it(
    unfair_server: EmbeddedTemporal, caplog: pytest.LogCaptureFixture
) -> None:
    client = await Client.connect(unfair_server.address)
    with caplog.at_level(logging.INFO, "perdure.engine_check"):
        await say_what_order_lacks(client, EngineProbe, ["p"], delay=0)
    (line,) = _said(caplog)
    assert line.levelname == "WARNING"
    assert "users do not share a class" in line.getMessage()
    assert "set matching.enableFairness" in line.getMessage()
    assert "dynamicconfig.yaml" in line.getMessage()


def test_pools_with_several_partitions_are_named() -> None:
    assert in_words({"a": 1, "b": 1}, Order(1, EXACT)) == []
    (words,) = in_words({"a": 1, "b": 4}, Order(1, EXACT))
    assert "pools b:" in words
    assert "matching.numTaskqueueReadPartitions" in words


def test_settings_that_hold_for_the_pool_queues_alone_are_no_loss() -> None:
    (words,) = in_words({"a": 1}, Order(4, UNSHARED))
    assert "see that matching.enableFairness" in words
    assert len(in_words({"a": 4}, Order(4, UNSHARED))) == 2
