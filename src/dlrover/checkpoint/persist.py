"""From memory to storage: one step of all ranks, as a directory that DCP reads.

The saver of each node writes its ranks' files into a directory with a temporary name. A tensor, or part
of one, that a lower rank has too is not written again. The saver of rank 0 waits for all ranks' indices,
adds DCP's metadata and the manifest, and gives the directory its name.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import xxhash

from dlrover.checkpoint import faults, storage, torchfile
from dlrover.checkpoint.layout import ALIGNMENT, Layout, TensorEntry
from dlrover.checkpoint.storage import FileRecord, Manifest, RankIndex, StoredTensor
from dlrover.errors import InfrastructureError

if TYPE_CHECKING:
    from typing_extensions import Self


POLL = 0.02
"""Seconds between two looks for what other savers write."""
WRITERS = 4
"""Ranks whose files are written at once."""
BUFFER = 1 << 20
"""Bytes of small writes that are collected."""
_Value = TypeVar("_Value")


class TensorBytes(Protocol):
    """What holds the tensors of a layout: a `Generation`, for one."""

    def tensor_bytes(self, entry: TensorEntry) -> memoryview:
        """The bytes of one of them."""


@dataclass(frozen=True)
class Source:
    """One rank's part of the step."""

    generation: TensorBytes
    layout: Layout
    sums: list[int]


@dataclass(frozen=True)
class Job:
    """One step to persist."""

    directory: Path
    step: int
    session: int
    world_size: int
    sources: Mapping[int, Source]
    """By rank: those of this node."""
    pause: Callable[[float], None]
    """Waits so many seconds; raises when the job is to be given up."""
    patience: float
    """Seconds to wait for other nodes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the training measured at this step; those of rank 0's node count."""
    identity: str = ""
    """The directory's; empty: it is not checked."""


def persist(job: Job) -> None:
    """Write the step and return when it is durable, on all nodes.

    Raises:
        OSError: the storage failed; it can be tried again.
        InfrastructureError: another node did not write its part in time.
    """
    faults.point("persist.begun")
    if job.identity:
        storage.check_identity(job.directory, job.identity)
    if 0 in job.sources:
        storage.remove_given_up(job.directory, job.step, job.session)
    target = storage.unfinished(job.directory, job.step, job.session)
    target.mkdir(exist_ok=True)
    with ThreadPoolExecutor(WRITERS) as pool:  # in order: a rank waits for lower ones only
        for written in [pool.submit(_write_rank, job, target, r) for r in sorted(job.sources)]:
            written.result()
    storage.sync_directory(target)
    faults.point("persist.written")
    if 0 in job.sources:
        _finish(job, target)
    else:
        _await(job, lambda: _is_stored(job, target), "the other nodes' parts")


def _write_rank(job: Job, target: Path, rank: int) -> None:
    source = job.sources[rank]
    elsewhere = _written_by_others(job, target, rank)
    written: dict[tuple[int, int], StoredTensor] = {}
    name = f"__{rank}_0.distcp"
    tensors: list[StoredTensor] = []
    with _File(target / name) as file:
        for entry, checksum in zip(source.layout.entries, source.sums, strict=True):
            wanted = (entry.path, entry.dtype, entry.extent, checksum)
            known = elsewhere.get(wanted) or written.get((entry.offset, entry.nbytes))
            if known is None:
                data = source.generation.tensor_bytes(entry)
                head, tail = torchfile.wrap(entry.dtype, entry.shape, data, file.size, ALIGNMENT)
                start = file.size
                known = StoredTensor(
                    entry.path, entry.dtype, entry.shape, name, start + len(head), entry.nbytes, checksum,
                    (start, len(head) + len(data) + len(tail)), entry.part,
                )  # fmt: skip
                for part in (head, data, tail):
                    file.write(part)
                if entry.nbytes:  # tied tensors lie at the same place
                    written[entry.offset, entry.nbytes] = known
            tensors.append(msgspec.structs.replace(known, path=entry.path, part=entry.part))
    files = {name: file.record()}
    if not file.size:
        (target / name).unlink()
        files = {}
    index = RankIndex(rank, job.step, source.layout.skeleton, tuple(tensors), files)
    _write_durably(target / storage.index_file(rank), msgspec.msgpack.encode(index))


