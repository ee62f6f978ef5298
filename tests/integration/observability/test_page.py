"""A worker's page over a real socket, with the Temporal SDK's own metrics on it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

from perdure.models import Catalogue, parse_catalogue
from perdure.observability.metrics import Metrics
from perdure.observability.page import Exposition, MetricsPage
from perdure.observability.temporal_metrics import SdkMetrics, make_runtime
from tests.unit.observability.promql import SDK_METRICS


@pytest.fixture(scope="module")
def sdk() -> SdkMetrics:
    """One runtime for the module: its threads live as long as the process."""
    return make_runtime()


@pytest.fixture
def catalogue() -> Catalogue:
    return parse_catalogue("[pools.local]\n")


@pytest.fixture
async def page(sdk: SdkMetrics, catalogue: Catalogue) -> AsyncIterator[MetricsPage]:
    one = MetricsPage(Exposition(Metrics(catalogue), sdk), "127.0.0.1", 0)
    await one.start()
    yield one
    await one.aclose()


async def get(page: MetricsPage, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, f"http://127.0.0.1:{page.port}{path}")


@activity.defn
async def nothing() -> None:
    """Does nothing, so that the SDK counts an activity."""


@workflow.defn(sandboxed=False)
class Probe:
    """One activity."""

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(nothing, start_to_close_timeout=timedelta(seconds=10))


async def test_one_page_holds_ours_the_processs_and_the_sdks(
    page: MetricsPage, sdk: SdkMetrics, temporal_address: str
) -> None:
    client = await Client.connect(temporal_address, runtime=sdk.runtime)
    queue = f"probe-{uuid.uuid4().hex}"
    async with Worker(client, task_queue=queue, workflows=[Probe], activities=[nothing]):
        await client.execute_workflow(Probe.run, id=queue, task_queue=queue)
        reply = await get(page, "/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.text))  # raises for text that is no exposition
    names = {sample.name for family in families for sample in family.samples}
    assert "perdure_tasks_finished_total" in names
    assert "process_cpu_seconds_total" in names
    assert "temporal_workflow_completed_total" in names
    assert names >= SDK_METRICS  # those that the dashboard reads, with the labels it reads them by
    labels = {s.name: set(s.labels) for f in families for s in f.samples if s.name in SDK_METRICS}
    assert all("task_queue" in one for one in labels.values())
    assert "worker_type" in labels["temporal_worker_task_slots_used"]
    assert len({family.name for family in families}) == len(families)  # each family once


async def test_health_answers_and_readiness_follows_the_drain(catalogue: Catalogue) -> None:
    ready = True
    page = MetricsPage(Exposition(Metrics(catalogue)), "127.0.0.1", 0, ready=lambda: ready)
    await page.start()
    try:
        assert (await get(page, "/healthz")).status_code == 200
        assert (await get(page, "/readyz")).status_code == 200
        ready = False
        assert (await get(page, "/healthz")).status_code == 200
        assert (await get(page, "/readyz")).status_code == 503
        assert (await get(page, "/metrics?x=1")).status_code == 200
    finally:
        await page.aclose()


async def test_other_paths_and_methods_are_refused(page: MetricsPage) -> None:
    assert (await get(page, "/")).status_code == 404
    assert (await get(page, "/metrics", "POST")).status_code == 405
    head = await get(page, "/metrics", "HEAD")
    assert head.status_code == 200
    assert head.content == b""


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"GET /metrics\r\n\r\n", b"\x00\xff\x00\r\n\r\n", b"x" * 40_000]
)
async def test_junk_ends_the_connection_and_not_the_server(page: MetricsPage, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    try:
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        pass  # the server may cut the line with bytes of ours unread
    finally:
        writer.close()
    assert (await get(page, "/healthz")).status_code == 200


async def test_a_taken_port_is_named_with_its_remedy(page: MetricsPage, catalogue: Catalogue) -> None:
    second = MetricsPage(Exposition(Metrics(catalogue)), "127.0.0.1", page.port)
    with pytest.raises(OSError, match=rf"127.0.0.1:{page.port}.*PERDURE_METRICS_PORT"):
        await second.start()


async def test_a_page_without_the_sdks_figures_still_answers(catalogue: Catalogue, sdk: SdkMetrics) -> None:
    gone = SdkMetrics(sdk.runtime, 1)  # nothing listens on port 1
    body = await Exposition(Metrics(catalogue), gone).render()
    assert b"perdure_build_info" in body
