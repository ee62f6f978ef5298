"""Shapes of the replies about callbacks, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_Time = str | None


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TryReply(_Reply):
    number: int
    at: str
    status: int | None = Field(description="HTTP status; null when no answer came.")
    duration_ms: int
    error: str | None = Field(description="Why it failed; null when it delivered.")
    address: str | None = Field(description="The address that was connected to.")
    sample: str | None = Field(description="The answer's first characters, control characters escaped.")


class DeliveryReply(_Reply):
    """One event on its way to its receiver. `delivery_id` is the `webhook-id` of every try."""

    delivery_id: str
    event: Literal["COMPLETED", "FAILED", "CANCELLED"]
    url: str
    state: Literal["PENDING", "DELIVERED", "RETRYING", "DEAD", "SUSPENDED"]
    tries: list[TryReply]
    next_try_at: _Time = Field(description="The next try at the latest; null when none is planned.")
    created_at: str


class DeliveriesReply(_Reply):
    data: list[DeliveryReply]


class QueuedReply(_Reply):
    queued: int
    has_more: bool = Field(description="There may be more: call again.")


class ReceiverReply(_Reply):
    origin: str
    user_id: str
    failing_since: _Time
    suspended_at: _Time
    reason: str | None
    dead: int = Field(description="Deliveries that died since the last success.")
    waiting: int = Field(description="Deliveries not yet taken.")


class ReceiversReply(_Reply):
    data: list[ReceiverReply]


class ResumedReply(_Reply):
    origin: str
    queued: int


class TestReply(_Reply):
    delivery_id: str
    event: Literal["TEST"]
    delivered: bool
    status: int | None
    duration_ms: int
    error: str | None
    address: str | None
    sample: str | None


class SecretReply(_Reply):
    secret_id: str
    created_at: str
    age_seconds: int
    current: bool
    retires_at: _Time = Field(description="Null for the current one.")


class SecretsReply(_Reply):
    source: Literal["user", "operator", "unseen"]
    data: list[SecretReply]


class IssuedReply(_Reply):
    """`secret` is the plain text, `whsec` the same key for Standard Webhooks libraries."""

    secret_id: str
    secret: str
    whsec: str
    created_at: str
    overlap_hours: float
