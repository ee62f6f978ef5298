"""The engine and the store built on it. Made in the composition roots, closed by them."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from perdure.store.deliveries import DeliveryRepository
from perdure.store.dispatch import DispatchRepository
from perdure.store.keys import KeyRepository
from perdure.store.maintenance import MaintenanceRepository
from perdure.store.rows import SchemaState
from perdure.store.secrets import SecretRepository
from perdure.store.stats import StatsRepository
from perdure.store.tasks import TaskRepository
from perdure.store.workers import WorkerRepository


def make_engine(url: str, *, pool_size: int, application_name: str) -> AsyncEngine:
    """An engine for postgresql:// or postgresql+asyncpg:// URLs. Connects on first use."""
    return create_async_engine(url)


class Store:
    """The repositories over one engine. Every method is one unit of work; none holds a connection after."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.tasks = TaskRepository()
        self.dispatch = DispatchRepository()
        self.deliveries = DeliveryRepository()
        self.keys = KeyRepository()
        self.secrets = SecretRepository()
        self.workers = WorkerRepository()
        self.maintenance = MaintenanceRepository()
        self.stats = StatsRepository()

    async def ping(self) -> None:
        """Asks Postgres for an answer. Raises StoreUnavailable."""
        raise NotImplementedError

    async def schema_state(self) -> SchemaState:
        """Which revision the database has, and which this code expects. Raises StoreUnavailable."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Closes every connection."""
        raise NotImplementedError
