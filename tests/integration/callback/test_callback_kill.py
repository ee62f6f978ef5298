"""A worker is killed between the receiver's answer and its record: the repeat can be told by its id."""

from __future__ import annotations

import asyncio
import signal
import sys

import asyncpg

from perdure.callback import verify
from perdure.callback.deliver import Deliverer
from perdure.store.engine import Store
from tests.integration.callback.harness import SECRET, Travel, committed, delivery
from tests.integration.callback.one_try import NAME
from tests.support.receiver import Receiver, head
from tests.support.waiting import until


async def test_kill_between_answer_and_record(
    store: Store, deliverer: Deliverer, database_url: str, travel: Travel
) -> None:
    release = asyncio.Event()
    async with Receiver([[release, head(200, length=0)], [head(200, length=0)]]) as receiver:
        task_id, delivery_id = await committed(store, receiver.url())
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.integration.callback.one_try", database_url, delivery_id
        )
        await receiver.received(1, timeout=60)
        # The row is held, so that the record cannot be written; the receiver has taken the event.
        holder = await asyncpg.connect(database_url)
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(
            "SELECT 1 FROM callback_deliveries WHERE delivery_id = $1 FOR UPDATE", delivery_id
        )
        release.set()

        async def recording() -> bool:
            waiting = await holder.fetchval(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE application_name = $1 AND wait_event_type = 'Lock'",
                NAME,
            )
            return bool(waiting)

        await until(recording)
        victim.send_signal(signal.SIGKILL)
        assert await victim.wait() == -signal.SIGKILL
        # A statement that Postgres has already may end by itself; here the record is lost for good.
        await holder.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", NAME
        )
        await transaction.rollback()

        async def gone() -> bool:
            count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
            return not await holder.fetchval(count, NAME)

        await until(gone)
        await holder.close()
        assert (await delivery(store, task_id)).tries == ()
        assert (await deliverer.attempt(delivery_id)).kind == "skipped"  # its lease runs still
        await travel(130)
        assert (await deliverer.sweep()).claimed == 1
        one, two = await receiver.received(2)
        await deliverer.settled()
    assert one["webhook-id"] == two["webhook-id"] == delivery_id
    assert one.body == two.body
    verify(two.body, two.header_map, SECRET)
    row = await delivery(store, task_id)
    assert (row.state, len(row.tries)) == ("DELIVERED", 1)
