"""Versions of weights, from the role that trains to those that work with them.

``publish`` copies a state into memory that a process of the job keeps; ``latest`` maps it, or reads it from another
machine. Each rank publishes its own parts of spread tensors, and each reader takes what its own layout needs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dlrover.checkpoint.machine.extent import Extent, cover, entire
from dlrover.checkpoint.saver.memory import kernels
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError
from dlrover.roles.messages import (
    HOLDER,
    CallAddress,
    JobView,
    MemberPlace,
    PartView,
    PublishedAs,
    PublishPart,
    RoleView,
    UseVersion,
    Version,
    VersionView,
)
from dlrover.roles.runtime import payload, wire
from dlrover.roles.runtime.holding import CommitPart, DiscardPart, PartListed
from dlrover.roles.runtime.link import member
from dlrover.roles.runtime.memory import HolderConnection, PartReader
from dlrover.roles.runtime.payload import ALIGNMENT
from dlrover.roles.runtime.worker import RoleWorker, current_worker

logger = logging.getLogger(__name__)

NAME = "weights"
WAIT = 600.0
"""Seconds that `latest` waits for a version."""
THREADS = 4
"""Maximum number of threads that copy or check."""


class _TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor, or a rank's part of it, in the memory of a part."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    at: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sum: int = 0

    @property
    def extent(self) -> Extent:
        return Extent(self.whole, self.at, self.shape)


class _Index(msgspec.Struct, frozen=True, array_like=True):
    entries: tuple[_TensorEntry, ...]
    values: bytes
    """What else is in the state, as `payload` encodes it."""


_index = msgspec.msgpack.Decoder(_Index)


class _Holders:
    """Connections of this process to those that keep weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[MemberPlace, HolderConnection] = {}
        self._worker: RoleWorker | None = None
        self._declared: set[str] = set()
        self.publishing = threading.Lock()
        self.numbers = itertools.count()
        self.id = secrets.token_hex(6)

    def connection(
        self, worker: RoleWorker, place: MemberPlace, address: CallAddress
    ) -> HolderConnection:
        """Return the connection to a process.

        Raises:
            OSError: It is gone.
        """
        with self._lock:
            self._follow(worker)
            if place not in self._open:
                secret = wire.secret_of(worker.link.token)
                self._open[place] = HolderConnection(address, worker.machine, secret)
            return self._open[place]

    def declared(self, worker: RoleWorker) -> set[str]:
        """Return the names of the weights that this process has said that it works with."""
        with self._lock:
            self._follow(worker)
            return self._declared

    def _follow(self, worker: RoleWorker) -> None:
        if self._worker is not worker:  # it has left the job and joined again
            self._open, self._declared, self._worker = {}, set(), worker
            worker.closing.append(self._close)

    def _close(self) -> None:
        with self._lock:
            for connection in self._open.values():
                connection.close()

    def drop(self, place: MemberPlace) -> None:
        """Connect anew next time."""
        with self._lock:
            known = self._open.pop(place, None)
        if known is not None:
            known.close()


_holders = _Holders()


# ---- publish


def publish(state: Mapping[str, Any], version: int, *, name: str = NAME) -> Version:
    """Publish a state as a version of weights; return it once it is safe. Readers see it when all ranks have.

    If any value is a ``DTensor`` or a `dlrover.checkpoint.Shard`, each rank publishes its part of those, and rank 0
    everything else. Otherwise rank 0 publishes the state, and the others nothing.

    Args:
        state: Tensors and arrays by name, as ``model.state_dict()``; plain values may be among them.
        version: Step of the state, above that of the last version.
        name: Name of the weights, if the job has several. A name belongs to one role.

    Raises:
        ConfigurationError: The version was published before, or a value cannot be published.
        InfrastructureError: Memory is short.
    """
    worker = current_worker()
    if version < 0:
        raise ConfigurationError(f"version {version}: it must be a whole number, 0 or above.")
    pieces = {key: _piece(key, value) for key, value in state.items()}
    spread = {key for key, one in pieces.items() if one is not None and one[2]}
    parts = worker.instances if spread else 1
    if worker.index >= parts:
        return Version(_epoch(worker.link.view, name), version)
    mine = [(key, one) for key, one in pieces.items() if one is not None]
    if worker.index:
        mine = [(key, one) for key, one in mine if key in spread]
    values = (
        {key: state[key] for key, one in pieces.items() if one is None} if not worker.index else {}
    )
    for key, value in values.items():
        payload.encode_named(f"the value {key} of the weights", value)
    with _holders.publishing:
        for last in (False, True):
            holder, address = _holder(worker)
            try:
                connection = _holders.connection(worker, holder, address)
                return _published(worker, connection, holder, mine, values, (name, version, parts))
            except OSError as error:
                _holders.drop(holder)
                if last:
                    raise InfrastructureError(
                        f"The process that keeps weights has gone: {error}."
                    ) from error
    raise AssertionError


