"""Persist one step of all ranks, from memory to storage, as a directory that DCP reads.

The saver of each node writes its ranks' files to a draft, which does not count as a step yet. A tensor, or
a part of one, that a lower rank also has is not written again. The saver of rank 0 waits for all ranks'
indices, adds DCP's metadata and the manifest, and publishes the step.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import xxhash

from dlrover._util import decoding
from dlrover.checkpoint.collection import no_collection
from dlrover.checkpoint.machine.layout import Layout, TensorEntry, TensorRef
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import dcp, faults, formats, storage
from dlrover.checkpoint.storage.formats import OtherFormatError
from dlrover.checkpoint.storage.stored_step import (
    FileRecord,
    Manifest,
    RankIndex,
    StoredTensor,
    index_file,
    record_of,
)
from dlrover.checkpoint.storage.stores import (
    DCP_METADATA,
    MANIFEST,
    Draft,
    Store,
    StoreWriter,
    join,
    reason,
)
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

RETRY_DELAYS = (0.5, 2.0, 8.0)
"""Seconds to wait before each retry of a failed storage."""
PEER_PATIENCE = 600.0
"""Seconds that the nodes of a world wait for each other's parts of a step."""
SAY_EVERY = 30.0
"""Seconds between two log lines about a wait."""
CHUNK = 4 << 20
"""Bytes hashed and written at a time."""
WRITERS = 4
"""Number of ranks whose files are written at once."""
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RankPart:
    """One rank's part of the step."""

    read: Callable[[TensorEntry], memoryview]
    """Returns the bytes of one tensor."""
    layout: Layout
    sums: list[int]


@dataclass(frozen=True)
class PersistJob:
    """One save to persist."""

    store: Store
    save: SaveId
    world_size: int
    sources: Mapping[int, RankPart]
    """This node's parts of the step, by rank."""
    pause: Callable[[float], object]
    """Waits the given number of seconds; raises when the job must be given up."""
    patience: float
    """Seconds to wait for other nodes before giving up."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the training measured at this step; those of rank 0's node count."""
    guard: Callable[[], None] = lambda: None
    """Raises when this world must not publish anything in the directory."""
    mark: str = storage.GIVEN_UP
    """Mark file of this attempt, if it is given up; the training's own one is not made again after another."""

    @property
    def step(self) -> int:
        """The saved step."""
        return self.save.step


def persist(job: PersistJob) -> None:
    """Write the save and return when it is durable, on all nodes.

    Raises:
        OSError: the storage failed; the call can be retried.
        InfrastructureError: another node did not write its part, or a newer save of the step is stored.
    """
    with no_collection():
        _persist(job)


def _persist(job: PersistJob) -> None:
    faults.point("persist.begun")
    job.guard()
    if 0 in job.sources:
        storage.remove_given_up(job.store, job.save.session, before=job.save.number)
    if not _is_stored(job):  # else an earlier attempt published it and failed afterwards
        draft = job.store.draft(job.save, publisher=0 in job.sources)
        _refuse_given_up(job, draft)
        _write_ranks(job, draft)
        # The publisher may have taken the last index already, or another node may have given the save up.
        gone = () if 0 in job.sources else (FileNotFoundError,)
        with contextlib.suppress(*gone):
            job.store.sync(draft.top)
        faults.point("persist.written")
        if 0 in job.sources:
            _finish(job, draft)
        else:
            _await(job, draft, lambda: _is_stored(job) or None, "the other nodes' parts")
    if 0 in job.sources:
        storage.track(job.store, job.save)
        faults.point("persist.tracked")


def retry(
    step: int,
    where: str,
    attempt: Callable[[], None],
    pause: Callable[[float], bool],
    free_space: Callable[[], None] = lambda: None,
) -> str:
    """Attempt to store a step, again after each failure of the storage ``where``; return the problem.

    The problem is one sentence, or an empty text if the step is stored. ``pause`` waits, and returns True if
    a newer step needs the memory; ``free_space`` is called when the storage is full.
    """
    problem = ""
    for delay in (0.0, *RETRY_DELAYS):
        try:
            if problem:
                logger.warning("Retrying in %g s: %s", delay, problem)
                if pause(delay):
                    return f"{problem} It was given up for a newer step."
            attempt()
        except OSError as error:  # noqa: PERF203 - that is what the loop is for
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free_space()
            problem = f"Step {step} was not stored in {where}: {reason(error)}."
        except InfrastructureError as error:
            return str(error)
        else:
            return ""
    return problem


