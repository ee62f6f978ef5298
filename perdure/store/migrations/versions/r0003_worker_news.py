"""What GPU workers tell of their models."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("ALTER TABLE workers_seen ADD COLUMN told text, ADD COLUMN told_at timestamptz")


def downgrade() -> None:
    op.execute("ALTER TABLE workers_seen DROP COLUMN told, DROP COLUMN told_at")