def _written_by_others(job: Job, target: Path, rank: int) -> dict[tuple[object, ...], StoredTensor]:
    """What lower ranks write that this rank may have too."""
    entries = job.sources[rank].layout.entries
    owners = {entry.part.owner if entry.part is not None else 0 for entry in entries}
    return {
        (tensor.path, tensor.dtype, tensor.extent, tensor.xxh3): tensor
        for owner in sorted(owners)
        if 0 <= owner < rank
        for tensor in _await_index(job, target, owner).tensors
    }


def _finish(job: Job, target: Path) -> None:
    indices = [_await_index(job, target, rank) for rank in range(job.world_size)]
    files = _write_metadata(job, target, indices)
    for index in indices:
        name = storage.index_file(index.rank)
        files[name] = storage.record_of((target / name).read_bytes())
        files.update(index.files)
    own = {f"__{index.rank}_0.distcp" for index in indices[1:]}
    manifest = Manifest(
        format=storage.FORMAT,
        step=job.step,
        world_size=job.world_size,
        replicated=not own & files.keys(),
        files=files,
        metrics=dict(job.metrics),
    )
    faults.point("persist.manifest")
    _write_durably(target / storage.MANIFEST, msgspec.json.encode(manifest))
    storage.sync_directory(target)
    _rename(job, target)
    faults.point("persist.renamed")
    storage.track(job.directory, job.step)
    faults.point("persist.tracked")


def _write_metadata(job: Job, target: Path, indices: Sequence[RankIndex]) -> dict[str, FileRecord]:
    """DCP's metadata, and the plain values of rank 0."""
    dcp: Any = importlib.import_module("dlrover.checkpoint.dcp")  # torch, only when it is needed
    source = job.sources[0]

    def tensor(number: int) -> tuple[StoredTensor, memoryview]:
        entry = source.layout.entries[number]
        return indices[0].tensors[number], source.generation.tensor_bytes(entry)

    name = "__0_1.distcp"
    objects = {}
    with _File(target / name) as file:
        for leaf in dcp.leaves(indices[0].skeleton):
            if not isinstance(leaf.value, dcp.TensorRef):
                data = dcp.encode_object(leaf.value, tensor)
                objects[leaf.name] = dcp.Item(name, file.size, len(data))
                file.write(data)
    metadata = dcp.metadata([(index.skeleton, index.tensors) for index in indices], objects)
    _write_durably(target / ".metadata", metadata)
    return {name: file.record(), ".metadata": storage.record_of(metadata)}


def _rename(job: Job, target: Path) -> None:
    """Give the finished directory its name; a step of that name is replaced."""
    final = storage.step_directory(job.directory, job.step)
    old = None
    if final.exists():
        old = target.with_name(target.name + ".replaced")
        final.rename(old)
    target.rename(final)
    storage.sync_directory(job.directory)
    if old is not None:
        shutil.rmtree(old)


def _await_index(job: Job, target: Path, rank: int) -> RankIndex:
    return _await(job, lambda: _finished_index(job, target, rank), f"rank {rank}'s index")


def _finished_index(job: Job, target: Path, rank: int) -> RankIndex | None:
    try:
        data = (target / storage.index_file(rank)).read_bytes()
        index = msgspec.msgpack.decode(data, type=RankIndex)
    except (FileNotFoundError, msgspec.DecodeError):
        return None  # not there yet
    return index if index.step == job.step else None


def _is_stored(job: Job, target: Path) -> bool | None:
    final = storage.step_directory(job.directory, job.step)
    return True if not target.exists() and final.exists() else None


def _await(job: Job, condition: Callable[[], _Value | None], what: str) -> _Value:
    waited = 0.0
    while (value := condition()) is None:
        if waited >= job.patience:
            raise InfrastructureError(
                f"Step {job.step} was not stored: {what} did not come within {job.patience:g} s."
            )
        job.pause(POLL)
        waited += POLL
    return value


# ---- files


class _File:
    """A file that is hashed while it is written, and durable at the end of its ``with`` block."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=BUFFER)
        self._hash = xxhash.xxh3_64()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def record(self) -> FileRecord:
        return FileRecord(self.size, self._hash.hexdigest())


def _write_durably(path: Path, data: bytes) -> None:
    """Write under another name first: a name that others wait for has all of its content."""
    temporary = path.with_name(path.name + ".part")
    with _File(temporary) as file:
        file.write(data)
    temporary.rename(path)
