"""Tasks, their payloads, callbacks and keys."""

from alembic import op

revision = "0001"
down_revision = None

_TASKS = """
CREATE SEQUENCE task_changes CACHE 1;
CREATE TABLE tasks (
    task_id text COLLATE "C" CONSTRAINT pk_tasks PRIMARY KEY,
    task_type text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    model_id text COLLATE "C" NOT NULL,
    pool text COLLATE "C" NOT NULL,
    status text COLLATE "C" NOT NULL,
    priority text COLLATE "C" NOT NULL DEFAULT 'NORMAL',
    lane smallint NOT NULL,
    progress smallint NOT NULL DEFAULT 0,
    version integer NOT NULL DEFAULT 0,
    change_seq bigint NOT NULL DEFAULT nextval('task_changes'),
    change_xid bigint NOT NULL DEFAULT CAST(CAST(pg_current_xact_id() AS text) AS bigint),
    error_code text,
    error_message text,
    retry_count integer NOT NULL DEFAULT 0,
    max_retries integer NOT NULL DEFAULT 3,
    attempt_count integer NOT NULL DEFAULT 0,
    attempts text NOT NULL DEFAULT '[]',
    prompt_tokens bigint,
    completion_tokens bigint,
    discarded_tokens bigint NOT NULL DEFAULT 0,
    metadata text NOT NULL DEFAULT '{}',
    callback_url text,
    callback_events text[] NOT NULL,
    not_before timestamptz,
    queue_timeout_seconds double precision,
    timeout_seconds double precision NOT NULL,
    deadline_seconds double precision,
    queue_deadline timestamptz,
    total_deadline timestamptz,
    rerun_of text COLLATE "C",
    traceparent text,
    created_at timestamptz NOT NULL DEFAULT now(),
    queued_at timestamptz,
    started_at timestamptz,
    completed_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now(),
    cancel_requested boolean NOT NULL DEFAULT false,
    cancel_reason text,
    next_attempt_at timestamptz,
    ready boolean NOT NULL,
    due_at timestamptz NOT NULL,
    leased_until timestamptz,
    lease_owner text,
    lane_since timestamptz NOT NULL,
    expires_at timestamptz,
    claimed_at timestamptz,
    start_failures integer NOT NULL DEFAULT 0,
    CONSTRAINT ck_tasks_status CHECK
        (status IN ('PENDING', 'QUEUED', 'PROCESSING', 'COMPLETED', 'FAILED', 'CANCELLED')),
    CONSTRAINT ck_tasks_priority CHECK (priority IN ('HIGH', 'NORMAL', 'LOW')),
    CONSTRAINT ck_tasks_lane CHECK (lane BETWEEN 1 AND 5),
    CONSTRAINT ck_tasks_progress CHECK (progress BETWEEN 0 AND 100),
    CONSTRAINT ck_tasks_counts CHECK
        (version >= 0 AND retry_count >= 0 AND max_retries >= 0 AND attempt_count >= 0),
    CONSTRAINT ck_tasks_lengths CHECK (
        char_length(task_id) BETWEEN 1 AND 64 AND char_length(task_type) BETWEEN 1 AND 64
        AND char_length(user_id) BETWEEN 1 AND 64 AND char_length(model_id) BETWEEN 1 AND 64
        AND char_length(pool) BETWEEN 1 AND 64 AND char_length(callback_url) <= 2048),
    CONSTRAINT ck_tasks_end CHECK
        ((completed_at IS NOT NULL) = (status IN ('COMPLETED', 'FAILED', 'CANCELLED'))),
    CONSTRAINT ck_tasks_error CHECK (status <> 'COMPLETED' OR (error_code IS NULL AND progress = 100))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
        autovacuum_analyze_scale_factor = 0.02);
CREATE INDEX ix_tasks_user_status ON tasks (user_id, status);
CREATE INDEX ix_tasks_status_created ON tasks (status, created_at DESC, task_id);
CREATE INDEX ix_tasks_type_status ON tasks (task_type, status);
CREATE INDEX ix_tasks_user_created ON tasks (user_id, created_at DESC, task_id);
CREATE INDEX ix_tasks_completed ON tasks (completed_at) WHERE completed_at IS NOT NULL;
CREATE INDEX ix_tasks_ready ON tasks (pool, lane, user_id, model_id, task_id)
    WHERE status = 'PENDING' AND ready;
CREATE INDEX ix_tasks_due ON tasks (due_at) WHERE status = 'PENDING' AND NOT ready;
CREATE INDEX ix_tasks_window ON tasks (pool, lane, user_id)
    WHERE status = 'QUEUED' OR (status = 'PENDING' AND leased_until IS NOT NULL);
CREATE INDEX ix_tasks_expiry ON tasks (expires_at) WHERE status = 'PENDING' AND expires_at IS NOT NULL;
CREATE INDEX ix_tasks_changed ON tasks USING brin (change_xid, change_seq)
    WITH (pages_per_range = 16, autosummarize = on);
CREATE TABLE task_payloads (
    task_id text COLLATE "C" CONSTRAINT pk_task_payloads PRIMARY KEY
        CONSTRAINT fk_task_payloads_tasks REFERENCES tasks ON DELETE CASCADE,
    params text NOT NULL
);
CREATE TABLE task_results (
    task_id text COLLATE "C" CONSTRAINT pk_task_results PRIMARY KEY
        CONSTRAINT fk_task_results_tasks REFERENCES tasks ON DELETE CASCADE,
    result text NOT NULL
);
CREATE TABLE idempotency_keys (
    user_id text COLLATE "C" NOT NULL,
    route text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    task_ids text[] NOT NULL,
    reply text,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_idempotency_keys PRIMARY KEY (user_id, route, key)
);
CREATE INDEX ix_idempotency_keys_expires ON idempotency_keys (expires_at)
"""

