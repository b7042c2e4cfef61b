"""From memory to storage: one step of all ranks, as a directory that DCP reads.

The saver of each node writes its ranks' files where they do not count yet. A tensor, or part of one, that
a lower rank has too is not written again. The saver of rank 0 waits for all ranks' indices, adds DCP's
metadata and the manifest, and makes the step count.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec
import xxhash

from dlrover.checkpoint import faults, storage, torchfile
from dlrover.checkpoint.layout import ALIGNMENT, Layout, TensorEntry
from dlrover.checkpoint.storage import FileRecord, Manifest, RankIndex, StoredTensor
from dlrover.checkpoint.stores import DCP_METADATA, MANIFEST, Draft, Store, Writer, join
from dlrover.errors import InfrastructureError

RETRY_DELAYS = (0.5, 2.0, 8.0)
"""Seconds to wait before a failed storage is tried again."""
PEER_PATIENCE = 600.0
"""Seconds that the nodes of a world may differ in storing their parts of a step."""
CHUNK = 4 << 20
"""Bytes that are hashed and written at a time."""
WRITERS = 4
"""Ranks whose files are written at once."""
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

    store: Store
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
        storage.check_identity(job.store, job.identity)
    if 0 in job.sources:
        storage.remove_given_up(job.store, job.session, before=job.step)
    draft = job.store.draft(job.step, job.session)
    _write_ranks(job, draft)
    job.store.sync(draft.top)
    faults.point("persist.written")
    if 0 in job.sources:
        _finish(job, draft)
    else:
        _await(job, draft, lambda: job.store.is_published(draft) or None, "the other nodes' parts")


def _write_ranks(job: Job, draft: Draft) -> None:
    """Write the parts of this node's ranks. Where one cannot be written, nobody waits for it."""
    failed = threading.Event()

    def pause(seconds: float) -> None:
        if failed.is_set():
            raise InfrastructureError(f"Another rank's part of step {job.step} cannot be written.")
        job.pause(seconds)

    waiting = replace(job, pause=pause)
    with ThreadPoolExecutor(WRITERS) as pool:  # in order: a rank waits for lower ones only
        parts = [pool.submit(_write_rank, waiting, draft, rank) for rank in sorted(job.sources)]
        done, _ = wait(parts, return_when=FIRST_EXCEPTION)
        failed.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for part in done:
            part.result()


def _write_rank(job: Job, draft: Draft, rank: int) -> None:
    source = job.sources[rank]
    elsewhere = _written_by_others(job, draft, rank)
    written: dict[tuple[int, int], StoredTensor] = {}
    plain = f"__{rank}_0.distcp"
    name = draft.named(plain)
    tensors: list[StoredTensor] = []
    with job.store.create(draft.path(plain)) as opened:
        file = _File(opened)
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
        job.store.delete(draft.path(plain))
        files = {}
    index = RankIndex(rank, job.step, source.layout.skeleton, tuple(tensors), files)
    job.store.write(draft.path(storage.index_file(rank)), msgspec.msgpack.encode(index))


def _written_by_others(job: Job, draft: Draft, rank: int) -> dict[tuple[object, ...], StoredTensor]:
    """What lower ranks write that this rank may have too."""
    entries = job.sources[rank].layout.entries
    owners = {entry.part.owner if entry.part is not None else 0 for entry in entries}
    return {
        (tensor.path, tensor.dtype, tensor.extent, tensor.xxh3): tensor
        for owner in sorted(owners)
        if 0 <= owner < rank
        for tensor in _await_index(job, draft, owner).tensors
    }


def _finish(job: Job, draft: Draft) -> None:
    indices = [_await_index(job, draft, rank) for rank in range(job.world_size)]
    files = _write_metadata(job, draft, indices)
    for index in indices:
        name = storage.index_file(index.rank)
        files[draft.named(name)] = storage.record_of(job.store.read(draft.path(name)))
        files.update(index.files)
    own = {draft.named(f"__{index.rank}_0.distcp") for index in indices[1:]}
    manifest = Manifest(
        format=storage.FORMAT,
        step=job.step,
        world_size=job.world_size,
        replicated=not own & files.keys(),
        files=files,
        metrics=dict(job.metrics),
        place=draft.place,
    )
    faults.point("persist.manifest")
    job.store.write(join(draft.top, MANIFEST), msgspec.json.encode(manifest))
    job.store.publish(draft)
    faults.point("persist.renamed")
    storage.track(job.store, job.step)
    faults.point("persist.tracked")


def _write_metadata(job: Job, draft: Draft, indices: Sequence[RankIndex]) -> dict[str, FileRecord]:
    """DCP's metadata, and the plain values of rank 0."""
    dcp: Any = importlib.import_module("dlrover.checkpoint.dcp")  # torch, only when it is needed
    source = job.sources[0]

    def tensor(number: int) -> tuple[StoredTensor, memoryview]:
        entry = source.layout.entries[number]
        return indices[0].tensors[number], source.generation.tensor_bytes(entry)

    plain = "__0_1.distcp"
    name = draft.named(plain)
    objects = {}
    with job.store.create(draft.path(plain)) as opened:
        file = _File(opened)
        for leaf in dcp.leaves(indices[0].skeleton):
            if not isinstance(leaf.value, dcp.TensorRef):
                data = dcp.encode_object(leaf.value, tensor)
                objects[leaf.name] = dcp.Item(name, file.size, len(data))
                file.write(data)
    metadata = dcp.metadata([(index.skeleton, index.tensors) for index in indices], objects)
    job.store.write(join(draft.top, DCP_METADATA), metadata)
    return {name: file.record(), DCP_METADATA: storage.record_of(metadata)}


def _await_index(job: Job, draft: Draft, rank: int) -> RankIndex:
    return _await(job, draft, lambda: _finished_index(job, draft, rank), f"rank {rank}'s index")


def _finished_index(job: Job, draft: Draft, rank: int) -> RankIndex | None:
    try:
        data = job.store.read(draft.path(storage.index_file(rank)))
        index = msgspec.msgpack.decode(data, type=RankIndex)
    except (FileNotFoundError, msgspec.DecodeError):
        return None  # not there yet
    return index if index.step == job.step else None


def _await(job: Job, draft: Draft, condition: Callable[[], _Value | None], what: str) -> _Value:
    waited = 0.0
    while True:
        given_up = job.store.is_given_up(draft)  # first: what was published looks like that, too
        if (value := condition()) is not None:
            return value
        if given_up:
            raise InfrastructureError(f"Step {job.step} was not stored: another node gave it up.")
        if waited >= job.patience:
            raise InfrastructureError(
                f"Step {job.step} was not stored: {what} did not come within {job.patience:g} s."
            )
        job.pause(job.store.poll)
        waited += job.store.poll


class _File:
    """A file that is hashed while it is written."""

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self._hash.update(chunk)
            self._file.write(chunk)
        self.size += len(data)

    def record(self) -> FileRecord:
        return FileRecord(self.size, self._hash.hexdigest())
