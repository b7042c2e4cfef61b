"""The tables of the Brain's database. The migrations in ``migrations`` create them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects.mysql import MEDIUMTEXT

metadata = MetaData()

ID = String(100)
NAME = String(253)
NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""Type of row numbers; SQLite numbers rows by itself only in columns of this type."""
JSON = Text().with_variant(MEDIUMTEXT(), "mysql", "mariadb")
"""A record as JSON."""
SENTENCE = Text()
OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",  # ids that differ in case are different
}


def _job() -> Column[str]:
    return Column("job", ID, ForeignKey("jobs.id"), nullable=False)


jobs = Table(
    "jobs",
    metadata,
    Column("id", ID, primary_key=True),
    Column("mode", ID, nullable=False),
    Column("state", ID, nullable=False),
    Column("registered", Double, nullable=False),
    Column("ended", Double),
    Column("reason", SENTENCE, nullable=False),
    Column("description", JSON, nullable=False),
    Column("shape", JSON),
    Column("throughput", Double, nullable=False),
    Column("done", Double, nullable=False),
    Index("jobs_by_state", "state", "mode"),
    Index("jobs_by_time", "registered"),
    Index("jobs_by_end", "ended"),
    **OPTIONS,
)
"""Jobs; shape, throughput and done are those of the last sample."""

ends = Table(
    "ends",
    metadata,
    Column("job", ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("outcome", JSON, nullable=False),
    **OPTIONS,
)
"""Ends of jobs as their masters saw them: large, and read for one job alone."""

nodes = Table(
    "nodes",
    metadata,
    _job(),
    Column("node", ID, nullable=False),
    Column("kind", ID, nullable=False),
    Column("heard", Double, nullable=False),
    Column("cpu", Double, nullable=False),
    Column("most_cpu", Double, nullable=False),
    Column("memory", Double, nullable=False),
    Column("most_memory", Double, nullable=False),
    Column("accelerator", Double, nullable=False),
    Index("nodes_of_job", "job", "node", unique=True),
    **OPTIONS,
)
"""Nodes of jobs, with their latest and their largest resource usage."""

samples = Table(
    "samples",
    metadata,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    _job(),
    Column("at", Double, nullable=False),
    Column("sample", JSON, nullable=False),
    Index("samples_of_job", "job", "id"),
    Index("samples_by_time", "at"),
    **OPTIONS,
)
"""Measured throughputs."""

usages = Table(
    "usages",
    metadata,
    Column("id", NUMBER, primary_key=True, autoincrement=True),
    _job(),
    Column("node", ID, nullable=False),
    Column("at", Double, nullable=False),
    Column("cpu", Double, nullable=False),
    Column("memory", Double, nullable=False),
    Column("accelerator", Double, nullable=False),
    Column("progress", Double, nullable=False),
    Index("usages_of_job", "job", "node", "id"),
    Index("usages_by_time", "at"),
    **OPTIONS,
)
"""Resource usage of jobs' nodes over time."""

plans = Table(
    "plans",
    metadata,
    Column("id", ID, primary_key=True),
    _job(),
    Column("at", Double, nullable=False),
    Column("optimizer", ID, nullable=False),
    Column("plan", JSON, nullable=False),
    Column("shape", JSON),
    Index("plans_of_job", "job", "at"),
    **OPTIONS,
)
"""Plans; the shape is the one that the job had before."""

outcomes = Table(
    "outcomes",
    metadata,
    Column("plan", ID, ForeignKey("plans.id"), primary_key=True),
    Column("at", Double, nullable=False),
    Column("state", ID, nullable=False),
    Column("throughput", Double, nullable=False),
    Column("reason", SENTENCE, nullable=False),
    **OPTIONS,
)
"""Outcomes of plans."""

cluster = Table(
    "cluster_nodes",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("at", Double, nullable=False),
    Column("node", JSON, nullable=False),
    **OPTIONS,
)
"""The machines of the cluster."""

quotas = Table(
    "quotas",
    metadata,
    Column("queue", ID, primary_key=True),
    Column("limits", JSON, nullable=False),
    **OPTIONS,
)
"""Limits on what the jobs of a queue may have together."""

requests = Table(
    "requests",
    metadata,
    Column("id", ID, primary_key=True),
    Column("at", Double, nullable=False),
    Index("requests_by_time", "at"),
    **OPTIONS,
)
"""Reports that were carried out: each counts once, however often it arrives."""