def _is_stored(job: PersistJob) -> bool:
    try:
        return storage.is_published(job.store, job.save)
    except OtherFormatError as error:
        raise InfrastructureError(f"Step {job.step} was not stored: {error}") from error


def _refuse_older(job: PersistJob) -> None:
    """Refuse to replace a stored step by an older save of it."""
    known = storage.save_of(job.store, job.step)
    if known is not None and known > job.save:
        raise InfrastructureError(f"Step {job.step} was not stored: a newer save of it is.")


def _refuse_given_up(job: PersistJob, draft: Draft) -> None:
    """Refuse to continue a save that another of its writers has given up."""
    if storage.is_given_up(job.store, draft, job.mark):
        raise InfrastructureError(f"Step {job.step} was not stored: another node gave it up.")


def _write_ranks(job: PersistJob, draft: Draft) -> None:
    """Write the parts of this node's ranks. If one fails, the others stop waiting for it."""
    failed = threading.Event()

    def pause(seconds: float) -> None:
        if failed.is_set():
            raise InfrastructureError(f"Another rank's part of step {job.step} cannot be written.")
        job.pause(seconds)

    waiting = replace(job, pause=pause)
    with ThreadPoolExecutor(WRITERS) as pool:  # in order: a rank waits only for lower ones
        parts = [pool.submit(_write_rank, waiting, draft, rank) for rank in sorted(job.sources)]
        done, _ = wait(parts, return_when=FIRST_EXCEPTION)
        failed.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for part in done:
            part.result()


def _write_rank(job: PersistJob, draft: Draft, rank: int) -> None:
    source = job.sources[rank]
    elsewhere = _written_by_others(job, draft, rank)
    written: dict[tuple[int, int], StoredTensor] = {}
    plain = f"__{rank}_0.distcp"
    name = draft.named(plain)
    tensors: list[StoredTensor] = []
    with job.store.create(draft.path(plain)) as opened:
        file = _HashedFile(opened)
        for entry, checksum in zip(source.layout.entries, source.sums, strict=True):
            known = written.get((entry.offset, entry.nbytes))
            if elsewhere:
                wanted = (entry.path, entry.dtype, entry.extent, checksum)
                known = elsewhere.get(wanted, known)
            if known is not None:
                known = msgspec.structs.replace(known, path=entry.path, part=entry.part)
            else:
                data = source.read(entry)
                head, tail = dcp.torch_file(entry.dtype, entry.shape, data, file.size)
                start = file.size
                known = StoredTensor(
                    entry.path, entry.dtype, entry.shape, entry.part, name, start + len(head), entry.nbytes,
                    checksum, (start, len(head) + len(data) + len(tail)),
                )  # fmt: skip
                for part in (head, data, tail):
                    file.write(part)
                if entry.nbytes:  # tied tensors share one place
                    written[entry.offset, entry.nbytes] = known
            tensors.append(known)
        files = {name: file.finish()}
    if not file.size:
        job.store.delete(draft.path(plain))
        files = {}
    index = RankIndex(rank, job.step, source.layout.skeleton, tuple(tensors), files)
    job.store.write(draft.path(index_file(rank)), msgspec.msgpack.encode(index))


def _written_by_others(
    job: PersistJob, draft: Draft, rank: int
) -> dict[tuple[object, ...], StoredTensor]:
    """Return the tensors that lower ranks write and this rank may have too."""
    entries = job.sources[rank].layout.entries
    owners = {entry.part.owner if entry.part is not None else 0 for entry in entries}
    return {
        (tensor.path, tensor.dtype, tensor.extent, tensor.xxh3): tensor
        for owner in sorted(owners)
        if 0 <= owner < rank
        for tensor in _await_index(job, draft, owner).tensors
    }


