"""A step in the memory of the nodes: which ranks can load it, and its transfer, verified, to their state."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dlrover._native.kernels import overlap
from dlrover._util import decoding
from dlrover.checkpoint.engine import buffers
from dlrover.checkpoint.engine.buffers import Places, Words
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.engine.tree import DTYPES
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading import peers
from dlrover.checkpoint.loading.plan import LoadPlan, RankState, assemble
from dlrover.checkpoint.loading.replay import Replay
from dlrover.checkpoint.machine.extent import Piece
from dlrover.checkpoint.machine.layout import ITEM_BYTES, Layout, TensorEntry, name
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.memory import Generation, Header, kernels, spans
from dlrover.checkpoint.saver.protocol import HeldGeneration
from dlrover.errors import InfrastructureError

_described = decoding.msgpack_decoder(dict[int, tuple[tuple[TensorEntry, ...], bytes, list[int]]])

Fetched = dict[Piece, torch.Tensor]
"""Data from other ranks, by requested piece."""


class MemoryStep:
    """A step in the memory of the nodes, as one rank loads it."""

    def __init__(
        self,
        world: TorchWorld,
        client: SaverClient,
        candidate: Candidate,
        mine: Sequence[HeldGeneration],
    ) -> None:
        self._world = world
        self._client = client
        self._candidate = candidate
        self._held = {item.rank: item for item in mine if candidate.key == _key(item)}
        self._generations: dict[int, tuple[Generation, torch.Tensor, Header]] = {}
        self._layouts: dict[int, Layout] = {}
        self._views: dict[int, list[torch.Tensor]] = {}

    # ---- what this node has

    def _open(self, rank: int) -> tuple[Generation, torch.Tensor, Header]:
        found = self._generations.get(rank)
        if found is None:
            slot = self._held[rank].slot
            mine = rank == self._world.rank
            generation = self._client.generation(slot) if mine else self._client.open(rank)[slot]
            header = generation.header()
            if header is None or header.save != self._candidate.save:
                raise InfrastructureError(f"Step {self._candidate.step} is not in memory any more.")
            buffer = torch.frombuffer(generation.data, dtype=torch.uint8)
            found = self._generations[rank] = generation, buffer, header
        return found

    def _layout(self, rank: int) -> Layout:
        if rank not in self._layouts:
            generation, _, header = self._open(rank)
            self._layouts[rank] = generation.layout(header)
        return self._layouts[rank]

    @property
    def is_at_hand(self) -> bool:
        """True if this rank's node has its own part of the step."""
        return self._world.rank in self._held

    def index(self) -> bytes:
        """Return the index of this rank's own part, an encoded `Layout`.

        Raises:
            InfrastructureError: it is damaged.
        """
        generation, _, header = self._open(self._world.rank)
        return generation.index(header)

    def at_hand(self) -> dict[int, RankState]:
        """Return this rank's own part of the step, if its node has it."""
        rank = self._world.rank
        if not self.is_at_hand:
            return {}
        layout = self._layout(rank)
        return {rank: RankState(layout.entries, layout.skeleton, ())}

    def _verify(self, ranks: Iterable[int]) -> str:
        for rank in ranks:
            problem = self._client.verify(rank, self._held[rank].slot)
            if problem:
                return problem
        return ""

    # ---- what all nodes have

    def everything(self) -> dict[int, RankState]:
        """Return all ranks' parts. Collective.

        Raises:
            InfrastructureError: one of them is damaged.
        """
        described = self._world.agree(self._describe)
        found: dict[int, RankState] = {}
        for data in self._world.gather(msgspec.msgpack.encode(described)):
            for rank, (entries, skeleton, sums) in _described.decode(data).items():
                found[rank] = RankState(entries, skeleton, sums)
        return found

    def _describe(self) -> dict[int, tuple[tuple[TensorEntry, ...], bytes, list[int]]]:
        """Describe the parts that this rank reads for the others."""
        served = [r for r, by in self._candidate.servers.items() if by == self._world.rank]
        problem = self._verify(served)
        if problem:
            raise InfrastructureError(problem)
        found = {}
        for rank in served:
            generation, layout = self._open(rank)[0], self._layout(rank)
            header = generation.header()
            sums = generation.sums(header) if header is not None else None
            if sums is None:
                raise InfrastructureError(f"Rank {rank}'s part of the step is gone from memory.")
            found[rank] = (layout.entries, layout.skeleton, sums)
        return found

    def fetch(self, planned: LoadPlan, known: Mapping[int, RankState]) -> Fetched:
        """Fetch what only other nodes have. Collective."""
        remote = [piece for piece in planned.pieces if piece.rank not in self._held]

        def itemsize(piece: Piece) -> int:
            return ITEM_BYTES[known[piece.rank].tensors[piece.entry].dtype]

        return dict(peers.fetch(self._world, self._candidate.servers, remote, itemsize, self._read))

    # ---- restore

    def _tensors(self, rank: int) -> list[torch.Tensor]:
        if rank not in self._views:
            _, buffer, _ = self._open(rank)
            self._views[rank] = buffers.views(buffer, self._layout(rank).entries)
        return self._views[rank]

    def _read(self, piece: Piece) -> torch.Tensor:
        return buffers.cut(self._tensors(piece.rank)[piece.entry], piece.box)

    def restore(self, planned: LoadPlan, known: Mapping[int, RankState], fetched: Fetched) -> None:
        """Restore everything, and check the data meanwhile.

        Raises:
            InfrastructureError: the data is damaged.
        """

        def read(piece: Piece) -> torch.Tensor:
            data = fetched.get(piece)
            if data is None:
                return self._read(piece)
            dtype = DTYPES[known[piece.rank].tensors[piece.entry].dtype]
            return data.view(dtype).view(piece.box.shape)

        if planned.needed is None:
            self._restore_own(planned)
            return
        used = {piece.rank for piece in planned.pieces} & self._held.keys()
        tensors = assemble(planned, planned.needed, read)
        with _meanwhile(lambda: self._verify(used)):
            planned.restoration.run(tensors)

    def _restore_own(self, planned: LoadPlan) -> None:
        """Restore all of a rank's part."""
        rank = planned.base
        generation, _, _ = self._open(rank)
        header = generation.header()
        sums = generation.sum_array(header) if header is not None else None
        if sums is None:
            with _meanwhile(lambda: self._verify([rank])):
                planned.restoration.run(self._tensors(rank))
            return
        again, share = planned.restoration, len(self._held)
        if isinstance(again, Replay):  # the index would be decoded to the same
            state = again.targets
            verified = VerifiedTensors(generation, state.entries, sums, share, state.places)
        else:
            verified = VerifiedTensors(generation, self._layout(rank).entries, sums, share)
        with contextlib.closing(verified):
            planned.restoration.run(verified)
            problem = verified.problem()
        if problem:
            raise InfrastructureError(problem)


