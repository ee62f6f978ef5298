"""Releases beside each other: this one goes on with the schema of the next."""

from __future__ import annotations

import asyncio

import asyncpg

from perdure.store.migrations import NEWEST
from tests.integration.durability.ground import Ground, Service


async def test_this_release_serves_with_the_next_ones_schema(ground: Ground, service: Service) -> None:
    """Expanded under load, while every process runs; a process that starts later is ready as well."""
    admin = await asyncpg.connect(ground.postgres.dsn)
    before = [await service.simulated(40, 20) for _ in range(4)]
    try:
        await admin.execute("ALTER TABLE tasks ADD COLUMN of_the_next_release text NOT NULL DEFAULT 'x'")
        await admin.execute("ALTER TABLE task_results ADD COLUMN later bigint")
        await admin.execute("UPDATE alembic_version SET version_num = '9999'")
        during = [await service.simulated(n, 40) for n in range(10)]
        for task_id in [*before, *during]:
            task = await service.reaches(task_id, "COMPLETED")
            assert len(task["attempts"]) == 1
        ground.terminate("api")
        assert await ground.exit_code("api") == 0
        await ground.start("api")
        seen = await service.http.get("/readyz")
        assert (seen.status_code, seen.json()["schema"]) == (200, "ok")
        await service.reaches(await service.simulated(1, 40), "COMPLETED")
    finally:
        await admin.execute("ALTER TABLE tasks DROP COLUMN IF EXISTS of_the_next_release")
        await admin.execute("ALTER TABLE task_results DROP COLUMN IF EXISTS later")
        await admin.execute("UPDATE alembic_version SET version_num = $1", NEWEST)
        await admin.close()
    assert await asyncio.gather(*(service.simulated(1, 40) for _ in range(3)))
