"""Loading: which step, from where, and how its tensors get to the ranks that need them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import torch

from dlrover.checkpoint import copying, peers, storage
from dlrover.checkpoint.client import SaverClient
from dlrover.checkpoint.extent import Piece
from dlrover.checkpoint.layout import ITEM_BYTES, Layout, TensorEntry
from dlrover.checkpoint.memory import Generation
from dlrover.checkpoint.pieces import assemble, cut
from dlrover.checkpoint.plan import Plan, Planner, Question, RankState
from dlrover.checkpoint.protocol import Held
from dlrover.checkpoint.stores import StorageAwayError, Store, failure, step_folder
from dlrover.checkpoint.tree import DTYPES
from dlrover.checkpoint.verified import LARGE, VerifiedCopy
from dlrover.checkpoint.world import World
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)

MAX_STORED = 64
"""Stored steps that a load considers, newest first."""

_held = msgspec.msgpack.Decoder(list[Held])
_described = msgspec.msgpack.Decoder(dict[int, tuple[tuple[TensorEntry, ...], bytes, list[int]]])


class Found(NamedTuple):
    """What was loaded."""

    step: int
    source: Literal["memory", "peer", "storage"]


class Loader:
    """Loads a state on every rank. All of them call `load` at the same time."""

    def __init__(self, world: World, client: SaverClient, store: Store, planner: Planner) -> None:
        self._world = world
        self._client = client
        self._store = store
        self._planner = planner
        self.problems: list[str] = []
        """Why steps were passed over."""

    def load(self) -> Found | None:
        """Restore the newest step that all ranks can; None if there is none.

        Raises:
            ConfigurationError: a step is whole, but does not fit the state.
        """
        return self._from_memory() or self._from_storage()

    def _plan(
        self, known: Mapping[int, RankState], saved_size: int, *, complete: bool, own: bool = False
    ) -> Plan | None:
        return self._planner(
            Question(
                known,
                base=self._world.rank if self._world.rank < saved_size else 0,
                moved=saved_size != self._world.size,
                complete=complete,
                own=own,
                size=saved_size,
            )
        )

    # ---- memory

    def _from_memory(self) -> Found | None:
        mine = self._client.look()
        everyone = [_held.decode(data) for data in self._world.gather(msgspec.msgpack.encode(mine))]
        for candidate in candidates(everyone):
            step = MemoryStep(self._world, self._client, candidate, mine)
            try:
                source = self._restore_from_memory(step, candidate.world_size)
            except InfrastructureError as error:
                logger.warning("Step %d is not loaded from memory: %s", candidate.step, error)
                self.problems.append(str(error))
            else:
                self._client.keep(candidate.step, candidate.key[1])
                return Found(candidate.step, source)
        self._client.keep(-1, 0)
        return None

    def _restore_from_memory(self, step: MemoryStep, saved_size: int) -> Literal["memory", "peer"]:
        world = self._world
        known = world.agree(step.at_hand)
        planned = world.agree(lambda: self._plan(known, saved_size, complete=False))
        fetched: Fetched = {}
        if any(needs_more for (needs_more,) in world.exchange([planned is None])):
            own = bool(known)
            known = step.everything()
            planned = world.agree(lambda: self._plan(known, saved_size, complete=True, own=own))
            assert planned is not None, "everything is known"
            fetched = step.fetch(planned, known)
        ready = planned
        assert ready is not None, "no rank needs more"
        world.agree(lambda: step.restore(ready, known, fetched))
        return "peer" if fetched else "memory"

    # ---- storage

    def _from_storage(self) -> Found | None:
        for step in self._stored_steps():
            if self._try_stored(step):
                return Found(step, "storage")
        return None

    def _try_stored(self, step: int) -> bool:
        """Restore a step; one that is damaged is put out of the way."""
        try:
            self._world.agree(functools.partial(self._restore_stored, step))
        except InfrastructureError as error:
            self.problems.append(str(error))
            away = self._world.exchange([isinstance(error, StorageAwayError)])
            if any(flag for (flag,) in away):
                raise  # an older step would be no better
            if self._world.rank == 0:
                bad = storage.quarantine(self._store, step)
                logger.error("Step %d cannot be loaded and is now %s: %s", step, bad, error)  # noqa: TRY400
            return False
        return True

    def load_stored(self, step: int) -> Found:
        """Restore one stored step.

        Raises:
            ConfigurationError: there is no such step, or it does not fit the state.
            InfrastructureError: it is damaged.
        """
        there = self._stored_steps()
        if step not in there:
            known = ", ".join(map(str, there)) or "none"
            raise ConfigurationError(
                f"step is {step}, which is not stored in {self._store.location}; there is: {known}."
            )
        self._world.agree(functools.partial(self._restore_stored, step))
        return Found(step, "storage")

    def _stored_steps(self) -> list[int]:
        """Those that rank 0 sees, newest first. Collective."""
        listed = self._world.agree(self._listed)
        return [step for step in self._world.exchange(listed)[0] if step >= 0]

    def _listed(self) -> list[int]:
        found: list[int] = []
        if self._world.rank == 0:
            try:
                found = storage.steps(self._store)
            except OSError as error:
                raise failure(
                    error, f"{self._store.location} cannot be read: {error.strerror}."
                ) from error
        return [*found, *[-1] * MAX_STORED][:MAX_STORED]

    def _restore_stored(self, step: int) -> None:
        with storage.StoredStep(self._store, step_folder(step)) as stored:
            size, alike = stored.manifest.world_size, stored.manifest.replicated
            base = self._world.rank if self._world.rank < size else 0
            moved = size != self._world.size
            known = {base: _rank_state(stored, base)}
            planned = self._plan(known, size, complete=alike and moved)
            if planned is None:
                known = {rank: _rank_state(stored, rank) for rank in range(size)}
                planned = self._plan(known, size, complete=True, own=True)
            assert planned is not None, "everything is known"
            planned.restoration.run(_Stored(stored).tensors(planned))


class _Stored:
    """Reads pieces of a stored step."""

    def __init__(self, stored: storage.StoredStep) -> None:
        self._stored = stored

    def tensors(self, planned: Plan) -> list[torch.Tensor]:
        """What the plan needs.

        Raises:
            InfrastructureError: some of it is damaged.
        """
        if planned.needed is None:
            tensors = self._stored.index(planned.base).tensors
            self._stored.expect(tensors)
            return [self._view(tensor) for tensor in tensors]
        self._stored.expect(self._tensor(piece) for piece in planned.pieces)
        return assemble(planned, planned.needed, self._read)

    def _read(self, piece: Piece) -> torch.Tensor:
        return cut(self._view(self._tensor(piece)), piece)

    def _tensor(self, piece: Piece) -> storage.StoredTensor:
        return self._stored.index(piece.chunk.rank).tensors[piece.chunk.index]

    def _view(self, tensor: storage.StoredTensor) -> torch.Tensor:
        return copying.view(self._stored.verified(tensor), tensor)


def _rank_state(stored: storage.StoredStep, rank: int) -> RankState:
    index = stored.index(rank)
    return RankState(index.tensors, index.skeleton, [tensor.xxh3 for tensor in index.tensors])


# ---- memory of this node and of others

Fetched = dict[Piece, torch.Tensor]
"""What came from other ranks, by what was asked for."""


class MemoryStep:
    """A step in the memory of the nodes."""

    def __init__(
        self, world: World, client: SaverClient, candidate: Candidate, mine: Sequence[Held]
    ) -> None:
        self._world = world
        self._client = client
        self._candidate = candidate
        self._held = {item.rank: item for item in mine if candidate.key == _key(item)}
        self._generations: dict[int, tuple[Generation, torch.Tensor, Layout]] = {}
        self._views: dict[int, list[torch.Tensor]] = {}

    # ---- what this node has

    def _open(self, rank: int) -> tuple[Generation, torch.Tensor, Layout]:
        found = self._generations.get(rank)
        if found is None:
            slot = self._held[rank].slot
            mine = rank == self._world.rank
            generation = self._client.generation(slot) if mine else self._client.open(rank)[slot]
            header = generation.header()
            if header is None or header.step != self._candidate.step:
                raise InfrastructureError(f"Step {self._candidate.step} is not in memory any more.")
            buffer = torch.frombuffer(generation.data, dtype=torch.uint8)
            found = self._generations[rank] = generation, buffer, generation.layout(header)
        return found

    def at_hand(self) -> dict[int, RankState]:
        """This rank's own part of the step, if its node has it."""
        rank = self._world.rank
        if rank not in self._held:
            return {}
        _, _, layout = self._open(rank)
        return {rank: RankState(layout.entries, layout.skeleton, ())}

    def _verify(self, ranks: Iterable[int]) -> str:
        for rank in ranks:
            problem = self._client.verify(rank, self._held[rank].slot)
            if problem:
                return problem
        return ""

    # ---- what all nodes have

    def everything(self) -> dict[int, RankState]:
        """All ranks' parts. Collective.

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
        """The parts that this rank reads for the others."""
        served = [r for r, by in self._candidate.servers.items() if by == self._world.rank]
        problem = self._verify(served)
        if problem:
            raise InfrastructureError(problem)
        found = {}
        for rank in served:
            generation, _, layout = self._open(rank)
            header = generation.header()
            sums = generation.sums(header) if header is not None else None
            if sums is None:
                raise InfrastructureError(f"Rank {rank}'s part of the step is gone from memory.")
            found[rank] = (layout.entries, layout.skeleton, sums)
        return found

    def fetch(self, planned: Plan, known: Mapping[int, RankState]) -> Fetched:
        """Bring what only other nodes have. Collective."""
        remote = [piece for piece in planned.pieces if piece.chunk.rank not in self._held]

        def itemsize(piece: Piece) -> int:
            return ITEM_BYTES[known[piece.chunk.rank].tensors[piece.chunk.index].dtype]

        return dict(peers.fetch(self._world, self._candidate.servers, remote, itemsize, self._read))

    # ---- restore

    def _tensors(self, rank: int) -> list[torch.Tensor]:
        if rank not in self._views:
            _, buffer, layout = self._open(rank)
            self._views[rank] = copying.views(buffer, layout.entries)
        return self._views[rank]

    def _read(self, piece: Piece) -> torch.Tensor:
        return cut(self._tensors(piece.chunk.rank)[piece.chunk.index], piece)

    def restore(self, planned: Plan, known: Mapping[int, RankState], fetched: Fetched) -> None:
        """Put everything in its place, and check meanwhile what is read.

        Raises:
            InfrastructureError: it is damaged.
        """

        def read(piece: Piece) -> torch.Tensor:
            data = fetched.get(piece)
            if data is None:
                return self._read(piece)
            dtype = DTYPES[known[piece.chunk.rank].tensors[piece.chunk.index].dtype]
            return data.view(dtype).view(piece.box.shape)

        if planned.needed is None:
            self._restore_own(planned)
            return
        used = {piece.chunk.rank for piece in planned.pieces} & self._held.keys()
        tensors = assemble(planned, planned.needed, read)
        with _meanwhile(lambda: self._verify(used)):
            planned.restoration.run(tensors)

    def _restore_own(self, planned: Plan) -> None:
        """Restore all of a rank's part: this process checks what is large, the saver the rest."""
        rank = planned.base
        generation, _, layout = self._open(rank)
        header = generation.header()
        sums = generation.sums(header) if header is not None else None
        if sums is None:
            with _meanwhile(lambda: self._verify([rank])):
                planned.restoration.run(self._tensors(rank))
            return
        verified = VerifiedCopy(generation, layout.entries, sums, len(self._held))
        with _meanwhile(lambda: self._client.verify(rank, self._held[rank].slot, LARGE)):
            planned.restoration.run(self._tensors(rank), verified.copy)
            problem = verified.problem()
        if problem:
            raise InfrastructureError(problem)


class Candidate(NamedTuple):
    """A step that is in memory, all of it, on one node or several."""

    key: tuple[int, int, int]
    """Step, session, and how many ranks saved it."""
    servers: dict[int, int]
    """By saved rank: the rank that reads it for others."""

    @property
    def step(self) -> int:
        """The step."""
        return self.key[0]

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.key[2]


def _key(item: Held) -> tuple[int, int, int]:
    return item.step, item.session, item.world_size


def candidates(everyone: Sequence[Sequence[Held]]) -> list[Candidate]:
    """The steps that can be loaded, newest first, from what each rank sees."""
    seen: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for viewer, held in enumerate(everyone):
        for item in held:
            seen.setdefault(_key(item), {}).setdefault(item.rank, []).append(viewer)
    found = []
    for key in sorted(seen, reverse=True):
        viewers = seen[key]
        if viewers.keys() >= set(range(key[2])):
            servers = {rank: who[rank % len(who)] for rank, who in viewers.items()}
            found.append(Candidate(key, servers))
    return found


@contextlib.contextmanager
def _meanwhile(check: Callable[[], str]) -> Iterator[None]:
    """Run ``check`` beside the block; afterwards raise what it found.

    Raises:
        InfrastructureError: it found something, or could not look.
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