class Candidate(NamedTuple):
    """A step that is completely in memory, on one node or several."""

    key: tuple[SaveId, int]
    """The save and the number of ranks that made it."""
    servers: dict[int, int]
    """By saved rank: the rank that reads it for others."""

    @property
    def save(self) -> SaveId:
        """The save."""
        return self.key[0]

    @property
    def step(self) -> int:
        """The step."""
        return self.save.step

    @property
    def world_size(self) -> int:
        """The number of ranks that made the save."""
        return self.key[1]


def _key(item: HeldGeneration) -> tuple[SaveId, int]:
    return item.save, item.world_size


class Lost(NamedTuple):
    """A save in memory that lacks the parts of some ranks."""

    save: SaveId
    ranks: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """Description of the loss."""
        ranks = ", ".join(map(str, self.ranks))
        several = len(self.ranks) > 1
        return (
            f"Step {self.save.step} was saved to memory, and the part{'s' if several else ''} of"
            f" rank{'s' if several else ''} {ranks} {'are' if several else 'is'} gone."
        )


def newest_lost(everyone: Sequence[Sequence[HeldGeneration]]) -> Lost | None:
    """Return the newest save that any rank sees in memory, or None if none of its parts is missing."""
    items = [item for held in everyone for item in held]
    if not items:
        return None
    key = max(map(_key, items))
    missing = set(range(key[1])) - {item.rank for item in items if _key(item) == key}
    return Lost(key[0], tuple(sorted(missing))) if missing else None


def candidates(
    everyone: Sequence[Sequence[HeldGeneration]], needed: Collection[int] | None = None
) -> list[Candidate]:
    """Return the steps in memory that can be loaded, newest first, from what each rank sees.

    ``needed``: the saved ranks whose parts suffice; by default all of them.
    """
    seen: dict[tuple[SaveId, int], dict[int, list[int]]] = {}
    for viewer, held in enumerate(everyone):
        for item in held:
            seen.setdefault(_key(item), {}).setdefault(item.rank, []).append(viewer)
    found = []
    for key in sorted(seen, reverse=True):
        viewers = seen[key]
        if viewers.keys() >= set(range(key[1]) if needed is None else needed):
            servers = {rank: who[rank % len(who)] for rank, who in viewers.items()}
            found.append(Candidate(key, servers))
    return found


