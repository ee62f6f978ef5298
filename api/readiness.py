"""Whether Postgres, its schema, Temporal and the models are there, in words, for `/readyz`."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from perdure.models import Catalogue
from perdure.store.engine import Store
from perdure.store.errors import StoreError
from perdure.temporal import TemporalGate

_FRESH: Final = 2.0  # seconds that one look serves
_PATIENCE: Final = 1.0  # seconds that a look waits for Postgres, and for Temporal


class Readiness:
    """Looks at Postgres and Temporal, at most once in two seconds whoever asks."""

    def __init__(self, store: Store, gate: TemporalGate, catalogue: Catalogue) -> None:
        self._store = store
        self._gate = gate
        self._catalogue = catalogue
        self._lock = asyncio.Lock()
        self._looked_at = float("-inf")
        self._found: dict[str, Any] = {}

    async def look(self) -> dict[str, Any]:
        """`postgres`, `schema`, `temporal` and `models`, in words. Never raises."""
        async with self._lock:
            if time.monotonic() - self._looked_at > _FRESH:
                (postgres, schema, models), temporal = await asyncio.gather(
                    self._postgres(), self._temporal()
                )
                self._found = {"postgres": postgres, "schema": schema, "temporal": temporal, "models": models}
                self._looked_at = time.monotonic()
            return self._found

    async def _postgres(self) -> tuple[str, str, dict[str, str]]:
        models = dict.fromkeys(self._catalogue.models, "unknown")
        try:
            async with asyncio.timeout(_PATIENCE):
                state = await self._store.schema_state()
                workers = await self._store.workers.live() if state.ok else []
        except (StoreError, TimeoutError):
            return "unavailable", "unknown", models
        if not state.ok:
            return "ok", f"{state.current or 'empty'}; run `perdure migrate` for {state.expected}", models
        served = {model for worker in workers for model in worker.models}
        return "ok", "ok", {model: "ok" if model in served else "no_worker" for model in models}

    async def _temporal(self) -> str:
        return "ok" if await self._gate.ping(seconds=_PATIENCE) else "unavailable"
