"""The callbacks worker: a queue and slots of its own, so that no receiver holds up anything else."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Final

from temporalio.client import Client
from temporalio.worker import PollerBehaviorSimpleMaximum, Worker

from activities.callbacks import CallbackActivities
from perdure import names
from perdure.callback.deliver import Deliverer
from perdure.callback.guard import GuardPolicy
from perdure.callback.secrets import CallbackSecrets
from perdure.callback.sender import TOTAL_SECONDS, Sender
from perdure.observability.metrics import Metrics
from perdure.settings import CallbackSettings
from perdure.store.engine import Store

SLOTS: Final = 128  # tries wait on the network and nothing else
_POLLERS: Final = 10

log = logging.getLogger(__name__)


async def build_callbacks_worker(
    client: Client, store: Store, settings: CallbackSettings, metrics: Metrics, stack: AsyncExitStack
) -> Worker:
    """The worker and what it holds; `stack` closes it, after the worker has stopped.

    Raises SecretsUnavailable and ValueError, which name the setting to mend.
    """
    policy = GuardPolicy.from_settings(settings)
    secrets = CallbackSecrets.from_settings(settings, store.secrets)
    deliverer = Deliverer(store, secrets, Sender(policy), metrics)
    stack.push_async_callback(deliverer.aclose)
    if policy.nets or policy.hosts or policy.http or not policy.ports:
        log.warning(
            "callbacks are opened beyond public https",
            extra={
                "ranges": [str(net) for net in policy.nets],
                "hosts": sorted(policy.hosts),
                "http": policy.http,
                "ports": sorted(policy.ports) or "all",
            },
        )
    return callbacks_worker(client, CallbackActivities(deliverer))


def callbacks_worker(client: Client, activities: CallbackActivities) -> Worker:
    """A worker for these activities. On shutdown, tries in flight may end."""
    return Worker(
        client,
        task_queue=names.CALLBACKS_QUEUE,
        activities=[activities.deliver_callback, activities.sweep_callbacks],
        max_concurrent_activities=SLOTS,
        activity_task_poller_behavior=PollerBehaviorSimpleMaximum(_POLLERS),
        graceful_shutdown_timeout=timedelta(seconds=TOTAL_SECONDS + 5),
    )
