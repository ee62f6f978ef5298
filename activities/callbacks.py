"""Activities that send callbacks, on the callbacks worker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from perdure import names
from perdure.callback.deliver import Deliverer
from perdure.contracts import DeliverInput
from perdure.observability.logs import bind
from perdure.store.errors import StoreUnavailable

TRY_FAILED: Final = "CallbackTryFailed"  # type of the error that ends a failed quick try


class CallbackActivities:
    """The quick tries of a delivery, and the sweep of what they leave."""

    def __init__(self, deliverer: Deliverer) -> None:
        self._deliverer = deliverer

    @activity.defn(name=names.ACT_DELIVER_CALLBACK)
    async def deliver_callback(self, given: DeliverInput) -> str:
        """One quick try. Returns how the delivery stands (`TryResult.kind`) once Temporal has no more to do.

        A try that is to be repeated fails with the delay that Temporal keeps to. Whatever happens here, the
        row says what is due, so a lost activity costs nothing but time.
        """
        waited = (datetime.now(UTC) - activity.info().scheduled_time).total_seconds()
        with bind(task_id=given.task_id):
            try:
                result = await self._deliverer.attempt(
                    given.delivery_id, waited=max(0.0, waited), traceparent=given.traceparent
                )
            except StoreUnavailable as error:
                raise _postgres_away() from error
        if result.kind == "again":
            raise ApplicationError(
                result.error or "the receiver did not take the callback",
                type=TRY_FAILED,
                next_retry_delay=timedelta(seconds=result.delay or 0.0),
                category=ApplicationErrorCategory.BENIGN,
            )
        return result.kind

    @activity.defn(name=names.ACT_SWEEP_CALLBACKS)
    async def sweep_callbacks(self) -> dict[str, int]:
        """Sends what is due in the table. Returns how many deliveries it claimed and saw the end of."""
        try:
            report = await self._deliverer.sweep(activity.heartbeat)
        except StoreUnavailable as error:
            raise _postgres_away() from error
        return {"claimed": report.claimed, "settled": report.settled}


def _postgres_away() -> ApplicationError:
    return ApplicationError(
        "Postgres is not available", type="StoreUnavailable", category=ApplicationErrorCategory.BENIGN
    )
