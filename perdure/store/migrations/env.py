"""Run by alembic. The connection is given by `perdure.store.migrate`, which holds the migrator's lock."""

from alembic import context

from perdure.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
