"""Behind a pooler that cannot keep session settings, and changes that are large."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import pytest

from perdure.contracts import TaskResult
from perdure.store import Store, StoreUnavailable, make_engine
from perdure.store.migrate import migrate
from perdure.task.states import Status
from tests.integration.store.helpers import ANN, now, outcome, row, running

_SSL_REQUEST = 80877103


@pytest.fixture
async def pooler() -> AsyncIterator[str]:
    """The URL of what answers as PgBouncer in transaction mode does: with the name of what it cannot keep."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            body = await reader.readexactly(size - 4)
            if struct.unpack("!i", body[:4])[0] != _SSL_REQUEST:
                break
            writer.write(b"N")
        assert b"statement_timeout" in body
        fields = b"SFATAL\0C08P01\0Munsupported startup parameter: statement_timeout\0\0"
        writer.write(b"E" + struct.pack("!i", len(fields) + 4) + fields)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield f"postgresql://ann:secret@127.0.0.1:{port}/perdure"
    server.close()


async def test_a_pooler_in_transaction_mode_is_refused_in_words(pooler: str) -> None:
    store = Store(make_engine(pooler, pool_size=1, application_name="test"))
    with pytest.raises(StoreUnavailable, match="unsupported startup parameter: statement_timeout"):
        await store.ping()
    await store.aclose()
    with pytest.raises(StoreUnavailable, match="unsupported startup parameter"):
        await asyncio.to_thread(migrate, pooler)


async def test_a_change_of_any_size_is_told(store: Store) -> None:
    """Nothing of a change travels in a notice, so none is too large for one."""
    told = (await store.news.since([ANN], None)).now
    big, long = await running(store), await running(store)
    text = "🙂" * 9_000
    await store.tasks.commit(
        outcome(big, 3).model_copy(update={"result": TaskResult(text=text, finish_reason="stop")})
    )
    await store.tasks.commit(
        outcome(long, 3, Status.FAILED, error_code="internal", error_message="é" * 20_000)
    )
    news = await store.news.since([ANN], told)
    assert {one.row.task_id: one.row.status for one in news.rows} == {
        big.task_id: Status.COMPLETED,
        long.task_id: Status.FAILED,
    }
    seen = await row(store, big)
    assert seen.result is not None
    assert seen.result["text"] == text
    assert (await row(store, long)).error_message == "é" * 20_000
    assert seen.completed_at is not None
    assert seen.completed_at <= now()
