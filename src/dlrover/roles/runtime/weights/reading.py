"""A version of weights as this process reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dlrover.checkpoint.machine.extent import Extent, cover, entire
from dlrover.checkpoint.saver.memory import kernels
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.messages import UseVersion, Version
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.memory import PartReader
from dlrover.roles.runtime.weights.parts import (
    THREADS,
    WeightEntry,
    address_of,
    array_of,
    empty,
    piece_of,
    read_index,
)
from dlrover.roles.runtime.worker import RoleWorker


class Weights:
    """A version of weights that this process reads. Its memory stays while an array of it lives.

    Attributes:
        version: Which version it is; versions are ordered.
        name: Name of the weights.
    """

    def __init__(
        self, worker: RoleWorker, name: str, version: Version, parts: Sequence[PartReader]
    ) -> None:
        self.name, self.version = name, version
        self._worker = worker
        self._entries: dict[str, list[tuple[WeightEntry, PartReader]]] = {}
        self._values: dict[str, Any] = {}
        for part in parts:
            index = read_index(part)
            for entry in index.entries:
                self._entries.setdefault(entry.name, []).append((entry, part))
            self._values |= payload.decode(*wire.unpacked(index.values))
        self._memories: dict[WeightEntry, payload.Bytes] = {}
        """What was read and compared with its checksum."""

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from self._values

    def __len__(self) -> int:
        return len(self._entries) + len(self._values)

    def __getitem__(self, key: str) -> Any:
        """Return a tensor as a whole, or a plain value."""
        if key in self._values:
            return self._values[key]
        entry = self._entry(key)
        return self._assembled(key, entire(entry.whole))

    def read(self, key: str, at: Sequence[int], shape: Sequence[int]) -> Any:
        """Return the part of a tensor that begins at ``at`` and has ``shape``."""
        wanted = Extent(self._entry(key).whole, tuple(at), tuple(shape))
        if not wanted.fits():
            raise ConfigurationError(
                f"{key} has shape {wanted.whole}: no part at {at} has shape {shape}."
            )
        return self._assembled(key, wanted)

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors as wholes, and the plain values. Arrays share the memory of the weights."""
        self._check([one for entries in self._entries.values() for one in entries])
        return {key: self[key] for key in self}

    def load_into(self, target: Any) -> None:
        """Copy the weights into a module or a dict of tensors, each as its own layout wants; then `use` them.

        Raises:
            ConfigurationError: A tensor is missing or has another shape.
            InfrastructureError: The memory is damaged; the target must not be used.
        """
        state = target if isinstance(target, Mapping) else target.state_dict()
        direct: list[tuple[WeightEntry, PartReader, int]] = []
        for key, value in state.items():
            piece = piece_of(key, value)
            if piece is None:
                continue
            array, dtype, extent = piece
            wanted = extent or entire(tuple(array.shape))
            self._check_shape(key, wanted)
            (entry, part), *others = self._entries[key]
            address = address_of(array)
            if address and not others and (entry.dtype, entry.extent) == (dtype, wanted):
                direct.append((entry, part, address))
            else:
                self._load(key, array, wanted)
        self._copy(direct)
        self.use()

    def _copy(self, targets: Sequence[tuple[WeightEntry, PartReader, int]]) -> None:
        """Copy tensors to addresses, and compare their checksums in the same pass."""
        memories = [part.view(entry.offset, entry.nbytes) for entry, part, _ in targets]
        sums = kernels().copy_hash(
            np.array([memory.ctypes.data for memory in memories], np.uint64),
            np.array([address for _, _, address in targets], np.uint64),
            np.array([memory.nbytes for memory in memories], np.uint64),
            THREADS,
        )
        for (entry, _, _), found in zip(targets, sums, strict=True):
            self._compare(entry, int(found))

    def use(self) -> None:
        """Say that this instance works with this version from now on: it serves if that is the current one."""
        worker = self._worker
        worker.link.ask(UseVersion(worker.place, self.name, self.version))

    def _entry(self, key: str) -> WeightEntry:
        if key not in self._entries:
            raise ConfigurationError(f"Version {self.version} of {self.name} has no tensor {key}.")
        return self._entries[key][0][0]

    def _check_shape(self, key: str, wanted: Extent) -> None:
        if self._entry(key).whole != wanted.whole:
            raise ConfigurationError(
                f"{key} has shape {self._entry(key).whole} in version {self.version} of {self.name}, and {wanted.whole}"
                " here."
            )

    def _load(self, key: str, array: Any, wanted: Extent) -> None:
        found = self._assembled(key, wanted)
        if isinstance(array, np.ndarray):
            np.copyto(array, found)
            return
        import torch  # noqa: PLC0415 - the target is a tensor

        with torch.no_grad():
            array.copy_(torch.from_numpy(found) if isinstance(found, np.ndarray) else found)

    def _assembled(self, key: str, wanted: Extent) -> Any:
        subject = f"The tensor {key} of version {self.version} of {self.name}"
        sources = [(entry.extent, (entry, part)) for entry, part in self._entries[key]]
        pieces = cover(subject, wanted, sources)
        self._check([source for source, _ in pieces])
        first = self._entry(key)
        if len(pieces) == 1 and pieces[0][1].shape == wanted.shape:
            (entry, _), box = pieces[0]
            found = array_of(entry, self._memories[entry])
            return found[box.source] if box.shape != entry.shape else found
        whole = empty(first.dtype, wanted.shape)
        for (entry, _), box in pieces:
            whole[box.target] = array_of(entry, self._memories[entry])[box.source]
        return whole

    def _check(self, sources: Sequence[tuple[WeightEntry, PartReader]]) -> None:
        """Compare checksums, once for each tensor.

        Raises:
            InfrastructureError: The memory is damaged.
        """
        fresh = [one for one in sources if one[0] not in self._memories]
        memories = [part.bytes(entry.offset, entry.nbytes) for entry, part in fresh]
        sums = kernels().hash(
            np.array([memory.ctypes.data for memory in memories], np.uint64),
            np.array([memory.nbytes for memory in memories], np.uint64),
            THREADS,
        )
        for (entry, _), memory, found in zip(fresh, memories, sums, strict=True):
            self._compare(entry, int(found))
            self._memories[entry] = memory

    def _compare(self, entry: WeightEntry, found: int) -> None:
        if found != entry.sum:
            raise InfrastructureError(
                f"The tensor {entry.name} of version {self.version} of {self.name} is damaged in memory."
            )
