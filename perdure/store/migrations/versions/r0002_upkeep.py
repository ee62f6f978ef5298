"""What the reconciler, the figures and the operators keep."""

from alembic import op

revision = "0002"
down_revision = "0001"

_UP = """
ALTER TABLE tasks
    ADD COLUMN cancel_signalled_at timestamptz,
    ADD COLUMN checked_at timestamptz,
    ADD COLUMN missing_since timestamptz,
    ADD COLUMN restarts integer NOT NULL DEFAULT 0;
CREATE INDEX ix_tasks_cancels ON tasks (task_id)
    WHERE cancel_requested AND status IN ('PENDING', 'QUEUED', 'PROCESSING');
CREATE TABLE pauses (
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    reason text,
    paused_by text NOT NULL,
    paused_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_pauses PRIMARY KEY (kind, name),
    CONSTRAINT ck_pauses_kind CHECK (kind IN ('pool', 'model'))
);
CREATE TABLE workers_seen (
    worker text COLLATE "C" CONSTRAINT pk_workers_seen PRIMARY KEY,
    pool text COLLATE "C" NOT NULL,
    models text[] NOT NULL,
    slots integer NOT NULL,
    in_use integer NOT NULL,
    draining boolean NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE marks (
    name text COLLATE "C" CONSTRAINT pk_marks PRIMARY KEY,
    at timestamptz NOT NULL
);
CREATE TABLE usage_daily (
    user_id text COLLATE "C" NOT NULL,
    model_id text COLLATE "C" NOT NULL,
    day date NOT NULL,
    tasks bigint NOT NULL,
    attempts bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    discarded_tokens bigint NOT NULL,
    queue_seconds double precision NOT NULL,
    run_seconds double precision NOT NULL,
    CONSTRAINT pk_usage_daily PRIMARY KEY (user_id, model_id, day)
)
"""


def upgrade() -> None:
    for statement in _UP.split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    for table in ("usage_daily", "marks", "workers_seen", "pauses"):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP INDEX ix_tasks_cancels")
    op.execute(
        "ALTER TABLE tasks DROP COLUMN cancel_signalled_at, DROP COLUMN checked_at, "
        "DROP COLUMN missing_since, DROP COLUMN restarts"
    )
