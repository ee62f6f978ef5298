"""A task whose story a test writes: rows and beats as the workflow and its worker would make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from perdure.contracts import Beat, FaultDetails, Projection, TaskInput
from perdure.names import new_task_id
from perdure.store.errors import StoreUnavailable
from perdure.store.jsontext import to_json
from perdure.store.rows import ALL_EVENTS, Changes, Include, TaskRow
from perdure.task.lifecycle import Finish, Lifecycle
from perdure.task.states import Priority, Status

START = datetime(2026, 12, 1, 14, tzinfo=UTC)


def pending_row(task_id: str | None = None, *, change_seq: int = 1, user_id: str = "u") -> TaskRow:
    """A row as a submit leaves it."""
    return TaskRow(
        task_id=task_id or new_task_id(),
        task_type="chat",
        user_id=user_id,
        model_id="m",
        pool="p",
        status=Status.PENDING,
        priority=Priority.NORMAL,
        lane=3,
        progress=0,
        version=0,
        change_seq=change_seq,
        error_code=None,
        error_message=None,
        retry_count=0,
        max_retries=20,
        prompt_tokens=None,
        completion_tokens=None,
        discarded_tokens=0,
        metadata_json="{}",
        callback_url=None,
        callback_events=ALL_EVENTS,
        not_before=None,
        queue_timeout_seconds=None,
        timeout_seconds=1800,
        deadline_seconds=None,
        queue_deadline=None,
        total_deadline=None,
        rerun_of=None,
        traceparent=None,
        created_at=START,
        queued_at=None,
        started_at=None,
        completed_at=None,
        updated_at=START,
        cancel_requested=False,
        cancel_reason=None,
        next_attempt_at=None,
        claimed_at=None,
        start_failures=0,
        restarts=0,
        attempts_json="[]",
    )


class World:
    """Rows and beats that hubs read: the database and the engine of a test, shared by its processes."""

    def __init__(self) -> None:
        self.rows: dict[str, TaskRow] = {}
        self.beats: dict[str, Beat] = {}
        self.down = False
        self.silent = False  # the engine does not answer
        self.change_seq = 0
        self.queries = 0
        self.result_reads = 0
        self.describes: list[str] = []

    async def changes(self, known: Mapping[str, int]) -> Changes:
        self.queries += 1
        if self.down:
            raise StoreUnavailable("down")
        rows = [
            self.rows[key]
            for key, seq in known.items()
            if key in self.rows and self.rows[key].change_seq != seq
        ]
        shown = [replace(row, result_json=None, params_json=None) for row in rows]
        return Changes(shown, [key for key in known if key not in self.rows])

    async def by_id_any(self, task_id: str, include: Sequence[Include] = ()) -> TaskRow | None:
        self.result_reads += 1
        if self.down:
            raise StoreUnavailable("down")
        return self.rows.get(task_id)

    async def describe_beat(self, task_id: str) -> Beat | None:
        self.describes.append(task_id)
        if self.silent:
            raise TimeoutError
        return self.beats.get(task_id)

    def put(self, row: TaskRow) -> TaskRow:
        self.change_seq += 1
        self.rows[row.task_id] = replace(row, change_seq=self.change_seq)
        return self.rows[row.task_id]


class ScriptedTask:
    """One task in a world. Its moves are decided by the real Lifecycle."""

    def __init__(self, world: World, *, user_id: str = "u") -> None:
        self.world = world
        self.row = world.put(pending_row(user_id=user_id))
        self.task_id = self.row.task_id
        self.now = START
        self.text = ""
        self._seq = 0
        self._tokens_before = 0
        self._restarted = False
        self.life: Lifecycle | None = None
        self.moves = ["PENDING"]

    def _tick(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now

    def _project(self, projection: Projection, **more: object) -> None:
        attempts = to_json([record.model_dump(mode="json") for record in projection.attempts])
        self.row = self.world.put(
            replace(
                self.row,
                status=projection.status,
                version=projection.version,
                progress=projection.progress,
                retry_count=projection.retry_count,
                error_code=projection.error_code,
                error_message=projection.error_message,
                queued_at=projection.queued_at,
                started_at=projection.started_at,
                next_attempt_at=projection.next_attempt_at,
                updated_at=self.now,
                attempts_json=attempts,
                **more,  # type: ignore[arg-type]
            )
        )

    def queue(self) -> None:
        """The dispatcher starts the workflow."""
        row = self.row
        start = TaskInput(
            task_id=row.task_id,
            user_id=row.user_id,
            model_id=row.model_id,
            task_type=row.task_type,
            priority=row.priority,
            pool=row.pool,
            params={},
            max_retries=20,
            max_lost=20,
            created_at=row.created_at,
        )
        self.life = Lifecycle(start, self._tick())
        self.moves.append("QUEUED")
        self._project(self.life.project())

    def start(self, *, restarted: bool = False, write: bool = True) -> None:
        """An attempt begins; `restarted`: it throws the text away."""
        assert self.life is not None
        self.life.begin()
        self.life.started("w", self._tick())
        self._seq = 0
        self._restarted = restarted
        self._tokens_before = 0 if restarted else len(self.text)
        if restarted:
            self.text = ""
        self.moves.append("PROCESSING")
        if write:
            self._project(self.life.project())

    def say(self, text: str) -> Beat:
        """The model makes text; its worker beats."""
        assert self.life is not None
        self.text += text
        self._seq += 1
        beat = Beat(
            attempt=self.life.attempt.number,
            seq=self._seq,
            progress=min(99, len(self.text)),
            text=self.text,
            output_tokens=len(self.text),
            resumed_from_tokens=self._tokens_before,
            restarted=self._restarted,
        )
        self.world.beats[self.task_id] = beat
        return beat

    def fault(self, *, write: bool = True) -> None:
        """The attempt fails; another follows."""
        assert self.life is not None
        self.life.take(self.world.beats.pop(self.task_id, None))
        fault = FaultDetails(code="token_timeout", message="silent", retryable=True)
        self.life.faulted(fault, self._tick(), 1.0)
        self.moves.append("QUEUED")
        if write:
            self._project(self.life.project())

    def cancel_asked(self) -> None:
        """Something other than the state changes."""
        self.row = self.world.put(replace(self.row, cancel_requested=True))

    def end(self, status: Status = Status.COMPLETED) -> None:
        """The outcome is committed, with the text so far as its result."""
        self.world.beats.pop(self.task_id, None)
        self.moves.append(status.value)
        done = self._tick()
        if self.life is None:
            self.row = self.world.put(
                replace(self.row, status=status, version=1, completed_at=done, updated_at=done)
            )
            return
        if status is Status.COMPLETED:
            self.life.generated(done)
        else:
            self.life.stopped(done)
        self.life.finish(Finish(status))
        self._project(self.life.project(), completed_at=done, result_json=to_json({"text": self.text}))
