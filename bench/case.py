"""A case: one group of rows that is measured together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.ground import Ground, Kind
from bench.table import Row


@dataclass(frozen=True)
class Case:
    """`name` is what --only takes; `run` measures on a stack of `kind`."""

    name: str
    title: str
    kind: Kind
    run: Callable[[Ground], Awaitable[list[Row]]]
