"""Stored steps seen from outside of a training: listed, described, deleted. Without torch."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dlrover.checkpoint import extent, layout as layouts, storage
from dlrover.checkpoint.layout import ITEM_BYTES, TensorRef, name
from dlrover.checkpoint.storage import StoredStep, StoredTensor
from dlrover.checkpoint.verification import leaves, verify
from dlrover.errors import ConfigurationError, InfrastructureError

_ENTRY = re.compile(r"(\.?)step-(\d+)(.*)")

StepState = Literal["complete", "damaged", "bad", "unfinished"]
"""``complete``: every file of the manifest is there with its size. ``damaged``: not so. ``bad``: put aside by
a load. ``unfinished``: being written or deleted, or left over from that."""


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the names and sizes of a step's files tells."""

    step: int
    name: str
    """Of its directory."""
    state: StepState
    latest: bool
    """Whether it is the newest one that was ever stored."""
    time: float
    """When it was finished, or changed last: seconds since the epoch."""
    ranks: int | None
    """How many saved it; None if the manifest cannot be read."""
    files: int
    nbytes: int


class TensorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a step, over all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    parts: int
    """Different parts that the ranks have saved; 1 for one that is not sharded."""
    nbytes: int
    """Of the whole tensor."""
    differs: bool
    """Whether ranks saved other content for it."""


class StepDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a step holds."""

    step: int
    ranks: int
    tensors: list[TensorSummary]
    values: list[str]
    """Names of the plain values."""
    elements: int
    """Of all tensors."""
    nbytes: int
    """Of all tensors; tied ones count each."""
    stored_nbytes: int
    """Of all files."""


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted, or would be."""

    deleted: list[StepSummary]
    kept: list[int]
    newest_whole: int | None
    """None if nothing had to be deleted: then nothing was verified."""
    dry_run: bool


# ---- what is there


def check_directory(directory: Path) -> None:
    """Refuse what is no checkpoint directory.

    Raises:
        ConfigurationError: it is none.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is no directory; name one that holds checkpoints.")
    if (directory / storage.MANIFEST).is_file():
        raise ConfigurationError(
            f"{directory} is one step; name the directory that it lies in: {directory.parent}."
        )
    names = (storage.IDENTITY, storage.TRACKER)
    if not any((directory / own).is_file() for own in names) and not list(_entries(directory)):
        raise ConfigurationError(f"{directory} is no checkpoint directory: it holds no step.")


def listing(directory: Path) -> list[StepSummary]:
    """All steps, the newest first; also those that cannot be used.

    Raises:
        ConfigurationError: it is no checkpoint directory.
        InfrastructureError: it cannot be read.
    """
    check_directory(directory)
    latest = storage.tracked(directory)
    found = []
    for path, step in _entries(directory):
        with _told(path), contextlib.suppress(FileNotFoundError):  # a saver has just renamed it
            found.append(_summary(path, step, latest))
    return sorted(found, key=lambda item: (-item.step, item.state != "complete", item.name))


def chosen(directory: Path, step: int | None) -> int:
    """The step that a user means: ``step``, or the newest one.

    Raises:
        ConfigurationError: there is no such step, or it is no checkpoint directory.
    """
    check_directory(directory)
    there = finished(directory)
    if step is None and there:
        return there[0]
    if step not in there:
        accepted = ", ".join(map(str, there)) or "none"
        wanted = "no step" if step is None else f"no step {step}"
        raise ConfigurationError(f"{directory} holds {wanted}; there is: {accepted}.")
    return step


def finished(directory: Path) -> list[int]:
    """The steps that have their final name, newest first, whether or not they are whole."""
    found = [step for path, step in _entries(directory) if _is_final(path, step)]
    return sorted(found, reverse=True)


def _is_final(path: Path, step: int) -> bool:
    return path == storage.step_directory(path.parent, step)


def _entries(directory: Path) -> Iterator[tuple[Path, int]]:
    with _told(directory):
        paths = list(directory.iterdir())
    for path in paths:
        match = _ENTRY.fullmatch(path.name)
        if match and path.is_dir():
            yield path, int(match[2])


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise what the system says about a path as an error with a sentence."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be used: {error.strerror}.") from error


def _summary(path: Path, step: int, latest: int | None) -> StepSummary:
    sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    final = _is_final(path, step)
    timed = path / storage.MANIFEST if storage.MANIFEST in sizes else path
    ranks: int | None = None
    state: StepState = "damaged"
    try:
        manifest = storage.read_manifest(path)
    except InfrastructureError:
        pass
    else:
        ranks = manifest.world_size
        if all(sizes.get(file) == record.nbytes for file, record in manifest.files.items()):
            state = "complete"
    if not final:
        state = "unfinished" if path.name.startswith(".") else "bad"
    return StepSummary(
        step=step,
        name=path.name,
        state=state,
        latest=final and step == latest,
        time=timed.stat().st_mtime,
        ranks=ranks,
        files=len(sizes),
        nbytes=sum(sizes.values()),
    )


def describe(directory: Path, step: int) -> StepDescription:
    """What a step holds, from its indices; the tensors are not read.

    Raises:
        InfrastructureError: an index is missing or damaged.
    """
    path = storage.step_directory(directory, step)
    with StoredStep(path) as stored:
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
            stored_nbytes=_summary(path, step, None).nbytes,
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


def prune(directory: Path, keep: int, *, dry_run: bool = False) -> Pruning:
    """Delete all but the newest ``keep`` steps, but never the newest one that is whole.

    To know that one, steps are verified, from the newest on, until one is whole. What is ``bad``,
    ``damaged`` or ``unfinished`` stays.

    Raises:
        ConfigurationError: ``keep`` is less than 1, or it is no checkpoint directory.
        InfrastructureError: no step is whole, or one cannot be deleted.
    """
    if keep < 1:
        raise ConfigurationError(f"--keep is {keep}; at least 1 step must be kept.")
    known = {item.step: item for item in listing(directory) if item.state == "complete"}
    if len(known) <= keep:
        return Pruning(deleted=[], kept=list(known), newest_whole=None, dry_run=dry_run)
    whole = next((step for step in known if verify(directory, step).whole), None)
    if whole is None:
        raise InfrastructureError(f"No step in {directory} is whole; none is deleted.")
    doomed = [step for step in list(known)[keep:] if step != whole]
    for step in doomed if not dry_run else ():
        _delete(directory, step)
    return Pruning(
        deleted=[known[step] for step in doomed],
        kept=[step for step in known if step not in doomed],
        newest_whole=whole,
        dry_run=dry_run,
    )


def _delete(directory: Path, step: int) -> None:
    hidden = directory / f".step-{step}.{secrets.token_hex(8)}"
    path = storage.step_directory(directory, step)
    with _told(path), contextlib.suppress(FileNotFoundError):  # a saver was faster
        path.rename(hidden)
        shutil.rmtree(hidden)
