"""The first version of the tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import MEDIUMTEXT

from dlrover.brain.migrations.steps import create_index, create_table

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
ID = sa.String(100)
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.Text().with_variant(MEDIUMTEXT(), "mysql", "mariadb")
SENTENCE = sa.Text()


def _job() -> sa.Column[str]:
    return sa.Column("job", ID, sa.ForeignKey("jobs.id"), nullable=False)


def _number(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=False)


def _id(name: str) -> sa.Column[str]:
    return sa.Column(name, ID, nullable=False)


def _row() -> sa.Column[int]:
    return sa.Column("id", NUMBER, primary_key=True, autoincrement=True)


def upgrade() -> None:
    """Create the tables."""
    _jobs()
    _measurements()
    _plans()
    _cluster()


def _jobs() -> None:
    create_table(
        "jobs",
        sa.Column("id", ID, primary_key=True),
        _id("mode"),
        _id("state"),
        _number("registered"),
        sa.Column("ended", sa.Double()),
        sa.Column("reason", SENTENCE, nullable=False),
        sa.Column("description", JSON, nullable=False),
        sa.Column("shape", JSON),
        _number("throughput"),
        _number("done"),
        **OPTIONS,
    )
    create_index("jobs_by_state", "jobs", ["state", "mode"])
    create_index("jobs_by_time", "jobs", ["registered"])
    create_index("jobs_by_end", "jobs", ["ended"])
    numbers = ("heard", "cpu", "most_cpu", "memory", "most_memory", "accelerator")
    create_table("nodes", _job(), _id("node"), _id("kind"), *map(_number, numbers), **OPTIONS)
    create_index("nodes_of_job", "nodes", ["job", "node"], unique=True)


def _measurements() -> None:
    sample = sa.Column("sample", JSON, nullable=False)
    create_table("samples", _row(), _job(), _number("at"), sample, **OPTIONS)
    create_index("samples_of_job", "samples", ["job", "id"])
    create_index("samples_by_time", "samples", ["at"])
    numbers = ("at", "cpu", "memory", "accelerator", "progress")
    create_table("usages", _row(), _job(), _id("node"), *map(_number, numbers), **OPTIONS)
    create_index("usages_of_job", "usages", ["job", "node", "id"])
    create_index("usages_by_time", "usages", ["at"])


def _plans() -> None:
    create_table(
        "plans",
        sa.Column("id", ID, primary_key=True),
        _job(),
        _number("at"),
        _id("optimizer"),
        sa.Column("plan", JSON, nullable=False),
        sa.Column("shape", JSON),
        **OPTIONS,
    )
    create_index("plans_of_job", "plans", ["job", "at"])
    create_table(
        "outcomes",
        sa.Column("plan", ID, sa.ForeignKey("plans.id"), primary_key=True),
        _number("at"),
        _id("state"),
        _number("throughput"),
        sa.Column("reason", SENTENCE, nullable=False),
        **OPTIONS,
    )


def _cluster() -> None:
    create_table(
        "cluster_nodes",
        sa.Column("name", sa.String(253), primary_key=True),
        _number("at"),
        sa.Column("node", JSON, nullable=False),
        **OPTIONS,
    )
    create_table(
        "quotas",
        sa.Column("queue", ID, primary_key=True),
        sa.Column("limits", JSON, nullable=False),
        **OPTIONS,
    )
    create_table("requests", sa.Column("id", ID, primary_key=True), _number("at"), **OPTIONS)
    create_index("requests_by_time", "requests", ["at"])