class VerifiedTensors(Sequence[torch.Tensor]):
    """The tensors of one generation, copied and checked in one pass.

    `fill` copies tensors to their targets and hashes them meanwhile. Items are views of the generation, which
    `check` and `problem` hash. Call `problem` and `close` once, at the end.

    Args:
        generation: The generation that holds the tensors.
        entries: The descriptions of the tensors.
        sums: The checksums of the tensors.
        share: The number of processes on this machine that do the same at the same time.
        places: The offsets and sizes of the tensors, if known.
    """

    def __init__(
        self,
        generation: Generation,
        entries: Sequence[TensorEntry],
        sums: Sequence[int] | Words,
        share: int,
        places: Places | None = None,
    ) -> None:
        self._entries = entries
        self._sums = np.asarray(sums, np.uint64)
        self._buffer = torch.frombuffer(generation.data, dtype=torch.uint8)
        offsets, self._sizes = places if places is not None else spans(entries)
        self._sources = offsets + np.uint64(self._buffer.data_ptr())
        self._kernels = kernels()
        self._threads = buffers.threads(share)
        self._checked = np.zeros(len(entries), np.bool_)
        self._damaged: list[int] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._beside: list[Future[None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        return buffers.views(self._buffer, [self._entries[index]])[0]

    def fill(self, pending: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Copy each tensor whose target is plain memory; return the others."""
        direct = self._fit(pending)
        chosen = list(itertools.compress(pending, direct))
        indices = np.array([index for _, index in chosen], np.intp)
        pointers = np.fromiter((t.data_ptr() for t, _ in chosen), np.uint64, len(chosen))
        self.fill_memory(pointers, indices)
        others = [item for item, is_direct in zip(pending, direct, strict=True) if not is_direct]
        self.check(np.array([index for _, index in others], np.intp))
        return others

    def fill_memory(self, pointers: Words, indices: npt.NDArray[np.intp]) -> None:
        """Copy the tensors of these numbers to the addresses."""
        sources, sizes = self._sources[indices], self._sizes[indices]
        if overlap(pointers, sizes):  # tied tensors
            for one in map(slice, range(len(sizes)), range(1, len(sizes) + 1)):
                found = self._kernels.copy_hash(sources[one], pointers[one], sizes[one])
                self._compare(indices[one], found)
        else:
            found = self._kernels.copy_hash(sources, pointers, sizes, self._threads)
            self._compare(indices, found)

    def _fit(self, pending: list[tuple[torch.Tensor, int]]) -> npt.NDArray[np.bool_]:
        """Return for each target whether it is plain memory of the saved shape and type."""
        entries = self._entries
        same = (
            target.shape == entries[index].shape and target.dtype is DTYPES[entries[index].dtype]
            for target, index in pending
        )
        plain = buffers.are_plain([target for target, _ in pending])
        return plain & np.fromiter(same, np.bool_, len(pending))

    def _compare(self, indices: npt.NDArray[np.intp], found: npt.NDArray[np.uint64]) -> None:
        self._checked[indices] = True
        self._damaged += indices[found != self._sums[indices]].tolist()

    def check(self, indices: npt.NDArray[np.intp]) -> None:
        """Check the tensors of these numbers in a thread, while the caller copies them, such as to an accelerator."""
        self._beside.append(self._thread.submit(self._hash, indices))

    def _hash(self, indices: npt.NDArray[np.intp]) -> None:
        found = self._kernels.hash(self._sources[indices], self._sizes[indices], self._threads)
        self._compare(indices, found)

    def problem(self) -> str:
        """Check what was not checked yet; return the first problem, or an empty text."""
        for begun in self._beside:
            begun.result()
        self._hash(np.flatnonzero(~self._checked))
        if not self._damaged:
            return ""
        return f"The tensor {name(self._entries[min(self._damaged)].path)} in memory is damaged."

    def close(self) -> None:
        """Wait until no thread reads the generation."""
        self._thread.shutdown()


@contextlib.contextmanager
def _meanwhile(check: Callable[[], str]) -> Iterator[None]:
    """Run ``check`` beside the block; afterwards raise what it found.

    Raises:
        InfrastructureError: the check found something, or failed.
    """
    found: list[str] = []

    def run() -> None:
        try:
            found.append(check())
        except InfrastructureError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if not found or found[0]:
            raise InfrastructureError(found[0] if found else "The check ended with an error.")
