"""Callback deliveries, their tries and their receivers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

DeliveryState = Literal["PENDING", "DELIVERED", "RETRYING", "DEAD", "SUSPENDED"]
TryKind = Literal["quick", "sweep"]
Verdict = Literal["delivered", "failed", "dead"]


@dataclass(frozen=True, slots=True)
class DeliveryClaim:
    """The right to make one try. `token` proves it to `record_try`.

    `tries` and `slow_tries` (those made by the sweep since commit or redelivery) are before this one.
    """

    delivery_id: str
    task_id: str
    user_id: str
    event: str
    url: str
    body: bytes
    tries: int
    slow_tries: int
    created_at: datetime
    token: int
    traceparent: str | None = None  # of the submit, so that every try joins its trace


@dataclass(frozen=True, slots=True)
class NewTry:
    """One try as it went. `sample` is a bounded, escaped piece of the answer; `address` the peer's."""

    kind: TryKind
    at: datetime
    duration_ms: int
    status: int | None = None
    error: str | None = None
    address: str | None = None
    sample: str | None = None


@dataclass(frozen=True, slots=True)
class TryRow:
    """A recorded try. `number` counts from 1 over the delivery's life."""

    number: int
    kind: TryKind
    at: datetime
    duration_ms: int
    status: int | None
    error: str | None
    address: str | None
    sample: str | None


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """A callback event and how it fares. `next_try_at` is None when no try is planned."""

    delivery_id: str
    task_id: str
    user_id: str
    event: str
    url: str
    state: DeliveryState
    tries_made: int
    next_try_at: datetime | None
    created_at: datetime
    updated_at: datetime
    tries: tuple[TryRow, ...] = ()


@dataclass(frozen=True, slots=True)
class OriginRow:
    """A receiver (scheme, host and port) of one user that fails, or is suspended."""

    user_id: str
    origin: str
    failing_since: datetime | None
    dead: int
    suspended_at: datetime | None
    reason: str | None
    waiting: int  # deliveries kept