_CALLBACKS = """
CREATE TABLE callback_deliveries (
    delivery_id text COLLATE "C" CONSTRAINT pk_callback_deliveries PRIMARY KEY,
    task_id text COLLATE "C" NOT NULL
        CONSTRAINT fk_callback_deliveries_tasks REFERENCES tasks ON DELETE CASCADE,
    user_id text COLLATE "C" NOT NULL,
    event text COLLATE "C" NOT NULL,
    url text NOT NULL,
    origin text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    state text COLLATE "C" NOT NULL DEFAULT 'PENDING',
    tries_made integer NOT NULL DEFAULT 0,
    slow_tries integer NOT NULL DEFAULT 0,
    next_due timestamptz,
    leased_until timestamptz,
    lease_no integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT ck_callback_deliveries_state CHECK
        (state IN ('PENDING', 'DELIVERED', 'RETRYING', 'DEAD', 'SUSPENDED')),
    CONSTRAINT ck_callback_deliveries_due CHECK
        ((next_due IS NOT NULL) = (state IN ('PENDING', 'RETRYING')))
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX ix_callback_deliveries_task ON callback_deliveries (task_id);
CREATE INDEX ix_callback_deliveries_user ON callback_deliveries (user_id, state, created_at);
CREATE INDEX ix_callback_deliveries_waiting ON callback_deliveries (user_id, origin, next_due)
    WHERE state IN ('PENDING', 'RETRYING');
CREATE TABLE callback_tries (
    delivery_id text COLLATE "C" NOT NULL
        CONSTRAINT fk_callback_tries_callback_deliveries REFERENCES callback_deliveries ON DELETE CASCADE,
    number integer NOT NULL,
    kind text NOT NULL,
    at timestamptz NOT NULL,
    duration_ms integer NOT NULL,
    status integer,
    error text,
    address text,
    sample text,
    CONSTRAINT pk_callback_tries PRIMARY KEY (delivery_id, number)
);
CREATE TABLE callback_origins (
    user_id text COLLATE "C" NOT NULL,
    origin text COLLATE "C" NOT NULL,
    failing_since timestamptz,
    dead integer NOT NULL DEFAULT 0,
    suspended_at timestamptz,
    reason text,
    CONSTRAINT pk_callback_origins PRIMARY KEY (user_id, origin)
);
CREATE TABLE callback_secrets (
    secret_id text COLLATE "C" CONSTRAINT pk_callback_secrets PRIMARY KEY,
    user_id text COLLATE "C" NOT NULL,
    sealed bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    retires_at timestamptz
);
CREATE UNIQUE INDEX uq_callback_secrets_current ON callback_secrets (user_id) WHERE retires_at IS NULL;
CREATE INDEX ix_callback_secrets_user ON callback_secrets (user_id, created_at);
CREATE TABLE api_keys (
    key_id text COLLATE "C" CONSTRAINT pk_api_keys PRIMARY KEY,
    user_id text COLLATE "C" NOT NULL,
    digest bytea NOT NULL,
    scopes text[] NOT NULL,
    act_as boolean NOT NULL DEFAULT false,
    name text,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz
);
CREATE INDEX ix_api_keys_user ON api_keys (user_id)
"""


def upgrade() -> None:
    for statement in (_TASKS + ";" + _CALLBACKS).split(";\n"):
        op.execute(statement)


def downgrade() -> None:
    for table in (
        "api_keys",
        "callback_secrets",
        "callback_origins",
        "callback_tries",
        "callback_deliveries",
        "idempotency_keys",
        "task_results",
        "task_payloads",
        "tasks",
    ):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP SEQUENCE task_changes")
