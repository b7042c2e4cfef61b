"""Alembic's entry point, which migrates the database of the given connection."""

from __future__ import annotations

from alembic import context

from dlrover.brain.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
