"""Tries: claim the row, sign, send, record. Whoever makes one goes through here.

    deliverer = Deliverer(store, secrets, sender, metrics)
    result = await deliverer.attempt(delivery_id, waited=…)     one quick try, for `deliver_callback`
    report = await deliverer.sweep()                            what is due in the table
    await deliverer.aclose()                                    waits for the tries in flight

A claim is a lease on the row, so no two tries of one delivery run at once. A repeat can only come of a crash
between the receiver's answer and its record; it carries the same id and the same bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from perdure.callback.answer import Answer
from perdure.callback.gate import OriginGate
from perdure.callback.guard import origin_of
from perdure.callback.schedule import SWEEP_LAG, Plan, after_failure
from perdure.callback.secrets import CallbackSecrets, SecretsUnavailable
from perdure.callback.sender import Sender
from perdure.callback.sign import signed_headers
from perdure.observability.metrics import Metrics
from perdure.observability.traces import current_traceparent, span, task_traceparent, trace_id_of
from perdure.store.engine import Store
from perdure.store.errors import StoreError, StoreUnavailable
from perdure.store.rows import DeliveryClaim, DeliveryState, NewTry

LEASE_MARGIN: Final = 10.0  # seconds beyond the try's whole time
SWEEP_PLACES: Final = 64  # tries of the sweep in flight in one process
SWEEP_BATCH: Final = 50
SWEEP_SECONDS: Final = 20.0  # one run goes on claiming for so long
BUSY_SECONDS: Final = 3.0  # a delivery that found no place at its receiver is due again after it
_RECORD_PAUSE: Final = 0.2  # seconds between two goes at recording, growing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TryResult:
    """What a quick try leaves behind.

    `again`: Temporal tries again after `delay` seconds. `left`: the table has it now. `skipped`: nothing to
    send, or somebody else is at it. The others are the delivery's own end.
    """

    kind: Literal["delivered", "again", "left", "dead", "suspended", "skipped"]
    delay: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class SweepReport:
    """What a run of the sweep did. `settled`: tries it saw the end of; others may still be in flight."""

    claimed: int = 0
    settled: int = 0


class Deliverer:
    """Makes tries. One per process; holds the receivers' places and the sweep's tries in flight."""

    def __init__(
        self,
        store: Store,
        secrets: CallbackSecrets,
        sender: Sender,
        metrics: Metrics,
        *,
        gate: OriginGate | None = None,
        jitter: Callable[[], float] = lambda: random.uniform(-1, 1),  # noqa: S311 - spreads load
    ) -> None:
        self._store = store
        self._secrets = secrets
        self._sender = sender
        self._metrics = metrics
        self._gate = gate or OriginGate()
        self._jitter = jitter
        self._lease = sender.total_seconds + LEASE_MARGIN
        self._running: set[asyncio.Task[None]] = set()

    # Quick tries ---------------------------------------------------------------------------------

    async def attempt(
        self, delivery_id: str, *, waited: float = 0.0, traceparent: str | None = None
    ) -> TryResult:
        """One try under Temporal's retry policy. `waited`: seconds since the quick phase began.

        Raises StoreUnavailable when the row could not be claimed; nothing was sent then.
        """
        claim = await self._store.deliveries.claim(delivery_id, self._lease)
        if claim is None:
            return TryResult("skipped")
        return await self._try(claim, quick=True, waited=waited, traceparent=traceparent)

    # The sweep -----------------------------------------------------------------------------------

    async def sweep(self, beat: Callable[[], None] = lambda: None) -> SweepReport:
        """Takes what is due, SWEEP_PLACES at a time, for SWEEP_SECONDS at most.

        A try that takes longer than the run goes on in this process, so that a slow receiver never keeps the
        next run from the others. `beat` is called between batches. Raises StoreUnavailable.
        """
        ends, claimed, settled = time.monotonic() + SWEEP_SECONDS, 0, 0
        while (left := ends - time.monotonic()) > 0:
            beat()
            room = min(SWEEP_BATCH, SWEEP_PLACES - len(self._running))
            if room > 0:
                claims = await self._store.deliveries.claim_due(room, self._lease, skip=self._gate.full())
                claimed += len(claims)
                for claim in claims:
                    self._spawn(claim)
                if not claims:
                    break
            before = len(self._running)
            await asyncio.wait(self._running, timeout=min(left, 1.0), return_when=asyncio.FIRST_COMPLETED)
            settled += before - len(self._running)
        return SweepReport(claimed, settled)

    def _spawn(self, claim: DeliveryClaim) -> None:
        task = asyncio.create_task(self._swept(claim), name=f"callback {claim.delivery_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _swept(self, claim: DeliveryClaim) -> None:
        try:
            await self._try(claim, quick=False, waited=0.0, traceparent=None)
        except StoreError as error:  # the lease runs out and a later run takes it
            log.warning("callback not recorded", extra=_about(claim) | {"reason": str(error)})
        except Exception:
            log.exception("callback try failed", extra=_about(claim))

    # One try -------------------------------------------------------------------------------------

    async def _try(
        self, claim: DeliveryClaim, *, quick: bool, waited: float, traceparent: str | None
    ) -> TryResult:
        receiver = (claim.user_id, origin_of(claim.url))
        begun = await self._gate.enter(receiver)
        if begun is None:
            await self._store.deliveries.defer(claim, BUSY_SECONDS)
            return TryResult("left", error="the receiver has enough tries in flight")
        at = datetime.now(UTC)
        try:
            answer = await self._send(claim, traceparent)
        finally:
            self._gate.leave(receiver, begun)
        self._metrics.callback_tries.labels(outcome=answer.outcome).inc()
        self._metrics.callback_duration.observe(answer.duration_ms / 1000)
        plan = self._plan(claim, answer, quick, waited + answer.duration_ms / 1000)
        return await self._record(claim, at, answer, plan, quick)

    async def _send(self, claim: DeliveryClaim, traceparent: str | None) -> Answer:
        number = claim.tries + 1
        above = task_traceparent(traceparent or claim.traceparent, claim.task_id)
        with span(f"callback try {number}", parent=above, kind="client") as one:
            one.set("perdure.task.id", claim.task_id)
            one.set("perdure.delivery.id", claim.delivery_id)
            try:
                keys = await self._secrets.keys(claim.user_id)
            except SecretsUnavailable as error:
                log.error("callback not signed", extra=_about(claim) | {"reason": str(error)})
                return Answer("failed", "error", error="not sent: the callback secret cannot be opened")
            headers = signed_headers(
                delivery_id=claim.delivery_id,
                event=claim.event,
                body=claim.body,
                keys=keys,
                at=int(time.time()),
                number=number,
            )
            if carried := current_traceparent():
                headers["traceparent"] = carried
            answer = await self._sender.send(claim.url, claim.body, headers)
            one.set("http.response.status_code", answer.status)
            if answer.verdict != "delivered":
                one.fail(answer.outcome, answer.error or "")
            return answer

    def _plan(self, claim: DeliveryClaim, answer: Answer, quick: bool, waited: float) -> Plan:
        if answer.verdict != "failed":
            return Plan("dead", None)  # settled either way: no next try
        return after_failure(
            tries=claim.tries + 1,
            slow_tries=claim.slow_tries + (0 if quick else 1),
            quick=quick,
            waited=waited,
            retry_after=answer.retry_after,
            jitter=self._jitter(),
        )

    async def _record(
        self, claim: DeliveryClaim, at: datetime, answer: Answer, plan: Plan, quick: bool
    ) -> TryResult:
        verdict = "dead" if answer.verdict == "failed" and plan.kind == "dead" else answer.verdict
        # Temporal holds a quick try: the table waits longer than it, and takes over should it be lost.
        next_in = plan.delay + SWEEP_LAG if plan.kind == "quick" and plan.delay is not None else plan.delay
        new = NewTry(
            kind="quick" if quick else "sweep",
            at=at,
            duration_ms=answer.duration_ms,
            status=answer.status,
            error=answer.error,
            address=answer.address,
            sample=answer.sample,
        )
        state = await self._recorded(claim, new, dataclasses.replace(answer, verdict=verdict), next_in)
        self._tell(claim, answer, state)
        if state is None:  # the task was deleted meanwhile
            return TryResult("skipped")
        if state == "DELIVERED":
            return TryResult("delivered")
        if state == "DEAD":
            return TryResult("dead", error=answer.error)
        if state == "SUSPENDED":
            return TryResult("suspended", error=answer.error)
        if plan.kind == "quick":
            return TryResult("again", plan.delay, answer.error)
        return TryResult("left", error=answer.error)

    async def _recorded(
        self, claim: DeliveryClaim, new: NewTry, answer: Answer, next_in: float | None
    ) -> DeliveryState | None:
        """Records within what is left of the lease: a try that is not recorded is made again."""
        ends, pause = time.monotonic() + LEASE_MARGIN - 1, _RECORD_PAUSE
        while True:
            try:
                return await self._store.deliveries.record_try(claim, new, answer.verdict, next_in)
            except StoreUnavailable:
                if time.monotonic() + pause > ends:
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    def _tell(self, claim: DeliveryClaim, answer: Answer, state: DeliveryState | None) -> None:
        settled = {"DELIVERED": "delivered", "DEAD": "dead", "SUSPENDED": "suspended"}.get(state or "")
        if settled is not None:
            self._metrics.callback_deliveries.labels(outcome=settled).inc()
            self._metrics.callback_tries_per_delivery.observe(claim.tries + 1)
        log.log(
            logging.INFO if state == "DELIVERED" else logging.WARNING,
            "callback tried",
            extra=_about(claim)
            | {
                "state": state,
                "outcome": answer.outcome,
                "status": answer.status,
                "duration_ms": answer.duration_ms,
                "try": claim.tries + 1,
                "reason": answer.error,
            },
        )

    async def settled(self) -> None:
        """Waits for the tries that the sweep has in flight, as long as one may take."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._sender.total_seconds + LEASE_MARGIN)

    async def aclose(self) -> None:
        """Waits for the tries in flight, then closes the sender."""
        await self.settled()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._sender.aclose()


def _about(claim: DeliveryClaim) -> dict[str, object]:
    """What a log line says of a delivery: the receiver's origin, never its path or query."""
    return {
        "delivery_id": claim.delivery_id,
        "task_id": claim.task_id,
        "receiver": origin_of(claim.url),
        "trace_id": trace_id_of(claim.traceparent),
    }
