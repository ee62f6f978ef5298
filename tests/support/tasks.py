"""Rows and catalogues for tests."""

from __future__ import annotations

from typing import Any

from perdure import names
from perdure.models import Catalogue, parse_catalogue
from perdure.store import Store
from perdure.store.jsontext import to_json
from perdure.store.rows import NewTask, Principal

ANN = Principal("ann", frozenset({"tasks:read", "tasks:write"}))

CATALOGUE_TEXT = """
[pools.p]
slots = 2
[models.m]
pool = "p"
executor = "simulated"
"""


def catalogue(text: str = CATALOGUE_TEXT) -> Catalogue:
    return parse_catalogue(text)


async def submit(store: Store, params: dict[str, Any] | None = None, **changes: Any) -> str:
    """Commits one PENDING row and returns its id."""
    fields: dict[str, Any] = {
        "task_id": names.new_task_id(),
        "user_id": "ann",
        "model_id": "m",
        "pool": "p",
        "params_json": to_json(params or {"tokens": 0}),
    }
    new = NewTask(**(fields | changes))
    await store.tasks.create(new)
    return new.task_id
