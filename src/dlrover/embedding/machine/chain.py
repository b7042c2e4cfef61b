"""Chains of embedding checkpoints: a full one, then increments that each name the one before."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlrover.errors import InfrastructureError
from dlrover.spec.requests.placement import SLOTS

FORMAT = 1


class TablePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one server wrote of its slots."""

    file: str
    """Path below the checkpoint directory."""
    slots: tuple[int, ...]
    rows: int
    nbytes: int
    checksum: str
    """XXH3-64 of the file, hexadecimal."""
    clocks: dict[str, int] = {}
    """Updates so far of each table whose rows expire by updates."""


class TableManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint of all tables; it is written last, so that what it names is complete."""

    format: int = FORMAT
    id: str
    parent: str = ""
    """Checkpoint that this one adds to; empty: this one is full."""
    number: int
    """Place in its chain, from 0."""
    step: int
    time: float = 0.0
    """When the servers copied the rows, in seconds since the epoch."""
    tables: dict[str, str]
    """Options of each table, by name."""
    parts: tuple[TablePart, ...]


def clocks(manifest: TableManifest) -> dict[str, NDArray[np.int64]]:
    """Return, for each table whose rows expire by updates, the updates so far where each slot was copied."""
    found: dict[str, NDArray[np.int64]] = {}
    for part in manifest.parts:
        for name, clock in part.clocks.items():
            found.setdefault(name, np.zeros(SLOTS, np.int64))[list(part.slots)] = clock
    return found


def check(manifest: TableManifest) -> None:
    """Refuse a checkpoint whose parts do not hold every slot once.

    Raises:
        InfrastructureError: A slot is missing, or is there twice.
    """
    seen: dict[int, str] = {}
    for part in manifest.parts:
        for slot in part.slots:
            if slot in seen:
                raise InfrastructureError(
                    f"The embedding checkpoint {manifest.id} has slot {slot} in {seen[slot]} and {part.file}."
                )
            seen[slot] = part.file
    missing = set(range(SLOTS)) - seen.keys()
    if missing:
        raise InfrastructureError(
            f"The embedding checkpoint {manifest.id} lacks {len(missing)} of {SLOTS} slots, the first of them"
            f" {min(missing)}."
        )


def chain(newest: TableManifest, read: Callable[[str], TableManifest]) -> list[TableManifest]:
    """Return the checkpoints to restore for ``newest``, the full one first.

    Args:
        newest: The checkpoint to restore.
        read: Returns a checkpoint by its id.

    Raises:
        InfrastructureError: One is missing, out of order, in the chain twice, or incomplete.
    """
    found = [newest]
    while found[-1].parent:
        child = found[-1]
        parent = read(child.parent)
        if parent.id != child.parent:
            raise InfrastructureError(
                f"The embedding checkpoint {child.parent} holds another one, {parent.id}."
            )
        if parent.number != child.number - 1:
            raise InfrastructureError(
                f"The embedding checkpoint {child.id} has number {child.number} of its chain, and its parent"
                f" {parent.id} has number {parent.number}."
            )
        found.append(parent)
    if found[-1].number:
        raise InfrastructureError(
            f"The embedding checkpoint {found[-1].id} has number {found[-1].number} of its chain and no parent."
        )
    for manifest in found:
        check(manifest)
    return found[::-1]
