"""The story of a task as its row tells it: pure.

A row shows where a task stands; its attempts show how it came there. So the moves that a watcher missed,
because it was away or because two came between two looks, are told again in order, the same from any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from perdure.contracts import AttemptRecord, Beat
from perdure.live.cursor import FINAL_STAGE
from perdure.store.rows import TaskRow
from perdure.task.states import Status


@dataclass(frozen=True, slots=True)
class Story:
    """A row with its attempts read."""

    row: TaskRow
    started: tuple[AttemptRecord, ...]  # the attempts that ran, in order
    stage: int

    @classmethod
    def of(cls, row: TaskRow) -> Story:
        started = tuple(record for record in row.attempts if record.started_at is not None)
        return cls(row, started, _stage(row, len(started)))

    @property
    def final(self) -> bool:
        return self.stage == FINAL_STAGE

    @property
    def attempt(self) -> int:
        """Number of the attempt that runs or ran last; 0 before the first."""
        return self.started[-1].number if self.started else 0

    def beat(self, beat: Beat | None) -> Beat | None:
        """The beat, if it is of the attempt that runs now. A row that waits or is final has none."""
        running = self.row.status is Status.PROCESSING and beat is not None and beat.attempt == self.attempt
        return beat if running else None

    @property
    def last_stage(self) -> int:
        """The stage before the final one; of a row that is not final, its own."""
        if not self.final:
            return self.stage
        ran = 2 * len(self.started)
        before = self.row.version - 1  # each move is one version, unless a reconciler took part
        if before in (ran, ran + 1):
            return before
        return ran or (1 if self.row.queued_at else 0)

    def at(self, stage: int) -> Story:
        """The task as it was at an earlier stage. What the row no longer knows is as it is now."""
        ran = self.started[: stage // 2]
        running = stage % 2 == 0 and stage > 0
        last = ran[-1] if ran and not running else None
        ended = [record for record in (ran[:-1] if running else ran) if record.outcome == "failed"]
        row = replace(
            self.row,
            status=Status.PROCESSING if running else Status.QUEUED if stage else Status.PENDING,
            version=max(0, self.row.version - (self.last_stage - stage) - (1 if self.final else 0)),
            change_seq=0,
            progress=0,
            retry_count=min(self.row.retry_count, len(ended)),
            error_code=last.error_code if last else None,
            error_message=last.error_message if last else None,
            queued_at=self.row.queued_at if stage else None,
            started_at=ran[0].started_at if ran else None,
            completed_at=None,
            next_attempt_at=None,
            updated_at=_when(self.row, ran, running) or self.row.updated_at,
        )
        return Story(row, ran, stage)


def shown(beat: Beat | None) -> object:
    """What a watcher sees of a beat: one that shows the same again is no news."""
    if beat is None:
        return None
    return (beat.attempt, beat.progress, beat.output_tokens, beat.message, beat.restarted)


def _stage(row: TaskRow, started: int) -> int:
    if row.status.final:
        return FINAL_STAGE
    if row.status is Status.PENDING:
        return 0
    return 2 * max(1, started) if row.status is Status.PROCESSING else 2 * started + 1


def _when(row: TaskRow, ran: Sequence[AttemptRecord], running: bool) -> datetime | None:
    if not ran:
        return row.queued_at
    return ran[-1].started_at if running else ran[-1].ended_at
