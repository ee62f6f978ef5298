"""The schema as it stands at the newest revision. A test compares it with what the migrations make.

States are text with a CHECK: native enums cost a look-up per connection and are hard to change.
Large text lives apart from the hot row, which keeps room for its next version on the same page.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    Date,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import TIMESTAMP

metadata: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

_PENDING: Final = "status = 'PENDING'"
_ACTIVE: Final = "status IN ('PENDING', 'QUEUED', 'PROCESSING')"


def _key(name: str, *, null: bool = False) -> Column[Any]:
    """Text that is compared byte by byte: ids, users, models, pools."""
    return Column(name, Text(collation="C"), nullable=null)


def _text(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, Text, nullable=null)


def _number(name: str, kind: Any = Integer, *, null: bool = False) -> Column[Any]:
    return Column(name, kind, nullable=null)


def _time(name: str, *, null: bool = False) -> Column[Any]:
    return Column(name, TIMESTAMP(timezone=True), nullable=null)


def _flag(name: str) -> Column[Any]:
    return Column(name, Boolean, nullable=False)


def _of_task(name: str = "task_id", *, primary: bool = True) -> Column[Any]:
    return Column(
        name,
        Text(collation="C"),
        ForeignKey("tasks.task_id", ondelete="CASCADE"),
        nullable=False,
        primary_key=primary,
    )


tasks: Final = Table(
    "tasks",
    metadata,
    Column("task_id", Text(collation="C"), primary_key=True),
    _key("task_type"),
    _key("user_id"),
    _key("model_id"),
    _key("pool"),
    _key("status"),
    _key("priority"),
    _number("lane", SmallInteger),  # Temporal's priority key at the next start
    _number("progress", SmallInteger),
    _number("version"),
    _number("change_seq", BigInteger),
    _number("change_xid", BigInteger),
    _text("error_code", null=True),
    _text("error_message", null=True),
    _number("retry_count"),
    _number("max_retries"),
    _number("attempt_count"),
    _text("attempts"),  # JSON
    _number("prompt_tokens", BigInteger, null=True),
    _number("completion_tokens", BigInteger, null=True),
    _number("discarded_tokens", BigInteger),
    _text("metadata"),  # JSON
    _text("callback_url", null=True),
    Column("callback_events", ARRAY(Text), nullable=False),
    _time("not_before", null=True),
    _number("queue_timeout_seconds", Double, null=True),
    _number("timeout_seconds", Double),
    _number("deadline_seconds", Double, null=True),
    _time("queue_deadline", null=True),
    _time("total_deadline", null=True),
    _key("rerun_of", null=True),
    _text("traceparent", null=True),
    _time("created_at"),
    _time("queued_at", null=True),
    _time("started_at", null=True),
    _time("completed_at", null=True),
    _time("updated_at"),
    _flag("cancel_requested"),
    _text("cancel_reason", null=True),
    _time("next_attempt_at", null=True),
    # Dispatch. A PENDING row is `ready`, or something (not_before, lease, back-off) holds it until `due_at`.
    _flag("ready"),
    _time("due_at"),
    _time("leased_until", null=True),
    _text("lease_owner", null=True),
    _time("lane_since"),
    _time("expires_at", null=True),  # the earlier deadline; 10 s later once claimed
    _time("claimed_at", null=True),
    _number("start_failures"),
    # Reconciliation.
    _time("cancel_signalled_at", null=True),
    _time("checked_at", null=True),
    _time("missing_since", null=True),
    _number("restarts"),
)
Index("ix_tasks_user_status", tasks.c.user_id, tasks.c.status)
Index("ix_tasks_status_created", tasks.c.status, tasks.c.created_at.desc(), tasks.c.task_id)
Index("ix_tasks_type_status", tasks.c.task_type, tasks.c.status)
Index("ix_tasks_user_created", tasks.c.user_id, tasks.c.created_at.desc(), tasks.c.task_id)
Index("ix_tasks_completed", tasks.c.completed_at, postgresql_where=text("completed_at IS NOT NULL"))
Index(
    "ix_tasks_ready",
    *(tasks.c[name] for name in ("pool", "lane", "user_id", "model_id", "task_id")),
    postgresql_where=text(f"{_PENDING} AND ready"),
)
Index("ix_tasks_due", tasks.c.due_at, postgresql_where=text(f"{_PENDING} AND NOT ready"))
Index(
    "ix_tasks_window",
    *(tasks.c[name] for name in ("pool", "lane", "user_id")),
    postgresql_where=text(f"status = 'QUEUED' OR ({_PENDING} AND leased_until IS NOT NULL)"),
)
Index("ix_tasks_expiry", tasks.c.expires_at, postgresql_where=text(f"{_PENDING} AND expires_at IS NOT NULL"))
Index("ix_tasks_cancels", tasks.c.task_id, postgresql_where=text(f"cancel_requested AND {_ACTIVE}"))
# Block ranges: a tree over what every write changes would cost each write an entry in every index.
Index(
    "ix_tasks_changed",
    tasks.c.change_xid,
    tasks.c.change_seq,
    postgresql_using="brin",
    postgresql_with={"pages_per_range": 16, "autosummarize": "on"},
)

task_payloads: Final = Table("task_payloads", metadata, _of_task(), _text("params"))
task_results: Final = Table("task_results", metadata, _of_task(), _text("result"))

idempotency_keys: Final = Table(
    "idempotency_keys",
    metadata,
    _key("user_id"),
    _key("route"),
    _key("key"),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("task_ids", ARRAY(Text), nullable=False),
    _text("reply", null=True),
    _time("created_at"),
    _time("expires_at"),
    PrimaryKeyConstraint("user_id", "route", "key"),
    Index("ix_idempotency_keys_expires", "expires_at"),
)

callback_deliveries: Final = Table(
    "callback_deliveries",
    metadata,
    Column("delivery_id", Text(collation="C"), primary_key=True),
    _of_task(primary=False),
    _key("user_id"),
    _key("event"),
    _text("url"),
    _key("origin"),
    Column("body", LargeBinary, nullable=False),
    _key("state"),
    _number("tries_made"),
    _number("slow_tries"),
    _time("next_due", null=True),
    _time("leased_until", null=True),
    _number("lease_no"),
    _time("created_at"),
    _time("updated_at"),
    Index("ix_callback_deliveries_task", "task_id"),
    Index("ix_callback_deliveries_user", "user_id", "state", "created_at"),
    Index(
        "ix_callback_deliveries_waiting",
        "user_id",
        "origin",
        "next_due",
        postgresql_where=text("state IN ('PENDING', 'RETRYING')"),
    ),
)

callback_tries: Final = Table(
    "callback_tries",
    metadata,
    Column(
        "delivery_id",
        Text(collation="C"),
        ForeignKey("callback_deliveries.delivery_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("number", Integer, primary_key=True),
    _text("kind"),
    _time("at"),
    _number("duration_ms"),
    _number("status", null=True),
    _text("error", null=True),
    _text("address", null=True),
    _text("sample", null=True),
)

callback_origins: Final = Table(
    "callback_origins",
    metadata,
    _key("user_id"),
    _key("origin"),
    _time("failing_since", null=True),
    _number("dead"),
    _time("suspended_at", null=True),
    _text("reason", null=True),
    PrimaryKeyConstraint("user_id", "origin"),
)

callback_secrets: Final = Table(
    "callback_secrets",
    metadata,
    Column("secret_id", Text(collation="C"), primary_key=True),
    _key("user_id"),
    Column("sealed", LargeBinary, nullable=False),
    _time("created_at"),
    _time("retires_at", null=True),
)
Index(
    "uq_callback_secrets_current",
    callback_secrets.c.user_id,
    unique=True,
    postgresql_where=text("retires_at IS NULL"),
)
Index("ix_callback_secrets_user", callback_secrets.c.user_id, callback_secrets.c.created_at)

api_keys: Final = Table(
    "api_keys",
    metadata,
    Column("key_id", Text(collation="C"), primary_key=True),
    _key("user_id"),
    Column("digest", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    _flag("act_as"),
    _text("name", null=True),
    _time("created_at"),
    _time("expires_at", null=True),
    _time("revoked_at", null=True),
    _time("last_used_at", null=True),
    Index("ix_api_keys_user", "user_id"),
)

pauses: Final = Table(
    "pauses",
    metadata,
    _key("kind"),
    _key("name"),
    _text("reason", null=True),
    _text("paused_by"),
    _time("paused_at"),
    PrimaryKeyConstraint("kind", "name"),
)

workers_seen: Final = Table(
    "workers_seen",
    metadata,
    Column("worker", Text(collation="C"), primary_key=True),
    _key("pool"),
    Column("models", ARRAY(Text), nullable=False),
    _number("slots"),
    _number("in_use"),
    _flag("draining"),
    _time("seen_at"),
    _text("told", null=True),  # JSON: what the worker itself says of its models
    _time("told_at", null=True),  # the worker's clock
)

marks: Final = Table("marks", metadata, Column("name", Text(collation="C"), primary_key=True), _time("at"))

usage_daily: Final = Table(
    "usage_daily",  # what deleted tasks used; tasks that still stand are summed from their rows
    metadata,
    _key("user_id"),
    _key("model_id"),
    Column("day", Date, nullable=False),
    *(
        _number(name, BigInteger)
        for name in ("tasks", "attempts", "prompt_tokens", "completion_tokens", "discarded_tokens")
    ),
    _number("queue_seconds", Double),
    _number("run_seconds", Double),
    PrimaryKeyConstraint("user_id", "model_id", "day"),
)
