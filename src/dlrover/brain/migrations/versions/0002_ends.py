"""The ends of jobs, as their masters saw them."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import MEDIUMTEXT

from dlrover.brain.migrations.steps import create_table

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    create_table(
        "ends",
        sa.Column(
            "job",
            sa.String(100),
            sa.ForeignKey("jobs.id", ondelete="CASCADE"),  # earlier Brains delete jobs, too
            primary_key=True,
        ),
        sa.Column(
            "outcome", sa.Text().with_variant(MEDIUMTEXT(), "mysql", "mariadb"), nullable=False
        ),
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
    )
