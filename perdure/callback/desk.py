"""What the API does about callbacks: it hands out secrets and sends test events.

desk = CallbackDesk.from_settings(settings, store.secrets, policy)
issued = await desk.secrets.rotate(user_id)          raises SecretsUnavailable, SecretsFixed, ...
probe = await desk.send_test(user_id, url)           raises TooManyTests
await desk.aclose()
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from perdure import names
from perdure.callback.answer import Answer
from perdure.callback.body import TEST_EVENT, build_test_body
from perdure.callback.guard import GuardPolicy
from perdure.callback.secrets import CallbackSecrets, SecretsUnavailable
from perdure.callback.sender import Sender
from perdure.callback.sign import signed_headers
from perdure.settings import DatabaseSettings
from perdure.store.secrets import SecretRepository

TEST_SECONDS: Final = 10.0  # of one test event: somebody waits for the answer
MAX_TESTS: Final = 8  # in flight in one process
MAX_TESTS_OF_USER: Final = 2


class TooManyTests(Exception):  # noqa: N818 - said of the caller
    """MAX_TESTS test events, or MAX_TESTS_OF_USER of the user's, are in flight."""


@dataclass(frozen=True)
class Probe:
    """A test event as it went."""

    delivery_id: str
    answer: Answer


class CallbackDesk:
    """One per API process. Without usable settings it stands all the same, and says so when asked."""

    def __init__(self, secrets: CallbackSecrets | SecretsUnavailable, policy: GuardPolicy) -> None:
        self._secrets = secrets
        self._policy = policy
        self._sender: Sender | None = None
        self._testing: list[str] = []  # users with a test in flight

    @classmethod
    def from_settings(
        cls, settings: DatabaseSettings, repository: SecretRepository, policy: GuardPolicy
    ) -> Self:
        """Never raises: an API without callback settings serves everything else."""
        try:
            return cls(CallbackSecrets.from_settings(settings, repository), policy)
        except SecretsUnavailable as error:
            return cls(error, policy)

    @property
    def secrets(self) -> CallbackSecrets:
        """Raises SecretsUnavailable, which names the setting that is missing."""
        if isinstance(self._secrets, SecretsUnavailable):
            raise SecretsUnavailable(str(self._secrets))
        return self._secrets

    async def send_test(self, user_id: str, url: str) -> Probe:
        """Sends one signed event TEST to `url`; nothing is stored and nothing tried again.

        Raises TooManyTests, SecretsUnavailable, StoreError.
        """
        keys = await self.secrets.keys(user_id)
        if len(self._testing) >= MAX_TESTS or self._testing.count(user_id) >= MAX_TESTS_OF_USER:
            raise TooManyTests
        self._sender = self._sender or Sender(self._policy, total_seconds=TEST_SECONDS)
        delivery_id, body = names.new_delivery_id(), build_test_body(datetime.now(UTC))
        headers = signed_headers(
            delivery_id=delivery_id, event=TEST_EVENT, body=body, keys=keys, at=int(time.time()), number=1
        )
        self._testing.append(user_id)
        try:
            return Probe(delivery_id, await self._sender.send(url, body, headers))
        finally:
            self._testing.remove(user_id)

    async def aclose(self) -> None:
        """Closes the sender, if there was one."""
        if self._sender is not None:
            await self._sender.aclose()
