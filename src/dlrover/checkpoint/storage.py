"""Checkpoints in a directory: their names, what they must contain, and which of them can be used.

::

    <directory>/
    ├── checkpoint-id          names the directory; a new one gets a new name
    ├── latest                 the newest step that was stored (JSON)
    ├── step-40/               one checkpoint: what DCP reads, and
    │   ├── manifest.json      a `Manifest`; written last
    │   └── rank-0.index       a `RankIndex`: where each tensor of a rank lies, with its checksum
    ├── step-30.bad/           was found to be damaged
    └── .step-50.<session>/    is being written

Where nothing can be renamed it looks a little different, see `dlrover.checkpoint.remote`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import xxhash

from dlrover.checkpoint import faults, layout as layouts
from dlrover.checkpoint.extent import Extent
from dlrover.checkpoint.layout import Layout, TensorEntry, name
from dlrover.checkpoint.policies import Policy, StepInfo
from dlrover.checkpoint.stores import (
    IDENTITY,
    MANIFEST,
    TRACKER,
    Range,
    StorageAwayError,
    Store,
    failure,
    join,
    step_folder,
)  # fmt: skip
from dlrover.errors import InfrastructureError

if TYPE_CHECKING:
    from typing_extensions import Self


logger = logging.getLogger(__name__)

FORMAT = 1
_STEP = re.compile(r"step-(\d+)")


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    nbytes: int
    xxh3_64: str
    """Of the whole file, in hexadecimal."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of."""

    format: int
    step: int
    world_size: int
    replicated: bool
    """Whether all ranks hold the same tensors: then any number of ranks can load it."""
    files: dict[str, FileRecord]
    metrics: dict[str, float] = {}
    """What the training measured at this step."""
    place: str = ""
    """The folder that the files are in, beside the manifest; empty: they are beside it themselves."""


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor's bytes lie."""

    path: layouts.Path
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    xxh3: int
    item: tuple[int, int]
    """Offset and length of the ``torch.save`` file around it."""
    part: layouts.Part | None = None

    @property
    def extent(self) -> Extent:
        """Where it lies in the whole tensor."""
        return layouts.extent_of(self.shape, self.part)


class RankIndex(msgspec.Struct, frozen=True):
    """One rank's state."""

    rank: int
    step: int
    skeleton: bytes
    tensors: tuple[StoredTensor, ...]
    files: dict[str, FileRecord]
    """Those that this rank wrote."""


class Tracker(msgspec.Struct, frozen=True):
    """The newest step that was stored."""

    step: int


# ---- names


def index_file(rank: int, place: str = "") -> str:
    """The name of a rank's `RankIndex`, as the manifest knows it."""
    return join(place, f"rank-{rank}.index")


def identity(store: Store) -> str:
    """The name of this directory, made at its first use; the same for all who ask.

    Raises:
        InfrastructureError: it cannot be read or written.
    """
    try:
        if not store.exists(IDENTITY):
            store.write_once(IDENTITY, secrets.token_hex(16).encode())
        return store.read(IDENTITY).decode().strip()
    except OSError as error:
        raise failure(
            error, f"The checkpoint directory {store.location} cannot be used: {error.strerror}."
        ) from error


def check_identity(store: Store, expected: str) -> None:
    """Refuse a directory that is not the one it was: its disk is not mounted any more.

    Raises:
        OSError: it is another one, or none.
    """
    try:
        found = store.read(IDENTITY).decode().strip()
    except FileNotFoundError:
        found = ""
    if found != expected:
        raise OSError(errno.ESTALE, "it is not the directory any more that it was", store.location)


# ---- what is there


def steps(store: Store) -> list[int]:
    """The steps that look whole, newest first."""
    matches = map(_STEP.fullmatch, store.names())
    found = [int(match[1]) for match in matches if match]
    return sorted((step for step in found if is_stored(store, step)), reverse=True)


def is_stored(store: Store, step: int) -> bool:
    """Whether a step looks whole."""
    return store.exists(join(step_folder(step), MANIFEST))


def tracked(store: Store) -> int | None:
    """The newest step that was ever stored; None if none was, -1 if the tracker is damaged.

    Raises:
        InfrastructureError: it cannot be read.
    """
    try:
        return msgspec.json.decode(store.read(TRACKER), type=Tracker).step
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        return -1
    except OSError as error:
        raise failure(error, f"{store.where(TRACKER)} cannot be read: {error.strerror}.") from error


def track(store: Store, step: int) -> None:
    """Say that ``step`` is the newest one."""
    store.write(TRACKER, msgspec.json.encode(Tracker(step)))
    store.sync("")


def quarantine(store: Store, step: int) -> str:
    """Put a damaged step out of the way; its new name, or the old one where nothing can be changed."""
    try:
        return store.set_aside(step)
    except OSError as error:
        logger.warning("Step %d stays in its place: %s", step, error)
        return store.where(step_folder(step))


def prune(store: Store, policy: Policy) -> None:
    """Delete the steps that the policy does not keep.

    Raises:
        OSError: one cannot be deleted.
        StorageAwayError: what the policy asks for cannot be read now.
    """
    stored = steps(store)
    kept = policy.kept([_info(store, step, policy) for step in stored])
    for step in stored:
        if step in kept:
            continue
        faults.point("prune.begun")
        store.remove_step(step)


