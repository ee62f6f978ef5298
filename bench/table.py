"""Rows of the printed table, and how they are rendered: a Markdown table that reads well in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_HEAD = ("row", "measure", "Perdure", "bare Temporal", "ratio", "reach", "met")


@dataclass(frozen=True)
class Row:
    """One measure. `figures` are the plain numbers (seconds, counts, bytes) that the words are made of.

    `met` is None where the reach says nothing about this row.
    """

    key: str
    measure: str
    ours: str
    bare: str = "-"
    ratio: float | None = None
    reach: str = "-"
    met: bool | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        ratio = "-" if self.ratio is None or math.isnan(self.ratio) else f"{self.ratio:.2f} x"
        met = {True: "yes", False: "no", None: "-"}[self.met]
        return (self.key, self.measure, self.ours, self.bare, ratio, self.reach, met)

    def as_json(self) -> dict[str, Any]:
        figures = {name: None if math.isnan(value) else value for name, value in self.figures.items()}
        ratio = None if self.ratio is None or math.isnan(self.ratio) else self.ratio
        return {
            "row": self.key,
            "measure": self.measure,
            "perdure": self.ours,
            "bare_temporal": self.bare,
            "ratio": ratio,
            "reach": self.reach,
            "met": self.met,
            "figures": figures,
        }


def render(rows: Iterable[Row]) -> str:
    """The table, columns padded."""
    return grid(_HEAD, [row.cells() for row in rows])


def grid(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """Any table of texts as padded Markdown."""
    widths = [max(len(line[n]) for line in [head, *body]) for n in range(len(head))]

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, body)])


def ratio(ours: float, bare: float) -> float:
    """ours / bare; NaN where either is unknown."""
    return ours / bare if bare and not math.isnan(bare) else math.nan


def met(value: float, *, most: float | None = None, least: float | None = None) -> bool | None:
    """Whether a value is within its reach; None when there is no value."""
    if math.isnan(value):
        return None
    return (most is None or value <= most) and (least is None or value >= least)
