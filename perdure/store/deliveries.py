"""Callback deliveries: a row per event, a lease per try, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from perdure.store import delivery_sql as q
from perdure.store.base import INDEX_ORDER, Repository, Rows, Unit
from perdure.store.rows import (
    DeliveryClaim,
    DeliveryRow,
    DeliveryState,
    NewTry,
    OriginRow,
    Principal,
    TryRow,
    Verdict,
)


class DeliveryRepository(Repository):
    """Every try, whoever makes it, is claimed first and recorded after."""

    async def claim(self, delivery_id: str, lease_seconds: float) -> DeliveryClaim | None:
        """For a quick try: None when leased, DELIVERED, DEAD, SUSPENDED or unknown (`state` tells which).

        Pushes the next due time QUICK_GRACE_SECONDS on, so that the sweep stays away.
        """
        rows = await self._one(
            q.CLAIM,
            id=delivery_id,
            lease=float(lease_seconds),
            grace=max(q.QUICK_GRACE_SECONDS, lease_seconds),
        )
        return DeliveryClaim(*rows[0]) if rows else None

    async def claim_due(
        self,
        limit: int,
        lease_seconds: float,
        per_origin: int = 4,
        skip: Sequence[tuple[str, str]] = (),
    ) -> list[DeliveryClaim]:
        """For the sweep: what is due now, oldest due first, at most `per_origin` of one user's receiver.

        `skip`: (user, origin) of receivers for which the caller has no place free; none of theirs is taken.
        """
        values = dict[str, Any](
            limit=limit,
            lease=float(lease_seconds),
            each=per_origin,
            skip_users=[user for user, _ in skip],
            skip_origins=[origin for _, origin in skip],
        )

        async def work(unit: Unit) -> Rows:
            await unit.run(INDEX_ORDER)
            return await unit.run(q.CLAIM_DUE, **values)

        rows = await self._unit(work)
        return [DeliveryClaim(*row[:-1]) for row in sorted(rows, key=lambda row: (row[-1], row[0]))]

    async def defer(self, claim: DeliveryClaim, next_in: float) -> None:
        """Gives a claim back without a try: due again in `next_in` seconds, nothing is counted. A claim whose
        lease passed to another changes nothing."""
        await self._one(q.DEFER, id=claim.delivery_id, token=claim.token, next_in=float(next_in))

    async def state(self, delivery_id: str) -> DeliveryState | None:
        """The state of a delivery; None when there is none."""
        rows = await self._one(q.STATE, id=delivery_id)
        return rows[0][0] if rows else None

    async def record_try(
        self, claim: DeliveryClaim, new: NewTry, verdict: Verdict, next_in: float | None = None
    ) -> DeliveryState | None:
        """Writes the try and the new state, and ends the lease. Returns the state that now stands.

        `next_in`: seconds to the next try when the verdict is `failed`; a failure with no next try is `dead`.
        A try whose lease passed to another only adds to the log, unless it delivered. None: the task is gone.
        A receiver with 5 dead deliveries and no success for 5 days is suspended.
        """
        if verdict == "failed" and next_in is None:
            verdict = "dead"
        values = {
            "id": claim.delivery_id,
            "token": claim.token,
            "verdict": verdict,
            "next_in": None if verdict != "failed" else float(next_in or 0.0),
            "kind": new.kind,
            "at": new.at,
            "duration_ms": new.duration_ms,
            "status": new.status,
            "error": new.error,
            "address": new.address,
            "sample": new.sample,
        }

        async def work(unit: Unit) -> DeliveryState | None:
            rows = await unit.run(q.RECORD, **values)
            if not rows:
                return None
            state, user, origin = rows[0]
            await _suspend_if_failing(unit, user, origin)
            return state  # type: ignore[no-any-return]

        if verdict == "dead":
            return await self._unit(work)
        rows = await self._one(q.RECORD, **values)  # one statement, one round trip
        return rows[0][0] if rows else None

    async def list_for_task(self, principal: Principal, task_id: str) -> list[DeliveryRow] | None:
        """Deliveries of a task with their tries, or None when the task is not the principal's."""
        return await self._list(principal, task_id, None)

    async def _list(
        self, principal: Principal, task_id: str, delivery_id: str | None
    ) -> list[DeliveryRow] | None:
        rows = await self._one(
            q.LIST, task=task_id, id=delivery_id, admin=principal.admin, user=principal.user_id
        )
        return _deliveries(rows) if rows else None

    async def redeliver(
        self, principal: Principal, task_id: str, delivery_id: str
    ) -> tuple[Literal["queued", "in_flight", "unknown"], DeliveryRow | None]:
        """Makes a delivery due now, whatever its state: same id, same bytes, slow schedule from its start.

        `in_flight`: a try runs; nothing was changed. Twice in a row is once.
        """
        values = {"id": delivery_id, "task": task_id, "admin": principal.admin, "user": principal.user_id}
        done = await self._one(q.REDELIVER, **values)
        found = await self._list(principal, task_id, delivery_id)
        if not found:
            return "unknown", None
        return ("queued" if done else "in_flight"), found[0]

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
        rows = await self._one(
            q.REDELIVER_SINCE,
            admin=principal.admin,
            user=principal.user_id,
            since=since,
            state=state,
            until=until,
            origin=origin,
            limit=limit,
        )
        return len(rows)

    async def suspended(self, principal: Principal) -> list[OriginRow]:
        """Receivers of the principal that fail or are suspended."""
        rows = await self._one(q.ORIGINS, admin=principal.admin, user=principal.user_id)
        return [OriginRow(*row) for row in rows]

    async def resume(self, principal: Principal, origin: str) -> int | None:
        """Ends a suspension: kept deliveries are due now. Their number, or None when it was not suspended."""
        values = {"user": principal.user_id, "origin": origin}

        async def work(unit: Unit) -> int | None:
            if not await unit.run(q.UNSUSPEND, **values):
                return None
            return len(await unit.run(q.LET_GO, **values))

        return await self._unit(work)

    async def suspend(self, user_id: str, origin: str, reason: str) -> int:
        """Suspends a receiver at once (410); returns how many deliveries are kept back."""

        async def work(unit: Unit) -> int:
            await unit.run(q.SUSPEND, user=user_id, origin=origin, reason=reason)
            return len(await unit.run(q.KEEP_BACK, user=user_id, origin=origin))

        return await self._unit(work)

    async def counts(self) -> dict[DeliveryState, int]:
        """Deliveries per state. DELIVERED is left out: it grows without end and waits for nothing."""
        found: dict[DeliveryState, int] = {"PENDING": 0, "RETRYING": 0, "DEAD": 0, "SUSPENDED": 0}
        return found | {row[0]: row[1] for row in await self._one(q.COUNTS)}


async def _suspend_if_failing(unit: Unit, user: str, origin: str) -> None:
    values = {"user": user, "origin": origin}
    limits = {"dead": q.SUSPEND_AFTER_DEAD, "seconds": q.SUSPEND_AFTER_SECONDS}
    if await unit.run(q.SUSPEND_FAILING, **values, **limits):
        await unit.run(q.KEEP_BACK, **values)


def _deliveries(rows: Sequence[Any]) -> list[DeliveryRow]:
    """Deliveries of joined rows; one row per try, in order."""
    heads: dict[str, Any] = {}
    tries: dict[str, list[TryRow]] = {}
    for row in rows:
        if row[0] is not None:
            heads.setdefault(row[0], row[:10])
            if row[10] is not None:
                tries.setdefault(row[0], []).append(TryRow(*row[10:]))
    return [DeliveryRow(*(*head, tuple(tries.get(name, ())))) for name, head in heads.items()]
