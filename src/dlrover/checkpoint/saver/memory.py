"""One generation: a rank's state of one step in a `memfd`.

::

    header page | data (64-byte aligned) | index (MessagePack of the Layout) | checksums (8 bytes each)

The header's ``state`` is written last when a generation is sealed and first when it is given up. A
process that dies in between leaves an invalid generation. Readers trust no size: they check every range
against the file, and the header and the index against their checksums.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from dlrover import config
from dlrover._native.kernels import Kernels, kernels as choose
from dlrover._util import decoding
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import Layout, PackedLayout
from dlrover.checkpoint.machine.saves import SaveId, SavePlace
from dlrover.checkpoint.storage import formats
from dlrover.errors import InfrastructureError

PAGE = mmap.PAGESIZE
MAGIC = b"DLROVER\0"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""Kernel setting for huge pages in shared memory: always, on advice, or never."""
MADV_POPULATE_WRITE = 23
POPULATE_CHUNK = 1 << 26
"""Bytes of memory that one call enters in the page tables."""
INDEX_RESERVE = 1 << 16
"""Bytes reserved for the index to grow before the memory must be enlarged."""

_FIELDS = struct.Struct("<8sIIqQQQQQQQQQQQQ")
_START = struct.Struct("<8sI")
"""Magic and format number; this part is the same in every format."""
_STATE_AT = 256
_SUMMED_AT = 264
_WORD = struct.Struct("<Q")
_libc = ctypes.CDLL(None, use_errno=True)


class State(enum.IntEnum):
    """State of a generation; only a ``VALID`` one can be used."""

    EMPTY = 0
    WRITING = 1
    VALID = 2


class Header(msgspec.Struct, frozen=True):
    """Contents of a valid generation's header page."""

    rank: int
    world_size: int
    save: SaveId
    layout_hash: int
    data_bytes: int
    index_bytes: int
    index_hash: int
    tensors: int


class Generation:
    """One memfd, mapped until its last reference is gone. The caller still owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size or _grow(fd, PAGE))
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(self._map)

    @property
    def size(self) -> int:
        """Number of mapped bytes."""
        return len(self._map)

    @property
    def data(self) -> memoryview:
        """Everything behind the header page."""
        return self.buffer[PAGE:]

    # ---- write

    def invalidate(self, state: State = State.EMPTY) -> None:
        """Mark the generation as unusable."""
        _WORD.pack_into(self._map, _STATE_AT, state)
        _WORD.pack_into(self._map, _SUMMED_AT, 0)

    def seal(
        self,
        packed: PackedLayout,
        *,
        rank: int,
        world_size: int,
        save: SaveId,
        sums: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Write index and header for data already in place, then mark the generation valid.

        ``sums``: the tensors' checksums; None if the saver is to compute them.
        """
        index, data_bytes = packed.encoded, packed.data_bytes
        if needed_for(packed) > self.size:
            raise InfrastructureError(
                f"The state of step {save.step} does not fit in {self.size} bytes of memory."
            )
        start = PAGE + data_bytes
        self._map[start : start + len(index)] = index
        fields = _FIELDS.pack(
            MAGIC, formats.FORMAT, rank, save.step, world_size, save.session, save.number, save.line,
            packed.layout_hash, data_bytes, len(index), packed.index_hash, packed.tensors,
            *msgspec.structs.astuple(save.place),
        )  # fmt: skip
        self._map[: len(fields)] = fields
        _WORD.pack_into(self._map, len(fields), xxhash.xxh3_64_intdigest(fields))
        if sums is not None:
            self._write_sums(start + len(index), sums.tobytes())
        _WORD.pack_into(self._map, _STATE_AT, State.VALID)

    def store_sums(self, header: Header, sums: Sequence[int]) -> None:
        """Write the tensors' checksums and mark them present."""
        self._write_sums(_sums_at(header), array("Q", sums).tobytes())

    def _write_sums(self, start: int, data: bytes) -> None:
        self._map[start : start + len(data)] = data
        digest = xxhash.xxh3_64_intdigest(data)
        _WORD.pack_into(self._map, start + len(data), digest)
        _WORD.pack_into(self._map, _SUMMED_AT, 1)

    # ---- read

    @property
    def state(self) -> State:
        """State in the header; EMPTY if the value is unknown."""
        (value,) = _WORD.unpack_from(self._map, _STATE_AT)
        return State(value) if value in State.__members__.values() else State.EMPTY

    def header(self) -> Header | None:
        """Return the header of a valid generation; None if the generation is not valid.

        Raises:
            InfrastructureError: the header is damaged.
        """
        if self.state is not State.VALID:
            return None
        fields = bytes(self._map[: _FIELDS.size])
        magic, version = _START.unpack_from(fields)
        if magic == MAGIC:
            formats.check(version, "A memory checkpoint")
        (digest,) = _WORD.unpack_from(self._map, _FIELDS.size)
        if digest != xxhash.xxh3_64_intdigest(fields):
            raise InfrastructureError("The header of a memory checkpoint is damaged.")
        (
            _, _, rank, step, world_size, session, number, line, layout_hash, data_bytes,
            index_bytes, index_hash, tensors, *place,
        ) = _FIELDS.unpack(fields)  # fmt: skip
        if required(data_bytes, index_bytes, tensors) > self.size:
            raise InfrastructureError(f"The memory checkpoint of step {step} is truncated.")
        return Header(
            rank,
            world_size,
            SaveId(line, number, step, session, SavePlace(*place)),
            layout_hash,
            data_bytes,
            index_bytes,
            index_hash,
            tensors,
        )

    def index(self, header: Header) -> bytes:
        """Read the index, an encoded `Layout`, and compare it with its checksum.

        Raises:
            InfrastructureError: the index is damaged.
        """
        start = PAGE + header.data_bytes
        index = bytes(self._map[start : start + header.index_bytes])
        if xxhash.xxh3_64_intdigest(index) != header.index_hash:
            raise InfrastructureError(f"The index of step {header.save.step} in memory is damaged.")
        return index

    def layout(self, header: Header) -> Layout:
        """Read the index and check its content.

        Raises:
            InfrastructureError: the index is damaged.
        """
        index = self.index(header)
        try:
            layout = decoding.msgpack(index, Layout)
        except msgspec.DecodeError as error:
            raise InfrastructureError(
                f"The index of step {header.save.step} in memory cannot be read: {error}."
            ) from error
        if len(layout.entries) != header.tensors:
            raise InfrastructureError(f"The index of step {header.save.step} has a wrong length.")
        layouts.check(layout, header.data_bytes)
        return layout

    def sums(self, header: Header) -> list[int] | None:
        """Return the tensors' checksums as a list; otherwise as `sum_array`."""
        found = self.sum_array(header)
        return None if found is None else list(array("Q", found.tobytes()))

    def sum_array(self, header: Header) -> npt.NDArray[np.uint64] | None:
        """Return the tensors' checksums; None if they are not computed yet.

        Raises:
            InfrastructureError: the checksums are damaged.
        """
        if _WORD.unpack_from(self._map, _SUMMED_AT) != (1,):
            return None
        start = _sums_at(header)
        end = start + 8 * header.tensors
        data = bytes(self._map[start:end])
        if _WORD.unpack_from(self._map, end) != (xxhash.xxh3_64_intdigest(data),):
            raise InfrastructureError(
                f"The checksums of step {header.save.step} in memory are damaged."
            )
        return np.frombuffer(data, np.uint64)

    def tensor_bytes(self, entry: layouts.TensorEntry) -> memoryview:
        """Return the bytes of one tensor."""
        return self.buffer[PAGE + entry.offset : PAGE + entry.end]


