"""Callback deliveries: a row per event, a lease per try, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from perdure.store.rows import (
    DeliveryClaim,
    DeliveryRow,
    DeliveryState,
    NewTry,
    OriginRow,
    Principal,
    Verdict,
)

QUICK_GRACE_SECONDS = (
    120.0  # the sweep leaves a delivery alone this long after commit and after a quick claim
)


class DeliveryRepository:
    """Every try, whoever makes it, is claimed first and recorded after."""

    async def claim(self, delivery_id: str, lease_seconds: float) -> DeliveryClaim | None:
        """For a quick try: None when leased, DELIVERED, DEAD, SUSPENDED or unknown. Pushes the next due time
        QUICK_GRACE_SECONDS on, so that the sweep stays away."""
        raise NotImplementedError

    async def claim_due(
        self, limit: int, lease_seconds: float, skip: Sequence[tuple[str, str]] = ()
    ) -> list[DeliveryClaim]:
        """For the sweep: what is due now, oldest due first, at most 4 of one user's origin. `skip` are
        (user_id, origin) pairs whose receiver has no place free at the caller's: none of theirs is taken."""
        raise NotImplementedError

    async def defer(self, claim: DeliveryClaim, next_in: float) -> None:
        """Gives a claim back without a try: the lease ends, it is due in `next_in` seconds. Nothing is counted,
        state and tries stay. A claim whose lease passed to another changes nothing."""
        raise NotImplementedError

    async def record_try(
        self, claim: DeliveryClaim, new: NewTry, verdict: Verdict, next_in: float | None = None
    ) -> DeliveryState:
        """Writes the try and the new state, and ends the lease. `next_in`: seconds to the next try when the
        verdict is `failed`. A claim whose lease passed to another only adds to the log, unless it delivered.
        Returns the state that now stands."""
        raise NotImplementedError

    async def list_for_task(self, principal: Principal, task_id: str) -> list[DeliveryRow] | None:
        """Deliveries of a task with their tries, or None when the task is not the principal's."""
        raise NotImplementedError

    async def redeliver(
        self, principal: Principal, task_id: str, delivery_id: str
    ) -> tuple[Literal["queued", "in_flight", "unknown"], DeliveryRow | None]:
        """Makes a delivery due now, whatever its state: same id, same bytes. `in_flight`: a try runs."""
        raise NotImplementedError

    async def redeliver_since(
        self,
        principal: Principal,
        since: datetime,
        state: DeliveryState = "DEAD",
        until: datetime | None = None,
        origin: str | None = None,
        limit: int = 10_000,
    ) -> int:
        """`redeliver` for all of the principal's in a state, created since; returns how many."""
        raise NotImplementedError

    async def suspended(self, principal: Principal) -> list[OriginRow]:
        """Origins of the principal that fail or are suspended."""
        raise NotImplementedError

    async def resume(self, principal: Principal, origin: str) -> int | None:
        """Ends a suspension: kept deliveries are due now. Their number, or None when it was not suspended."""
        raise NotImplementedError

    async def suspend(self, user_id: str, origin: str, reason: str) -> int:
        """Suspends an origin at once (410); returns how many deliveries are kept back."""
        raise NotImplementedError

    async def counts(self) -> dict[DeliveryState, int]:
        """Deliveries per state, DELIVERED left out (it is 0 here): what waits or died."""
        raise NotImplementedError
