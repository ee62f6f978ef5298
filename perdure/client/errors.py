"""What a call of the client raises."""

from __future__ import annotations


class ClientError(Exception):
    """A call did not succeed."""


class Unreachable(ClientError):  # noqa: N818 - says what is
    """The API did not answer in time."""


class ApiRefused(ClientError):  # noqa: N818 - says what is
    """The API answered with a problem."""

    def __init__(self, status: int, code: str, detail: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.status = status
        self.code = code
        self.detail = detail
        self.retry_after = retry_after