def required(data_bytes: int, index_bytes: int, tensors: int) -> int:
    """Return the size of a generation in bytes."""
    return PAGE + data_bytes + index_bytes + 8 * tensors + _WORD.size


def needed_for(packed: PackedLayout) -> int:
    """Return the size in bytes of a generation with this layout."""
    return required(packed.data_bytes, len(packed.encoded), packed.tensors)


def capacity_for(packed: PackedLayout, more: int = 0) -> int:
    """Return the bytes to reserve for a state like this one that gains ``more`` bytes of tensors."""
    size = needed_for(packed) + more + more // 8 + len(packed.encoded) + INDEX_RESERVE
    return -(-size // PAGE) * PAGE


def provide(fd: int, nbytes: int) -> None:
    """Have the kernel provide ``nbytes`` for a generation, in huge pages if it gives them on advice.

    Raises:
        OSError: memory is short; the generation keeps its size.
    """
    before = os.fstat(fd).st_size
    try:
        if _huge_pages_on_advice():
            # The advice applies to memory that is touched, not to allocations.
            os.ftruncate(fd, nbytes)
            populate(Generation(fd))
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.ftruncate(fd, before)
        raise


def _huge_pages_on_advice() -> bool:
    try:
        return "[advise]" in HUGE_PAGES.read_text()
    except OSError:
        return False  # a kernel without huge pages


def populate(generation: Generation, wanted: Callable[[], bool] = lambda: True) -> None:
    """Enter the memory in this process's page tables, so that the first copy does not have to.

    A kernel before 5.14 cannot do this; the first copy is then slower. Stop when ``wanted`` returns False.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(generation.buffer))
    for start in range(0, generation.size, POPULATE_CHUNK):
        if not wanted():
            return
        size = min(POPULATE_CHUNK, generation.size - start) // PAGE * PAGE
        _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), MADV_POPULATE_WRITE)


def compute_sums(generation: Generation, entries: Sequence[layouts.TensorEntry]) -> list[int]:
    """Compute the checksum of each tensor: XXH3, 64 bits."""
    offsets, sizes = spans(entries)
    start = ctypes.addressof(ctypes.c_char.from_buffer(generation.data))
    sums: list[int] = kernels().hash(offsets + np.uint64(start), sizes).tolist()
    return sums


def spans(
    entries: Sequence[layouts.TensorEntry],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the offsets and the sizes of tensors in bytes."""
    count = len(entries)
    offsets = np.fromiter((entry.offset for entry in entries), np.uint64, count)
    return offsets, np.fromiter((entry.nbytes for entry in entries), np.uint64, count)


def kernels() -> Kernels:
    """Return the functions on raw memory that the environment asks for."""
    return choose(config.native(config.environ()))


def _sums_at(header: Header) -> int:
    return PAGE + header.data_bytes + header.index_bytes


def _grow(fd: int, size: int) -> int:
    os.ftruncate(fd, size)
    return size
