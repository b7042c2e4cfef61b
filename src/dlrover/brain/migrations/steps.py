"""Steps of migrations. MariaDB and MySQL commit each one: a migration that was cut off is done again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op


def create_table(name: str, *columns: sa.Column[Any], **options: Any) -> None:
    """Create a table, unless there is one with these columns."""
    inspector = sa.inspect(op.get_bind())
    wanted = {column.name for column in columns}
    if not inspector.has_table(name) or wanted != {
        column["name"] for column in inspector.get_columns(name)
    }:
        op.create_table(name, *columns, **options)  # refused for a table of another program


def create_index(name: str, table: str, columns: Sequence[str], *, unique: bool = False) -> None:
    """Create an index, unless the table has one of this name."""
    known = sa.inspect(op.get_bind()).get_indexes(table)
    if all(index["name"] != name for index in known):
        op.create_index(name, table, columns, unique=unique)
