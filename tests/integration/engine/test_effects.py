"""Every key of dynamicconfig.yaml has its effect: the server takes an unknown one without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

from perdure.embedded.temporal import EmbeddedTemporal, server_settings
from perdure.probe import SLOW_HOP, SLOW_TIMER, Effects, measure
from workflows.probe import EngineProbe

TRIES = 3  # a busy machine can blur one measurement of times


async def test_our_settings_have_their_effects(temporal_client: Client) -> None:
    for _ in range(TRIES):
        effects = await measure(temporal_client, EngineProbe)
        if not effects.losses():
            break
    assert effects.partitions == 1
    assert effects.classes_exact, effects.order
    assert effects.users_share, effects.order
    assert effects.cancel is not None
    assert effects.cancel < 1  # without a heartbeat: it was pushed
    assert effects.hop < SLOW_HOP
    assert effects.timer < SLOW_TIMER
    assert effects.losses() == []


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTemporal]:
    server = EmbeddedTemporal(tmp_path_factory.mktemp("plain"), settings={})
    server.start()
    yield server
    server.stop(5)


async def test_a_server_as_it_comes_is_told_apart_key_by_key(plain_server: EmbeddedTemporal) -> None:
    """The probe can fail: on a server without our settings each of them is missed."""
    client = await Client.connect(plain_server.address)
    missed: set[str] = set()
    seen = []
    while missed != set(server_settings()) and len(seen) < TRIES:
        seen.append(await measure(client, EngineProbe))
        missed |= {key for loss in seen[-1].losses() for key in loss.keys}
    assert missed == set(server_settings()), seen


def test_losses_are_said_with_their_remedy() -> None:
    order = ("high", "high", *["a"] * 24, *["b"] * 8)
    (loss,) = Effects(1, order, 0.01, 0.1, 0.02).losses()
    assert str(loss) == (
        "users do not share a class: whoever queued first is served first "
        "(set matching.enableFairness; see deploy/temporal/dynamicconfig.yaml)"
    )


def test_settings_file_is_the_one_in_deploy() -> None:
    root = Path(__file__).parents[3]
    assert (root / "perdure/embedded/dynamicconfig.yaml").resolve() == (
        root / "deploy/temporal/dynamicconfig.yaml"
    )
