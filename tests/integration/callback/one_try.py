"""A process that makes one try and can be killed: `python -m tests.integration.callback.one_try URL ID`."""

from __future__ import annotations

import asyncio
import sys

from perdure.callback.deliver import Deliverer
from perdure.callback.secrets import CallbackSecrets
from perdure.callback.sender import Sender
from perdure.models import parse_catalogue
from perdure.observability.metrics import Metrics
from perdure.store.engine import Store, make_engine
from tests.integration.callback.harness import POLICY, SECRET

NAME = "perdure-victim"  # its connections in pg_stat_activity


async def main(url: str, delivery_id: str) -> None:
    store = Store(make_engine(url, pool_size=2, application_name=NAME))
    secrets = CallbackSecrets(store.secrets, None, [SECRET])
    deliverer = Deliverer(store, secrets, Sender(POLICY), Metrics(parse_catalogue("")))
    await deliverer.attempt(delivery_id)
    await deliverer.aclose()
    await store.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
