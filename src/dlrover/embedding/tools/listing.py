"""What a directory of embedding checkpoints holds, from the manifests alone."""

from __future__ import annotations

import msgspec

from dlrover.checkpoint.storage.stores import open_store
from dlrover.embedding import files
from dlrover.embedding.machine.chain import TableManifest
from dlrover.embedding.options import TableOptions, decoded
from dlrover.embedding.remote import stored
from dlrover.embedding.tools import values
from dlrover.errors import ConfigurationError


class StoredTables(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint."""

    step: int
    id: str
    adds_to: int | None
    """Step of the checkpoint that this one adds to; None: it is full."""
    rows: int
    """Rows in its files: of an increment, those that changed."""
    nbytes: int
    parts: int


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints of a directory, or the table of a file."""

    checkpoints: list[StoredTables]
    """The latest step first."""
    tables: dict[str, TableOptions]
    """Options of the tables of the latest one."""


def listing(place: str) -> Listing:
    """List a file of `HashTable.save`, which is read and checked, or a directory of checkpoints.

    Raises:
        ConfigurationError: There is no checkpoint.
        InfrastructureError: A manifest or the file is damaged.
    """
    file = values.file_of(place)
    if file is not None:
        found = files.read(file)
        one = StoredTables(
            step=found.step,
            id="",
            adds_to=None,
            rows=sum(len(part["keys"]) for part in found.parts),
            nbytes=file.stat().st_size,
            parts=1,
        )
        return Listing(checkpoints=[one], tables={file.stem: found.options})
    store = open_store(place)
    found = stored.manifests(store)
    if not found:
        raise ConfigurationError(f"{store.location} has no embedding checkpoint.")
    steps = {each.id: each.step for each in found}
    return Listing(
        checkpoints=[_described(each, steps) for each in found],
        tables={name: decoded(text) for name, text in found[0].tables.items()},
    )


def _described(manifest: TableManifest, steps: dict[str, int]) -> StoredTables:
    return StoredTables(
        step=manifest.step,
        id=manifest.id,
        adds_to=steps.get(manifest.parent),
        rows=sum(part.rows for part in manifest.parts),
        nbytes=sum(part.nbytes for part in manifest.parts),
        parts=len(manifest.parts),
    )
