"""Tools for stored steps outside of a training: list, describe and delete them. They do not need torch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from dlrover.checkpoint.machine import extent, layout as layouts
from dlrover.checkpoint.machine.layout import ITEM_BYTES, TensorRef, name
from dlrover.checkpoint.machine.saves import SaveId, StepOrder
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.formats import OtherFormatError
from dlrover.checkpoint.storage.stored_step import StoredStep, StoredTensor, read_manifest
from dlrover.checkpoint.storage.stores import (
    BAD,
    IDENTITY,
    MANIFEST,
    TRACKER,
    StorageAwayError,
    Store,
    explained,
    open_store,
    shown,
    step_folder,
)
from dlrover.checkpoint.tools.verification import leaves, verify
from dlrover.errors import ConfigurationError, InfrastructureError

_ENTRY = re.compile(r"(\.?)step-(\d{1,19})(?!\d)(.*)")
Place = str | os.PathLike[str]
"""A path, or a URL that fsspec knows."""

StepState = Literal["complete", "damaged", "bad", "unfinished", "other version"]
"""State of a stored step. ``complete``: every file of the manifest is there with its size. ``damaged``: the
manifest or a file is missing or wrong. ``bad``: quarantined by a load. ``unfinished``: being written or deleted,
or left over from that. ``other version``: written in the format of another version of DLRover."""


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a stored step, from the names and sizes of its files."""

    step: int
    name: str
    """Name of the step's directory."""
    state: StepState
    latest: bool
    """True if this is the newest step ever stored."""
    time: float
    """Time at which the step was finished, or last changed, in seconds since the epoch."""
    ranks: int | None
    """Number of ranks that saved the step; None if the manifest cannot be read."""
    files: int
    nbytes: int
    save: SaveId | None
    """Save of the step; None if the manifest cannot be read."""


class TensorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a step, over all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    parts: int
    """Number of different parts that the ranks have saved; 1 if the tensor is not sharded."""
    nbytes: int
    """Bytes of the whole tensor."""
    differs: bool
    """True if ranks saved different content for the same part."""


class StepDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a stored step."""

    step: int
    ranks: int
    tensors: list[TensorSummary]
    values: list[str]
    """Names of the plain values."""
    elements: int
    """Number of elements of all tensors."""
    nbytes: int
    """Bytes of all tensors; each tied tensor counts."""
    stored_nbytes: int
    """Bytes of all files."""


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a pruning: the steps that were deleted, or would be in a dry run."""

    deleted: list[StepSummary]
    kept: list[int]
    newest_whole: int | None
    """Newest step verified as whole; None if nothing had to be deleted, so nothing was verified."""
    dry_run: bool


# ---- what is there


def check_directory(store: Store) -> None:
    """Refuse a place that is not a checkpoint directory.

    Raises:
        ConfigurationError: the place is not a checkpoint directory.
        InfrastructureError: the place cannot be read.
    """
    where = store.location
    with explained(f"{where} cannot be used"):
        if not store.is_there():
            raise ConfigurationError(f"{where} is no directory; name one that holds checkpoints.")
        if store.exists(MANIFEST):
            parent = where.rpartition("/")[0]
            raise ConfigurationError(
                f"{where} is one step; name the directory that it lies in: {parent}."
            )
        named = store.exists(IDENTITY) or store.exists(TRACKER)
    if not named and not list(_entries(store)):
        raise ConfigurationError(f"{where} is no checkpoint directory: it holds no step.")


def listing(place: Place) -> list[StepSummary]:
    """List all steps, newest first, including unusable ones.

    Raises:
        ConfigurationError: the place is not a checkpoint directory.
        InfrastructureError: the directory cannot be read.
    """
    store = open_store(place)
    check_directory(store)
    latest = None
    with contextlib.suppress(OtherFormatError):
        tracked = storage.tracked(store)
        latest = tracked.step if tracked is not None else None
    found = []
    for folder, step in _entries(store):
        with (
            explained(f"{store.where(folder)} cannot be used"),
            contextlib.suppress(FileNotFoundError),
        ):
            # Suppressed: a saver has just renamed it.
            found.append(_summary(store, folder, step, latest))
    found.sort(key=lambda item: (item.state == "complete", item.name))
    order = StepOrder(item.save for item in found if item.save is not None)
    return sorted(found, key=lambda item: order.key(item.step, item.save), reverse=True)


def chosen(place: Place, step: int | None) -> int:
    """Return ``step``, or the newest step if None.

    Raises:
        ConfigurationError: there is no such step, or the place is not a checkpoint directory.
    """
    check_directory(open_store(place))
    there = finished(place)
    if step is None and there:
        return there[0]
    if step not in there:
        accepted = ", ".join(map(str, there)) or "none"
        wanted = "no step" if step is None else f"no step {step}"
        where = open_store(place).location
        raise ConfigurationError(f"{where} holds {wanted}; there is: {accepted}.")
    return step


