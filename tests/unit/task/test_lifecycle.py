"""The life of a task: rules alone, with a clock of the test's own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.contracts import Beat, FaultDetails, TaskInput, Usage
from perdure.task import policy
from perdure.task.lifecycle import Again, Finish, Lifecycle
from perdure.task.states import FINAL, Priority, Status

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def life(**changes: Any) -> Lifecycle:
    fields: dict[str, Any] = {
        "task_id": "task_" + "0" * 32,
        "user_id": "ann",
        "model_id": "m",
        "task_type": "chat",
        "priority": Priority.NORMAL,
        "pool": "p",
        "params": {},
        "created_at": NOW,
    }
    return Lifecycle(TaskInput(**(fields | changes)), NOW)


def fault(code: str = "token_timeout", **more: Any) -> FaultDetails:
    return FaultDetails(**({"code": code, "message": "x", "retryable": True} | more))


def test_versions_count_transitions() -> None:
    task = life()
    assert (task.version, task.status) == (1, Status.QUEUED)
    assert task.begin() == 1
    assert task.started("w", NOW)
    assert not task.started("w", NOW)
    assert task.version == 2
    task.finish(task.generated(NOW))
    assert (task.version, task.status, task.progress) == (3, Status.COMPLETED, 100)


def test_started_at_is_the_first_attempts() -> None:
    task = life()
    task.begin()
    task.started("w", NOW)
    task.faulted(fault(), NOW, 1.0)
    task.begin()
    task.started("w2", NOW + timedelta(seconds=9))
    assert task.started_at == NOW


def test_a_checkpoint_without_text_starts_over_and_is_counted() -> None:
    task = life()
    task.begin()
    task.take(Beat(attempt=1, text=None, output_tokens=900))
    assert task.checkpoint is None
    assert task.usage.discarded_tokens == 900


def test_unknown_usage_stays_unknown() -> None:
    task = life()
    task.spend(Usage())
    assert task.usage.completion_tokens is None
    task.spend(Usage(completion_tokens=5))
    task.spend(Usage())
    assert task.usage.completion_tokens == 5


def test_patience_is_counted_from_the_first_refusal_in_a_row() -> None:
    task = life(max_retries=0, unavailable_patience=10)
    refused = fault("upstream_unavailable", refused=True)
    task.begin()
    assert isinstance(task.faulted(refused, NOW, 1.0), Again)
    task.begin()
    assert isinstance(task.faulted(refused, NOW + timedelta(seconds=9), 1.0), Again)
    task.begin()
    assert isinstance(task.faulted(refused, NOW + timedelta(seconds=10), 1.0), Finish)


def test_a_deadline_bounds_the_wait() -> None:
    task = life(total_deadline=NOW + timedelta(seconds=5))
    task.begin()
    after = task.faulted(fault(retry_after=6), NOW, 1.0)
    assert isinstance(after, Finish)
    assert after.code == "deadline_exceeded"
    assert task.retry_count == 0  # no retry came of it


def test_attempts_and_drains_are_bounded_together() -> None:
    task = life()
    for _ in range(policy.MAX_RUNS - 1):
        task.begin()
        assert isinstance(task.drained(NOW), Again)
    task.begin()
    after = task.drained(NOW)
    assert isinstance(after, Finish)
    assert after.status is Status.FAILED


ENDINGS = st.sampled_from(["fault", "refused", "permanent", "lost", "drained", "generated", "cancel"])


@settings(max_examples=200)
@given(st.lists(ENDINGS, min_size=1, max_size=80), st.integers(0, 20), st.integers(0, 5))
def test_any_sequence_of_endings_ends_within_the_bounds(
    endings: list[str], max_retries: int, max_lost: int
) -> None:
    task = life(max_retries=max_retries, max_lost=max_lost)
    versions = [task.version]
    for ending in endings:
        number = task.begin()
        assert number == len(task.attempts) <= policy.MAX_RUNS
        task.started("w", NOW)
        after: Again | Finish
        match ending:
            case "generated":
                after = task.generated(NOW)
            case "cancel":
                task.stopped(NOW)
                after = Finish(Status.CANCELLED)
            case "lost":
                after = task.lost(NOW)
            case "drained":
                after = task.drained(NOW)
            case _:
                after = task.faulted(
                    fault(retryable=ending != "permanent", refused=ending == "refused"), NOW, 0.5
                )
        assert task.retry_count <= max_retries
        assert task.lost_count <= max_lost
        assert all(a.ended_at for a in task.attempts)
        if isinstance(after, Finish):
            task.finish(after)
            assert task.status in FINAL
            assert task.next_attempt_at is None
            return
        versions.append(task.version)
        assert versions == sorted(set(versions))
        assert task.status is Status.QUEUED
