"""The content of one stored step: its manifest, its ranks' indices, and its tensors, read on demand and verified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import xxhash

from dlrover._util import decoding
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import TensorSpec, name
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import formats
from dlrover.checkpoint.storage.stores import MANIFEST, ByteRange, Store, failure, join
from dlrover.errors import InfrastructureError

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK = 4 << 20
"""Bytes read and hashed at a time: they must fit in a cache that the cores share."""


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    nbytes: int
    xxh3_64: str
    """Checksum of the whole file, in hexadecimal."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint."""

    step: int
    save: SaveId
    world_size: int
    replicated: bool
    """True if all ranks hold the same tensors; any number of ranks can then load the checkpoint."""
    files: dict[str, FileRecord]
    metrics: dict[str, float] = {}
    """Metrics that the training measured at this step."""
    place: str = ""
    """Folder of the files, beside the manifest; empty if the files are directly beside it."""


class StoredTensor(TensorSpec, frozen=True, array_like=True):
    """A tensor in a file of a stored step."""

    file: str
    offset: int
    nbytes: int
    xxh3: int
    item: tuple[int, int]
    """Offset and length of the ``torch.save`` file around it."""


class RankIndex(msgspec.Struct, frozen=True):
    """The saved state of one rank."""

    rank: int
    step: int
    skeleton: bytes
    tensors: tuple[StoredTensor, ...]
    files: dict[str, FileRecord]
    """Files that this rank wrote."""


def index_file(rank: int, place: str = "") -> str:
    """Return the file name of a rank's `RankIndex`, as in the manifest."""
    return join(place, f"rank-{rank}.index")


class StoredStep:
    """A checkpoint whose files are read on demand. Use it in a ``with`` block.

    Args:
        store: the store that holds the checkpoint.
        folder: the checkpoint's folder in the store; empty if the store is the step itself.

    Raises:
        InfrastructureError: the manifest is missing or damaged.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.manifest = read_manifest(store, folder)
        self._store = store
        self._folder = folder
        self._indices: dict[int, RankIndex] = {}
        self._reader = store.reader(folder)
        self._whole: set[str] = set()
        """Files whose size is correct."""
        self._verified: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader = self._store.reader(self._folder)  # its data is freed with the last view

    def index(self, rank: int) -> RankIndex:
        """Return the index of a rank.

        Raises:
            InfrastructureError: the index is missing or damaged.
        """
        found = self._indices.get(rank)
        if found is None:
            found = read_index(self._store, self._folder, rank, self.manifest)
            for tensor in found.tensors:
                layouts.check_tensor(tensor, tensor.nbytes)
            self._indices[rank] = found
        return found

    def expect(self, tensors: Iterable[StoredTensor]) -> None:
        """Announce the tensors to read; a remote store reads them now, many at once.

        Raises:
            InfrastructureError: the tensors are missing.
        """
        with self._reporting_errors():
            self._reader.expect([self._range(tensor) for tensor in tensors])

    def verified(self, tensor: StoredTensor) -> memoryview:
        """Return the bytes of a tensor, compared with its checksum.

        Raises:
            InfrastructureError: the bytes are missing or damaged.
        """
        with self._reporting_errors():
            data = self._reader.view(self._range(tensor))
        if (tensor.file, tensor.offset) not in self._verified:
            if xxhash.xxh3_64_intdigest(data) != tensor.xxh3:
                raise self._damaged(tensor)
            self._verified.add((tensor.file, tensor.offset))
        return data

    def fill(self, tensor: StoredTensor, buffer: memoryview) -> None:
        """Read a tensor into a buffer of its size, and compare it with its checksum. Any thread may call it.

        Raises:
            InfrastructureError: the tensor is missing or damaged; the buffer may be overwritten nevertheless.
        """
        where = self._range(tensor)
        digest = xxhash.xxh3_64()
        with self._reporting_errors():
            for start in range(0, tensor.nbytes, CHUNK):
                part = buffer[start : start + CHUNK]
                self._reader.fill(ByteRange(where.file, where.offset + start, len(part)), part)
                digest.update(part)  # while it is in the processor's cache
        if digest.intdigest() != tensor.xxh3:
            raise self._damaged(tensor)

    def _damaged(self, tensor: StoredTensor) -> InfrastructureError:
        where = self._where(tensor.file)
        return InfrastructureError(f"The tensor {name(tensor.path)} in {where} is damaged.")

    def _range(self, tensor: StoredTensor) -> ByteRange:
        """Return the range of a tensor, in a file whose size is correct."""
        record = self.manifest.files.get(tensor.file)
        if record is None:
            raise InfrastructureError(f"{name(tensor.path)} is in a file that is not of the step.")
        if tensor.file not in self._whole:
            size = self._reader.size(tensor.file)
            if size != record.nbytes:
                raise InfrastructureError(
                    f"{self._where(tensor.file)} has {size} bytes, not {record.nbytes}."
                )
            self._whole.add(tensor.file)
        if tensor.offset < 0 or tensor.offset + tensor.nbytes > record.nbytes:
            raise InfrastructureError(f"{name(tensor.path)} lies outside of {tensor.file}.")
        return ByteRange(tensor.file, tensor.offset, tensor.nbytes)

    def _where(self, file: str) -> str:
        return self._store.where(join(self._folder, file))

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError) as error:
            where = getattr(error, "filename", None) or self._where("")
            raise failure(error, f"{where} cannot be read") from error


def read_manifest(store: Store, folder: str) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        OtherFormatError: another version of DLRover has written the manifest.
        InfrastructureError: the manifest is missing or damaged.
    """
    where = store.where(join(folder, MANIFEST))
    try:
        found = formats.decode(store.read(join(folder, MANIFEST)), Manifest, store.where(folder))
    except (OSError, MemoryError, msgspec.DecodeError) as error:
        raise failure(error, f"{where} cannot be read") from error
    if found.world_size < 1 or not all(map(_is_inside, (found.place, *found.files))):
        raise InfrastructureError(f"{where} names ranks or files that no step can have.")
    return found


def _is_inside(name: str) -> bool:
    """Return True if a name, or an empty text, leads to nowhere but a place in the step's folder."""
    return not (name.startswith("/") or "\0" in name or ".." in name.split("/"))


def read_index(store: Store, folder: str, rank: int, manifest: Manifest) -> RankIndex:
    """Read a rank's index, and compare it with the manifest.

    Raises:
        InfrastructureError: the index is missing or damaged.
    """
    file = index_file(rank, manifest.place)
    record = manifest.files.get(file)
    where = store.where(join(folder, file))
    try:
        data = store.read(join(folder, file))
        if record is None or record != record_of(data):
            raise InfrastructureError(f"{where} differs from what the manifest says.")
        return decoding.msgpack(data, RankIndex)
    except (OSError, MemoryError, msgspec.DecodeError) as error:
        raise failure(error, f"{where} cannot be read") from error


def record_of(data: bytes) -> FileRecord:
    """Return the record of a file with this content."""
    return FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))
