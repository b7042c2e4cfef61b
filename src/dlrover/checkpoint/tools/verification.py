"""Verification of a stored step: every file and every checksum, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec
import xxhash

from dlrover.checkpoint.machine import extent, layout as layouts
from dlrover.checkpoint.machine.extent import Extent, cover
from dlrover.checkpoint.machine.layout import TensorRef, name
from dlrover.checkpoint.storage.stored_step import (
    FileRecord,
    RankIndex,
    StoredStep,
    StoredTensor,
    index_file,
)
from dlrover.checkpoint.storage.stores import (
    MANIFEST,
    StorageAwayError,
    Store,
    explained,
    is_damage,
    join,
    open_store,
    shown,
    step_folder,
)
from dlrover.errors import InfrastructureError

READ = 1 << 22
"""Bytes read at a time."""


class Problem(msgspec.Struct, frozen=True):
    """A problem of a stored step."""

    file: str
    tensor: str
    """Name of the tensor; empty if the problem concerns no single tensor."""
    problem: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading a whole step."""

    step: int
    name: str
    """Name of the step's directory."""
    whole: bool
    files: int
    """Number of files of the step, including the manifest."""
    nbytes: int
    problems: list[Problem]
    unknown: list[str]
    """Files that do not belong to the step; they are harmless."""


def verify(place: str | os.PathLike[str], step: int) -> Verification:
    """Read all of a step and compare it with every checksum; change nothing.

    Raises:
        InfrastructureError: the step cannot be read now.
    """
    store = open_store(place)
    with explained(f"{store.location} cannot be used"):
        return _Check(store, step).run()


class _Check:
    """A single verification."""

    def __init__(self, store: Store, step: int) -> None:
        self._store = store
        self._folder = step_folder(step)
        self._step = step
        self._problems: dict[Problem, None] = {}
        self._files: Mapping[str, FileRecord] = {}
        self._nbytes = 0

    def run(self) -> Verification:
        """Check the whole step."""
        there = self._store.files(self._folder)
        try:
            with StoredStep(self._store, self._folder) as stored:
                self._nbytes += there[MANIFEST].nbytes
                self._files = stored.manifest.files
                if stored.manifest.step != self._step:
                    self._add(MANIFEST, "", f"is that of step {stored.manifest.step}")
                indices = list(self._indices(stored))
        except StorageAwayError:
            raise
        except InfrastructureError as error:
            self._add(MANIFEST, "", str(error))
        else:
            self._check_files(indices)
            if len(indices) == stored.manifest.world_size:
                self._check_cover(indices)
        others = there.keys() - self._files.keys() - {MANIFEST}
        return Verification(
            step=self._step,
            name=self._folder,
            whole=not self._problems,
            files=len(self._files) + 1 if self._files else 0,
            nbytes=self._nbytes,
            problems=list(self._problems),
            unknown=sorted(map(shown, others)) if self._files else [],
        )

    def _add(self, file: str, tensor: str, problem: str) -> None:
        self._problems[Problem(file, tensor, problem)] = None  # only once if ranks share a tensor

    def _indices(self, stored: StoredStep) -> Iterator[RankIndex]:
        """Yield the readable indices; note the problems of the others."""
        for rank in range(stored.manifest.world_size):
            file = index_file(rank, stored.manifest.place)
            try:
                index = stored.index(rank)
                refs = [item for _, item in leaves(layouts.decode(index.skeleton))]
            except StorageAwayError:
                raise
            except InfrastructureError as error:
                self._add(file, "", str(error))
                continue
            known = range(len(index.tensors))
            if any(isinstance(item, TensorRef) and item.index not in known for item in refs):
                self._add(file, "", "names a tensor that it does not have")
            yield index

    def _check_files(self, indices: list[RankIndex]) -> None:
        """Check every byte of every file, and every tensor in it."""
        tensors: dict[str, list[StoredTensor]] = {file: [] for file in self._files}
        for index in indices:
            for tensor in index.tensors:
                if tensor.file in tensors:
                    tensors[tensor.file].append(tensor)
                else:
                    self._add(
                        tensor.file, name(tensor.path), "is in a file that is not of the step"
                    )
        for file, record in self._files.items():
            self._check_file(file, record, tensors[file])

    def _check_file(self, file: str, record: FileRecord, tensors: list[StoredTensor]) -> None:
        ranges = {(tensor.offset, tensor.nbytes) for tensor in tensors if tensor.nbytes}
        try:
            with self._store.open(join(self._folder, file)) as content:
                size, checksum, sums = _sums(content, sorted(ranges))
        except OSError as error:
            if not is_damage(error):
                raise
            self._add(file, "", f"cannot be read: {error.strerror}")
            for tensor in tensors:
                self._add(file, name(tensor.path), "is lost with its file")
            return
        self._nbytes += size
        for tensor in tensors:
            if tensor.nbytes and sums.get((tensor.offset, tensor.nbytes)) != tensor.xxh3:
                self._add(file, name(tensor.path), "its bytes differ from their checksum")
        if size != record.nbytes:
            self._add(file, "", f"has {size} bytes, not {record.nbytes}")
        elif checksum != record.xxh3_64 and all(known.file != file for known in self._problems):
            self._add(file, "", "differs from its checksum")

    def _check_cover(self, indices: list[RankIndex]) -> None:
        """Check that the parts of each sharded tensor cover it."""
        found: dict[tuple[layouts.Path, str, tuple[int, ...]], list[Extent]] = {}
        for index in indices:
            for tensor in index.tensors:
                if tensor.part is not None:
                    key = (tensor.path, tensor.dtype, tensor.part.whole)
                    found.setdefault(key, []).append(tensor.extent)
        for (path, _, whole), extents in found.items():
            try:
                cover("it", extent.entire(whole), [(box, None) for box in extents])
            except InfrastructureError as error:  # noqa: PERF203 - report all
                self._add(MANIFEST, name(path), str(error).removesuffix("."))


def _sums(
    file: BinaryIO, ranges: list[tuple[int, int]]
) -> tuple[int, str, dict[tuple[int, int], int]]:
    """Return size and checksum of a file, and the checksums of the ranges in it, from one pass.

    ``ranges`` are offsets and lengths, in order. If two overlap, only the first gets a checksum.
    """
    whole = xxhash.xxh3_64()
    found: dict[tuple[int, int], int] = {}
    at = 0
    for offset, length in ranges:
        if offset < at:
            continue
        at += _feed(file, offset - at, whole)
        own = xxhash.xxh3_64()
        got = _feed(file, length, whole, own)
        at += got
        if got == length:
            found[offset, length] = own.intdigest()
    while got := _feed(file, READ, whole):
        at += got
    return at, whole.hexdigest(), found


def _feed(file: BinaryIO, length: int, *hashes: xxhash.xxh3_64) -> int:
    """Read up to ``length`` bytes and feed them to the hashes; return the number of bytes read."""
    left = length
    while left and (data := file.read(min(left, READ))):
        for one in hashes:
            one.update(data)
        left -= len(data)
    return length - left


def leaves(tree: Any, path: layouts.Path = ()) -> Iterator[tuple[layouts.Path, Any]]:
    """Yield the tensors and plain values of a tree with their paths; a list of scalars is one value."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, (*path, key))
    elif isinstance(tree, list | tuple) and any(
        isinstance(item, TensorRef | dict | list | tuple) for item in tree
    ):
        for index, item in enumerate(tree):
            yield from leaves(item, (*path, index))
    else:
        yield path, tree
