"""Values of tables in checkpoints, without the states of their optimizers and without a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from dlrover._native.tables import Copied
from dlrover.checkpoint.storage.stores import Store, is_url, open_store
from dlrover.embedding import files
from dlrover.embedding.machine.chain import TableManifest
from dlrover.embedding.options import RowOptimizer, TableOptions, decoded
from dlrover.embedding.remote import stored
from dlrover.embedding.remote.arrays import Arrays
from dlrover.embedding.table import HashTable
from dlrover.errors import ConfigurationError

Tables: TypeAlias = dict[str, HashTable]


class LoadedTables(NamedTuple):
    """Values of one checkpoint."""

    step: int
    tables: Tables


def file_of(place: str) -> Path | None:
    """Return the path of a file that `HashTable.save` may have written; None for a directory or a URL."""
    return Path(place) if not is_url(place) and Path(place).is_file() else None


def find(store: Store, step: int | None = None) -> TableManifest:
    """Return the latest checkpoint in a directory, or the latest one of a step.

    Raises:
        ConfigurationError: There is none.
        InfrastructureError: The directory cannot be read, or a manifest is damaged.
    """
    found = [each for each in stored.manifests(store) if step in (None, each.step)]
    if not found:
        of_step = "" if step is None else f" of step {step}"
        raise ConfigurationError(f"{store.location} has no embedding checkpoint{of_step}.")
    return found[0]


def load(place: str | os.PathLike[str], step: int | None = None) -> LoadedTables:
    """Return the values of a file of `HashTable.save`, or of a checkpoint in a directory or at a URL.

    The table of a file is named as the file without its suffix.

    Raises:
        ConfigurationError: There is no such checkpoint.
        InfrastructureError: It is damaged.
    """
    file = file_of(os.fspath(place))
    if file is not None:
        if step is not None:
            raise ConfigurationError(f"--step is {step}; {file} is a file with one table.")
        found = files.read(file)
        tables = empty({file.stem: found.options.json()})
        for part in found.parts:
            _restore(tables[file.stem], part)
        return LoadedTables(found.step, tables)
    store = open_store(place)
    newest = find(store, step)
    tables = empty(newest.tables)
    for _, part in stored.parts(store, newest):
        add(tables, part)
    return LoadedTables(newest.step, tables)


def empty(options: Mapping[str, str]) -> Tables:
    """Return tables for values, by name; they have no rows."""
    return {name: HashTable.of(_values_only(decoded(text))) for name, text in options.items()}


def add(tables: Tables, part: Arrays) -> None:
    """Take in the values of a part of a checkpoint, and remove what it says was removed."""
    for name, table in tables.items():
        if f"keys/{name}" in part:
            _restore(table, {field: part[f"{field}/{name}"] for field in Copied._fields})


def _values_only(options: TableOptions) -> TableOptions:
    return msgspec.structs.replace(
        options,
        optimizer=RowOptimizer(name="sgd"),
        admission=None,
        expiry=None,
        memory_bytes=0,
        spill=None,
    )


def _restore(table: HashTable, rows: Arrays) -> None:
    width = table.options.native().width  # values come first in a row
    table.restore_rows(dict(rows) | {"rows": np.ascontiguousarray(rows["rows"][:, :width])})