def _info(store: Store, step: int, policy: Policy) -> StepInfo:
    if not policy.uses_metrics:
        return StepInfo(step)
    try:
        return StepInfo(step, read_manifest(store, step_folder(step)).metrics)
    except StorageAwayError:
        raise
    except InfrastructureError:
        return StepInfo(step)  # damaged: its metrics are not known


def remove_unfinished(store: Store, session: int, idle: float = 0.0) -> None:
    """Delete what worlds other than ``session`` did not finish; nobody may be writing that.

    Only what has not changed for ``idle`` seconds; what cannot be deleted stays.
    """
    for left in store.leftovers():
        if f"{session:016x}" not in left.name and (
            time.time() - store.modified(left.folder) >= idle
        ):
            with contextlib.suppress(OSError):
                store.remove(left.folder)


def remove_given_up(store: Store, session: int, before: int | None = None) -> None:
    """Delete what this world did not finish before a step: steps are stored one after the other.

    What cannot be deleted stays.
    """
    for left in store.leftovers():
        if f"{session:016x}" in left.name and (before is None or left.step < before):
            with contextlib.suppress(OSError):
                store.remove(left.folder)


# ---- read


class StoredStep:
    """A checkpoint, its files read as they are needed. Use it in a ``with`` block.

    Args:
        store: where it is.
        folder: its folder there; empty if the store is the step itself.

    Raises:
        InfrastructureError: its manifest is missing or damaged.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.manifest = read_manifest(store, folder)
        self._store = store
        self._folder = folder
        self._indices: dict[int, RankIndex] = {}
        self._reader = store.reader(folder)
        self._whole: set[str] = set()
        """Files that have the size that they should have."""
        self._verified: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader = self._store.reader(self._folder)  # a mapping ends with its last view

    def index(self, rank: int) -> RankIndex:
        """What a rank saved.

        Raises:
            InfrastructureError: its index is missing or damaged.
        """
        found = self._indices.get(rank)
        if found is None:
            found = read_index(self._store, self._folder, rank, self.manifest)
            _check(found)
            self._indices[rank] = found
        return found

    def expect(self, tensors: Iterable[StoredTensor]) -> None:
        """Say which tensors will be asked for; a remote store reads them now, many at once.

        Raises:
            InfrastructureError: they are missing.
        """
        with self._told():
            self._reader.expect([self._range(tensor) for tensor in tensors])

    def verified(self, tensor: StoredTensor) -> memoryview:
        """The bytes of a tensor, compared with its checksum.

        Raises:
            InfrastructureError: they are missing or damaged.
        """
        with self._told():
            data = self._reader.view(self._range(tensor))
        if (tensor.file, tensor.offset) not in self._verified:
            if xxhash.xxh3_64_intdigest(data) != tensor.xxh3:
                where = self._where(tensor.file)
                raise InfrastructureError(f"The tensor {name(tensor.path)} in {where} is damaged.")
            self._verified.add((tensor.file, tensor.offset))
        return data

    def _range(self, tensor: StoredTensor) -> Range:
        """Where it is, in a file that is as large as it should be."""
        record = self.manifest.files.get(tensor.file)
        if tensor.file not in self._whole:
            size = self._reader.size(tensor.file)
            if record is None or size != record.nbytes:
                expected = record.nbytes if record is not None else "no"
                raise InfrastructureError(
                    f"{self._where(tensor.file)} has {size} bytes, not {expected}."
                )
            self._whole.add(tensor.file)
        if record is None or tensor.offset < 0 or tensor.offset + tensor.nbytes > record.nbytes:
            raise InfrastructureError(f"{name(tensor.path)} lies outside of {tensor.file}.")
        return Range(tensor.file, tensor.offset, tensor.nbytes)

    def _where(self, file: str) -> str:
        return self._store.where(join(self._folder, file))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self._where("")
            raise failure(error, f"{where} cannot be read: {error.strerror}.") from error


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        InfrastructureError: it is missing or damaged.
    """
    where = store.where(join(folder, MANIFEST))
    try:
        manifest = msgspec.json.decode(store.read(join(folder, MANIFEST)), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise failure(error, f"{where} cannot be read: {error}.") from error
    if manifest.format != FORMAT:
        raise InfrastructureError(
            f"{store.where(folder)} has format {manifest.format}; this version reads format {FORMAT}."
        )
    return manifest


def read_index(store: Store, folder: str, rank: int, manifest: Manifest) -> RankIndex:
    """A rank's index, compared with the manifest.

    Raises:
        InfrastructureError: it is missing or damaged.
    """
    file = index_file(rank, manifest.place)
    record = manifest.files.get(file)
    where = store.where(join(folder, file))
    try:
        data = store.read(join(folder, file))
        if record is None or record != record_of(data):
            raise InfrastructureError(f"{where} differs from what the manifest says.")
        return msgspec.msgpack.decode(data, type=RankIndex)
    except (OSError, msgspec.DecodeError) as error:
        raise failure(error, f"{where} cannot be read: {error}.") from error


def record_of(data: bytes) -> FileRecord:
    """The record of a file with this content."""
    return FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))


def _check(index: RankIndex) -> None:
    """Refuse sizes and types that cannot be."""
    entries = []
    end = 0
    for tensor in index.tensors:
        item = layouts.ITEM_BYTES.get(tensor.dtype, 1)
        offset = -(-end // item) * item
        entries.append(
            TensorEntry(tensor.path, tensor.dtype, tensor.shape, offset, tensor.nbytes, tensor.part)
        )
        end = offset + tensor.nbytes
    layouts.check(Layout(tuple(entries), index.skeleton, 0), end)
