"""What changed, for live streams: by polling. No notification carries data, none can be lost.

`change_seq` (a sequence) moves with every visible change of any task. News of many tasks, exactly once, is in
news.py.
"""

# ruff: noqa: S608 - statements are put together from constants of this package only

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perdure.store.base import Repository, sql
from perdure.store.columns import HOT, WIDTH, task_row
from perdure.store.rows import Changes

_STORY: Final = f"{HOT}, NULL AS params, NULL AS result, t.attempts"  # watchers tell moves from attempts
_CHANGES: Final = sql(
    f"""
SELECT {_STORY}, k.task_id FROM unnest(CAST(:ids AS text[]), CAST(:seqs AS bigint[])) AS k (task_id, seq)
LEFT JOIN tasks t ON t.task_id = k.task_id
WHERE t.task_id IS NULL OR t.change_seq <> k.seq
"""
)


class Watching(Repository):
    """Part of TaskRepository."""

    async def changes(self, known: Mapping[str, int]) -> Changes:
        """For the live hub: `known` maps task id to the `change_seq` last seen; one query answers all."""
        if not known:
            return Changes([], [])
        rows = await self._one(_CHANGES, ids=list(known), seqs=list(known.values()))
        return Changes(
            [task_row(row) for row in rows if row[0] is not None],
            [row[WIDTH] for row in rows if row[0] is None],
        )