def finished(place: Place) -> list[int]:
    """Return the steps that have their final name, newest first, even if damaged."""
    store = open_store(place)
    if not store.renames:
        with explained(f"{store.location} cannot be used"):
            return storage.steps(store)
    there = [step for folder, step in _entries(store) if _is_final(folder, step)]
    with explained(f"{store.location} cannot be used"):
        known = storage.saves(store)
    order = StepOrder(save for save in known.values() if save is not None)
    return sorted(there, key=lambda step: order.key(step, known.get(step)), reverse=True)


def _is_final(name: str, step: int) -> bool:
    return name == step_folder(step)


def _entries(store: Store) -> Iterator[tuple[str, int]]:
    with explained(f"{store.location} cannot be used"):
        folders = store.folders()
    for folder in folders:
        match = _ENTRY.fullmatch(folder)
        if match:
            yield folder, int(match[2])


def _summary(store: Store, folder: str, step: int, latest: int | None) -> StepSummary:
    files = store.files(folder)
    ranks: int | None = None
    save: SaveId | None = None
    state: StepState = "damaged"
    try:
        manifest = read_manifest(store, folder)
    except OtherFormatError:
        state = "other version"
    except StorageAwayError:
        raise
    except InfrastructureError:
        pass
    else:
        ranks, save = manifest.world_size, manifest.save
        there = {file: known.nbytes for file, known in files.items()}
        if all(there.get(file) == record.nbytes for file, record in manifest.files.items()):
            state = "complete"
    final = _is_final(folder, step)
    if not final:
        state = "unfinished" if folder.startswith(".") else "bad"
    elif not store.renames and MANIFEST not in files:
        state = "bad" if BAD in files else "unfinished"
    timed = files.get(MANIFEST)
    return StepSummary(
        step=step,
        name=shown(folder),
        state=state,
        latest=final and step == latest,
        time=timed.modified if timed is not None else store.modified(folder),
        ranks=ranks,
        files=len(files),
        nbytes=sum(known.nbytes for known in files.values()),
        save=save,
    )


def describe(place: Place, step: int) -> StepDescription:
    """Describe a step from its indices, without reading the tensors.

    Raises:
        InfrastructureError: an index is missing or damaged.
    """
    store = open_store(place)
    with (
        explained(f"{store.location} cannot be used"),
        StoredStep(store, step_folder(step)) as stored,
    ):
        ranks = stored.manifest.world_size
        tensors: dict[layouts.Path, list[StoredTensor]] = {}
        values: dict[str, None] = {}
        for rank in range(ranks):
            index = stored.index(rank)
            for tensor in index.tensors:
                tensors.setdefault(tensor.path, []).append(tensor)
            for at, value in leaves(layouts.decode(index.skeleton)):
                if not isinstance(value, TensorRef):
                    values[name(at)] = None
        described = [_described(found) for found in tensors.values()]
        return StepDescription(
            step=step,
            ranks=ranks,
            tensors=described,
            values=list(values),
            elements=sum(item.nbytes // ITEM_BYTES[item.dtype] for item in described),
            nbytes=sum(item.nbytes for item in described),
            stored_nbytes=_summary(store, step_folder(step), step, None).nbytes,
        )


def _described(found: list[StoredTensor]) -> TensorSummary:
    first = found[0]
    whole = extent.entire(first.extent.whole)
    contents = {(tensor.extent, tensor.dtype, tensor.xxh3) for tensor in found}
    extents = {tensor.extent for tensor in found}
    return TensorSummary(
        name=name(first.path),
        dtype=first.dtype,
        shape=whole.shape,
        parts=len({box for box in extents if box.whole == whole.whole}),
        nbytes=whole.elements * ITEM_BYTES[first.dtype],
        differs=len(contents) > len(extents) or any(box.whole != whole.whole for box in extents),
    )


# ---- prune


def prune(place: Place, keep: int, *, dry_run: bool = False) -> Pruning:
    """Delete all but the newest ``keep`` steps, but never the newest whole one.

    To find that step, steps are verified from the newest on, until one is whole. Steps that are not
    ``complete`` stay.

    Raises:
        ConfigurationError: ``keep`` is less than 1, or the place is not a checkpoint directory.
        InfrastructureError: no step is whole, or a step cannot be deleted.
    """
    if keep < 1:
        raise ConfigurationError(f"--keep is {keep}; at least 1 step must be kept.")
    store = open_store(place)
    known = {item.step: item for item in listing(place) if item.state == "complete"}
    if len(known) <= keep:
        return Pruning(deleted=[], kept=list(known), newest_whole=None, dry_run=dry_run)
    whole = next((step for step in known if verify(place, step).whole), None)
    if whole is None:
        raise InfrastructureError(f"No step in {store.location} is whole; none is deleted.")
    doomed = [step for step in list(known)[keep:] if step != whole]
    for step in doomed if not dry_run else ():
        _delete(store, step)
    return Pruning(
        deleted=[known[step] for step in doomed],
        kept=[step for step in known if step not in doomed],
        newest_whole=whole,
        dry_run=dry_run,
    )


def _delete(store: Store, step: int) -> None:
    where = store.where(step_folder(step))
    with (
        explained(f"{where} cannot be used"),
        contextlib.suppress(FileNotFoundError),
    ):  # a saver deleted it first
        store.remove_step(step)