def _published(
    worker: RoleWorker,
    connection: HolderConnection,
    holder: MemberPlace,
    mine: Sequence[tuple[str, Any]],
    values: Mapping[str, Any],
    what: tuple[str, int, int],
) -> Version:
    entries, offset = [], 0
    for key, (array, dtype, extent) in mine:
        box = extent or entire(array.shape)
        nbytes = array.nbytes
        entries.append(_TensorEntry(key, dtype, box.whole, box.at, box.shape, offset, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    key = f"{worker.place.role}-{worker.index}-{_holders.id}-{next(_holders.numbers)}"
    memory = connection.writable(key, offset + 2 * len(_encoded(entries, values)) + mmap.PAGESIZE)
    try:
        index = _encoded(_copied([array for _, (array, _, _) in mine], entries, memory), values)
        memory[offset : offset + len(index)] = index
        connection.ask(CommitPart(key, offset, len(index), _hash(index)))
        name, version, parts = what
        reply = worker.link.ask(
            PublishPart(worker.place, name, version, worker.index, parts, holder, key, offset)
        )
        if not isinstance(reply, PublishedAs):
            raise ProtocolError(f"The coordinator answered {type(reply).__name__}.")
    except DLRoverError:
        connection.ask(DiscardPart(key))
        raise
    with contextlib.suppress(
        OSError
    ):  # what was published is lost with who kept it, as at any later time
        connection.ask(PartListed(key, reply.view))
    worker.link.wait(lambda view: view.number >= reply.view, WAIT, "the view of what was published")
    worker.progress()
    return reply.version


def _copied(
    arrays: Sequence[Any], entries: Sequence[_TensorEntry], memory: mmap.mmap
) -> list[_TensorEntry]:
    """Copy arrays to their places; return their entries with checksums, from the same pass."""
    target = np.frombuffer(memory, np.uint8)
    sources = [_flat(array) for array in arrays]
    sums = kernels().copy_hash(
        np.array([source.ctypes.data for source in sources], np.uint64),
        np.array([target.ctypes.data + entry.offset for entry in entries], np.uint64),
        np.array([entry.nbytes for entry in entries], np.uint64),
        THREADS,
    )
    return [
        msgspec.structs.replace(entry, sum=int(one))
        for entry, one in zip(entries, sums, strict=True)
    ]


def _encoded(entries: Sequence[_TensorEntry], values: Mapping[str, Any]) -> bytes:
    packed = wire.packed(*payload.encode(dict(values)))
    return msgspec.msgpack.encode(_Index(tuple(entries), packed))


def _flat(array: Any) -> Any:
    """Return the memory of an array or a tensor."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.frombuffer(payload.tensor_bytes(array), np.uint8)


def _address(array: Any) -> int:
    """Return where the memory of an array or tensor begins; 0 if it is not plain memory of this machine."""
    if isinstance(array, np.ndarray):
        plain = array.flags.c_contiguous and array.flags.writeable
        return int(array.ctypes.data) if plain and array.nbytes else 0
    plain = array.is_cpu and array.is_contiguous() and not array.is_conj() and not array.is_neg()
    return int(array.data_ptr()) if plain else 0


def _hash(data: bytes) -> int:
    array = np.frombuffer(data, np.uint8)
    sums = kernels().hash(
        np.array([array.ctypes.data], np.uint64), np.array([len(data)], np.uint64)
    )
    return int(sums[0])


def _piece(key: str, value: Any) -> tuple[Any, str, Extent | None] | None:
    """Return an array, its type and its place in the whole tensor if it is a part; None for a plain value."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise ConfigurationError(
                f"{key} of the weights is an array of {value.dtype}: numbers can be published."
            )
        return value, value.dtype.str, None
    if "torch" not in sys.modules:
        return None
    import torch  # noqa: PLC0415 - the program has it

    from dlrover.checkpoint.engine import tree  # noqa: PLC0415 - it needs PyTorch

    if isinstance(value, tree.Spread):
        local = tree.local_part(value, (key,))
        return local, str(local.dtype), tree.extent(value, (key,))
    if isinstance(value, torch.Tensor):
        return value, str(value.dtype), None
    return None


def _holder(worker: RoleWorker) -> tuple[MemberPlace, CallAddress]:
    """Return the process that keeps weights on this machine: one for that, or else this process itself."""
    for one in worker.link.view.roles.get(HOLDER, RoleView(0, ())).members:
        if one.state == "live" and one.address.machine == worker.machine:
            return one.place, one.address
    return worker.place, worker.listener.address


# ---- read


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
        self._entries: dict[str, list[tuple[_TensorEntry, PartReader]]] = {}
        self._values: dict[str, Any] = {}
        for part in parts:
            index = _read_index(part)
            for entry in index.entries:
                self._entries.setdefault(entry.name, []).append((entry, part))
            self._values |= payload.decode(*wire.unpacked(index.values))
        self._memories: dict[_TensorEntry, payload.Bytes] = {}
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
        direct: list[tuple[_TensorEntry, PartReader, int]] = []
        for key, value in state.items():
            piece = _piece(key, value)
            if piece is None:
                continue
            array, dtype, extent = piece
            wanted = extent or entire(tuple(array.shape))
            self._check_shape(key, wanted)
            (entry, part), *others = self._entries[key]
            address = _address(array)
            if address and not others and (entry.dtype, entry.extent) == (dtype, wanted):
                direct.append((entry, part, address))
            else:
                self._load(key, array, wanted)
        self._copy(direct)
        self.use()

    def _copy(self, targets: Sequence[tuple[_TensorEntry, PartReader, int]]) -> None:
        """Copy tensors to addresses, and compare their checksums in the same pass."""
        memories = [part.bytes(entry.offset, entry.nbytes) for entry, part, _ in targets]
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

    def _entry(self, key: str) -> _TensorEntry:
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
            found = _array(entry, self._memories[entry])
            return found[box.source] if box.shape != entry.shape else found
        whole = _empty(first.dtype, wanted.shape)
        for (entry, _), box in pieces:
            whole[box.target] = _array(entry, self._memories[entry])[box.source]
        return whole

    def _check(self, sources: Sequence[tuple[_TensorEntry, PartReader]]) -> None:
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

    def _compare(self, entry: _TensorEntry, found: int) -> None:
        if found != entry.sum:
            raise InfrastructureError(
                f"The tensor {entry.name} of version {self.version} of {self.name} is damaged in memory."
            )


def latest(
    *,
    name: str = NAME,
    wait: bool = True,
    newer_than: Version | None = None,
    timeout: float = WAIT,
) -> Weights | None:
    """Return the current version of weights; None without ``wait`` if there is none that is wanted.

    After a rollback of the role that publishes, the current version is the newest that is still valid, and any later
    one counts as newer. A version that was rolled back is never returned, and never holds up what came before it.

    Args:
        name: Name of the weights.
        wait: False: do not wait.
        newer_than: Return a version only if it is newer than this one, or if this one was rolled back.
        timeout: Seconds to wait.

    Raises:
        InfrastructureError: There was no such version in time.
    """
    worker = current_worker()
    _declare(worker, name)
    until = time.monotonic() + (timeout if wait else 0.0)
    seen = -1
    while True:
        view = _awaited_view(worker, name, newer_than, seen, until) if wait else worker.link.view
        if _wanted(view, name, newer_than) is None:
            return None
        weights = _opened(worker, name, view)
        if weights is not None or not wait:
            return weights
        seen = view.number  # what it lists has gone: the next one says what is there


def _awaited_view(
    worker: RoleWorker, name: str, newer_than: Version | None, seen: int, until: float
) -> JobView:
    """Wait for a view with a version that is wanted, and return it."""

    def found(view: JobView) -> JobView | None:
        fresh = view.number != seen and _wanted(view, name, newer_than) is not None
        return view if fresh else None

    left = max(0.0, until - time.monotonic())
    what = _awaited(worker.link.view, name, newer_than)
    view: JobView = worker.link.wait(found, left, what)
    return view


def versions(name: str = NAME) -> list[Version]:
    """Return the versions that can be read now, oldest first; the last is the current one."""
    found = current_worker().link.view.weights.get(name)
    return [one.version for one in found.versions] if found is not None else []


def is_valid(version: Version, name: str = NAME) -> bool:
    """Return whether a version is still one of the role's history: no rollback has undone it."""
    found = current_worker().link.view.weights.get(name)
    return found is not None and found.valid(version)


def _wanted(view: JobView, name: str, newer_than: Version | None) -> VersionView | None:
    weights = view.weights.get(name)
    if weights is None or not weights.versions:
        return None
    current = weights.versions[-1]
    newer = newer_than is None or current.version > newer_than or not weights.valid(newer_than)
    return current if newer else None


def _awaited(view: JobView, name: str, newer_than: Version | None) -> str:
    """Return what `latest` waits for, in words."""
    weights = view.weights.get(name)
    than = f" newer than {newer_than}" if newer_than is not None else ""
    if weights is None:
        return f"a version of the weights {name}{than}: no role has published any"
    lost = (
        f"; version {weights.lost} was lost with the process that kept it" if weights.lost else ""
    )
    now = (
        f"the current one is {weights.versions[-1].version}"
        if weights.versions
        else "there is none now"
    )
    return f"a version of the weights {name}{than} from {weights.role}: {now}{lost}"


def _opened(worker: RoleWorker, name: str, view: JobView) -> Weights | None:
    """Return the current version of a view; None if a part of it has gone."""
    weights = view.weights[name]
    current = weights.versions[-1]
    readers = []
    for part in current.parts:
        reader = _reader(worker, view, part)
        if reader is None:
            return None
        readers.append(reader)
    if weights.lost is not None:
        logger.warning(
            "Version %s of %s was lost with the process that kept it; version %s is the newest there is",
            weights.lost, name, current.version,
        )  # fmt: skip
    return Weights(worker, name, current.version, readers)


def _reader(worker: RoleWorker, view: JobView, part: PartView) -> PartReader | None:
    holder = member(view, part.holder.role, part.holder.index)
    if holder is None or holder.place != part.holder:
        return None
    try:
        return _holders.connection(worker, holder.place, holder.address).read(part.key)
    except OSError as error:
        logger.debug("%s keeps no weights any more: %s", holder.place, error)
        _holders.drop(holder.place)
    except ConfigurationError as error:
        logger.debug("%s", error)
    return None


def _declare(worker: RoleWorker, name: str) -> None:
    """Say that this role works with the weights: from now on a member of it serves only with a current version."""
    known = worker.link.view.weights.get(name)
    if name not in _holders.declared(worker) and (known is None or known.role != worker.role):
        worker.link.ask(UseVersion(worker.place, name, None))
    _holders.declared(worker).add(name)


def _epoch(view: JobView, name: str) -> int:
    known = view.weights.get(name)
    return len(known.rollbacks) if known is not None else 0


def _read_index(part: PartReader) -> _Index:
    held = part.held
    data = bytes(part.bytes(held.data_bytes, held.index_bytes))
    if _hash(data) != held.index_sum:
        raise InfrastructureError("The index of a part of weights is damaged in memory.")
    return _index.decode(data)


def _array(entry: _TensorEntry, memory: payload.Bytes) -> Any:
    if entry.dtype.startswith("torch."):
        return payload.tensor_of(memory, entry.dtype, entry.shape)
    return memory.view(np.dtype(entry.dtype)).reshape(entry.shape)


def _empty(dtype: str, shape: Sequence[int]) -> Any:
    if not dtype.startswith("torch."):
        return np.empty(shape, np.dtype(dtype))
    import torch  # noqa: PLC0415 - the publisher has it

    return torch.empty(tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))


weights = sys.modules[__name__]
"""The public name of this module: ``from dlrover.roles import weights``."""