def _finish(job: PersistJob, draft: Draft) -> None:
    indices = [_await_index(job, draft, rank) for rank in range(job.world_size)]
    metadata, files = _encode_metadata(job, draft, indices)
    for index in indices:
        name = index_file(index.rank)
        files[draft.named(name)] = record_of(job.store.read(draft.path(name)))
        files.update(index.files)
    own = {draft.named(f"__{index.rank}_0.distcp") for index in indices[1:]}
    manifest = Manifest(
        step=job.step,
        save=job.save,
        world_size=job.world_size,
        replicated=not own & files.keys(),
        files=files,
        metrics=dict(job.metrics),
        place=draft.place,
    )
    faults.point("persist.manifest")
    job.guard()  # the writing may have taken long
    _refuse_older(job)
    _refuse_given_up(job, draft)
    if job.mark != storage.GIVEN_UP:
        storage.remove_marks(job.store, draft)
    # These two may replace those of a stored step, which is untouched up to here.
    job.store.write(join(draft.top, DCP_METADATA), metadata)
    job.store.write(join(draft.top, MANIFEST), formats.encode(manifest))
    job.store.publish(draft, {*files, MANIFEST})
    faults.point("persist.renamed")


def _encode_metadata(
    job: PersistJob, draft: Draft, indices: Sequence[RankIndex]
) -> tuple[bytes, dict[str, FileRecord]]:
    """Write the plain values of rank 0; return DCP's metadata and the records of both files."""
    source = job.sources[0]

    def tensor(number: int) -> tuple[str, Sequence[int], memoryview]:
        entry = source.layout.entries[number]
        return entry.dtype, entry.shape, source.read(entry)

    plain = "__0_1.distcp"
    name = draft.named(plain)
    objects = {}
    first = dcp.leaves(indices[0].skeleton)
    with job.store.create(draft.path(plain)) as opened:
        file = _HashedFile(opened)
        for leaf in first:
            if not isinstance(leaf.value, TensorRef):
                data = dcp.object_file(leaf.value, tensor)
                objects[leaf.name] = dcp.Item(name, file.size, len(data))
                file.write(data)
        record = file.finish()
    others = ((dcp.leaves(index.skeleton), index.tensors) for index in indices[1:])
    ranks = itertools.chain([(first, indices[0].tensors)], others)
    metadata = dcp.metadata(ranks, objects)
    return metadata, {name: record, DCP_METADATA: record_of(metadata)}


def _await_index(job: PersistJob, draft: Draft, rank: int) -> RankIndex:
    return _await(job, draft, lambda: _finished_index(job, draft, rank), f"rank {rank}'s index")


def _finished_index(job: PersistJob, draft: Draft, rank: int) -> RankIndex | None:
    try:
        data = job.store.read(draft.path(index_file(rank)))
        index = decoding.msgpack(data, RankIndex)
    except (FileNotFoundError, msgspec.DecodeError):
        return None  # not there yet
    return index if index.step == job.step else None


def _await(
    job: PersistJob, draft: Draft, condition: Callable[[], _Value | None], what: str
) -> _Value:
    waited, said = 0.0, 0.0
    while (value := condition()) is None:
        try:
            _refuse_given_up(job, draft)
        except InfrastructureError:
            if (value := condition()) is not None:  # a save just published looks given up, too
                return value
            raise
        if waited >= job.patience:
            raise InfrastructureError(
                f"Step {job.step} was not stored: {what} did not come within {job.patience:g} s."
            )
        if waited >= said + SAY_EVERY:
            said = waited
            logger.warning(
                "Waiting for %s of step %d: %.0f s of %.0f s", what, job.step, waited, job.patience
            )
        job.pause(job.store.poll)
        waited += job.store.poll
    return value


class _HashedFile:
    """File that is hashed while it is written, in large parts."""

    def __init__(self, file: StoreWriter) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._buffer = memoryview(bytearray(CHUNK))
        self._filled = 0
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        if self._filled + len(data) > CHUNK:
            self._flush()
        if len(data) < CHUNK:
            self._buffer[self._filled : self._filled + len(data)] = data
            self._filled += len(data)
            return
        for start in range(0, len(data), CHUNK):
            self._put(data[start : start + CHUNK])

    def finish(self) -> FileRecord:
        """Write the rest and describe the file."""
        self._flush()
        return FileRecord(self.size, self._hash.hexdigest())

    def _flush(self) -> None:
        self._put(self._buffer[: self._filled])
        self._filled = 0

    def _put(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)
