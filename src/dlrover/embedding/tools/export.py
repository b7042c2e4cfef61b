"""Export of the values of tables to files that other programs read."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover import extras
from dlrover.embedding.table import HashTable
from dlrover.embedding.tools import values
from dlrover.errors import ConfigurationError, InfrastructureError

Format = Literal["npz", "safetensors", "parquet", "table"]


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export."""

    destination: str
    format: Format
    step: int
    rows: dict[str, int]
    """Rows by table."""


def export(
    place: str, destination: str, to: Format, *, table: str = "", step: int | None = None
) -> ExportedFile:
    """Write the values of a checkpoint's tables to a file, which appears when it is complete.

    ``npz`` and ``safetensors`` get two arrays for each table, ``NAME.keys`` ``(n,)`` int64 in ascending order and
    ``NAME.values`` ``(n, dim)`` float32. ``parquet`` gets one table, with the columns ``key`` and ``values``.
    ``table`` is one table without optimizer state, for `HashTable.load`.

    Args:
        place: File of `HashTable.save`, or directory or URL of checkpoints.
        destination: File to create.
        to: Its format.
        table: Name of the only table to write.
        step: Step of the checkpoint; by default the latest.

    Raises:
        ConfigurationError: An argument is not accepted.
        InfrastructureError: The checkpoint is damaged, or the file cannot be written.
    """
    target = Path(destination)
    if target.exists():
        raise ConfigurationError(f"{destination} exists; name a file that does not.")
    write = _WRITERS[to]
    loaded = values.load(place, step)
    tables = _chosen(loaded.tables, table)
    if to in ("parquet", "table") and len(tables) > 1:
        raise ConfigurationError(
            f"{place} has the tables {', '.join(tables)}; {to} takes one: name it with --table."
        )
    with _published(target) as temporary:
        write(temporary, tables, loaded.step)
    rows = {name: len(each) for name, each in tables.items()}
    return ExportedFile(destination=destination, format=to, step=loaded.step, rows=rows)


def _chosen(tables: values.Tables, name: str) -> values.Tables:
    if name and name not in tables:
        raise ConfigurationError(f"--table is {name!r}; accepted are {', '.join(tables)}.")
    return {name: tables[name]} if name else tables


@contextlib.contextmanager
def _published(target: Path) -> Iterator[Path]:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.rename(target)
    except OSError as error:
        raise InfrastructureError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _sorted(table: HashTable) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    keys = np.sort(table.keys())
    return keys, table.peek(keys)


def _arrays(tables: values.Tables) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name, table in tables.items():
        found[f"{name}.keys"], found[f"{name}.values"] = _sorted(table)
    return found


def _npz(path: Path, tables: values.Tables, step: int) -> None:
    with path.open("wb") as file:
        np.savez(file, step=np.int64(step), **_arrays(tables))


def _safetensors(path: Path, tables: values.Tables, step: int) -> None:
    library = extras.load("safetensors.numpy", "This format", "safetensors")
    library.save_file(_arrays(tables), str(path), metadata={"step": str(step)})


def _parquet(path: Path, tables: values.Tables, step: int) -> None:
    arrow, parquet = (
        extras.load("pyarrow", "This format", "parquet"),
        extras.load("pyarrow.parquet", "This format", "parquet"),
    )
    ((name, table),) = tables.items()
    keys, rows = _sorted(table)
    columns = {
        "key": arrow.array(keys),
        "values": arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), table.dim),
    }
    made = arrow.table(columns).replace_schema_metadata({"table": name, "step": str(step)})
    parquet.write_table(made, path)


def _table(path: Path, tables: values.Tables, step: int) -> None:
    (table,) = tables.values()
    table.step = step
    table.save(path)


_WRITERS: dict[Format, Callable[[Path, values.Tables, int], None]] = {
    "npz": _npz,
    "safetensors": _safetensors,
    "parquet": _parquet,
    "table": _table,
}
