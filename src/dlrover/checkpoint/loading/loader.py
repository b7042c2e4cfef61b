"""Loading: the choice of step and source, and the transfer of tensors to the ranks that need them."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from dlrover._native.kernels import overlap
from dlrover._util import decoding
from dlrover.checkpoint.engine import buffers, shared
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.engine.tree import DTYPES
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading.memory_step import (
    Candidate,
    Fetched,
    Lost,
    MemoryStep,
    candidates,
    newest_lost,
)
from dlrover.checkpoint.loading.plan import LoadPlan, LoadRequest, Planner, RankState, assemble
from dlrover.checkpoint.loading.replay import Replayer
from dlrover.checkpoint.machine.extent import Piece
from dlrover.checkpoint.machine.saves import SaveId, StepOrder
from dlrover.checkpoint.saver.protocol import HeldGeneration, ValidGenerations
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stored_step import StoredStep, StoredTensor
from dlrover.checkpoint.storage.stores import (
    MANIFEST,
    StorageAwayError,
    Store,
    explained,
    failure,
    join,
    step_folder,
)
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)

MAX_STORED = 64
"""Stored steps that a load considers, newest first, unless a step is requested."""
ATTEMPTS = 3
"""Attempts to read a stored step that is stored again meanwhile."""

_stored = decoding.msgpack_decoder(list[tuple[int, SaveId | None]])
_tracked = decoding.msgpack_decoder(SaveId | None)
_held = decoding.msgpack_decoder(list[HeldGeneration])


class LoadedStep(NamedTuple):
    """The step that was loaded."""

    step: int
    source: Literal["memory", "peer", "storage"]
    save: SaveId | None
    """The loaded save of the step; None if unknown."""


class Loader:
    """Collective load of a state; all ranks call `load` at the same time."""

    def __init__(
        self,
        world: TorchWorld,
        client: SaverClient | None,
        store: Store,
        identity: str,
        planner: Planner,
        replay: Replayer | None = None,
    ) -> None:
        """Create a loader; without a client, it loads nothing from memory.

        ``replay`` is tried on this rank's own part in memory before ``planner``.
        """
        self._world = world
        self._client = client
        self._store = store
        self._identity = identity
        self._planner = planner
        self._replay = replay
        self.problems: list[str] = []
        """Reasons why steps could not be loaded."""
        self.damaged: dict[int, bytes] = {}
        """Damaged stored steps, with their manifests."""
        self.lost: Lost | None = None
        """The newest save in memory, if parts of it are missing; else None."""
        self.unrecorded = ""
        """Reason why this node's saver has no record of whole saves; empty if it has, or none existed."""

    def load(self) -> LoadedStep | None:
        """Restore the newest step that all ranks can load; if there is none, leave memory as it is.

        Raises:
            ConfigurationError: a step is complete, but does not fit the state.
        """
        holding = self._world.agree(self._look)
        mine, self.unrecorded = holding.held, holding.unrecorded
        everyone = [_held.decode(data) for data in self._world.gather(msgspec.msgpack.encode(mine))]
        held = candidates(everyone, {self._world.rank} if self._world.alone else None)
        self.lost = newest_lost(everyone)
        last = self._last_stored()
        fresh = [one for one in held if last is None or one.save >= last]
        for candidate in fresh:
            if found := self._try_memory(candidate, mine):
                return found
        # Memory may be older than storage: a node was away, or the training went back.
        for attempt in self._older(held[len(fresh) :], mine):
            if found := attempt():
                return found
        return None

    def warn_of_loss(self, found: LoadedStep) -> None:
        """Warn if the training falls back by more than one save: ranks may be one save apart."""
        lost = self.lost
        if lost is None or self._world.rank:
            return
        if found.save is None or lost.save.number > found.save.number + 1:
            logger.warning("%s The training goes back to step %d", lost.sentence, found.step)

    def _look(self) -> ValidGenerations:
        return self._client.look() if self._client is not None else ValidGenerations(())

    def _keep(self, save: SaveId | None) -> None:
        """Tell the saver which save to continue from; None: none in memory. Collective."""
        client = self._client
        if client is not None and not self._world.alone:  # the others may still need older ones
            self._world.agree(lambda: client.keep(save))

    def _older(
        self, held: Sequence[Candidate], mine: Sequence[HeldGeneration]
    ) -> list[Callable[[], LoadedStep | None]]:
        """Return attempts to load stored steps and the given ones in memory, newest first. Collective."""
        stored = dict(itertools.islice(self._stored_steps().items(), MAX_STORED))
        order = StepOrder(save for save in stored.values() if save is not None)
        attempts: list[tuple[tuple[int, ...], Callable[[], LoadedStep | None]]] = [
            ((*order.key(step, save), 0), functools.partial(self._try_stored, step, save))
            for step, save in stored.items()
        ]
        attempts += [
            ((*order.key(one.step, one.save), 1), functools.partial(self._try_memory, one, mine))
            for one in held
        ]
        return [attempt for _, attempt in sorted(attempts, key=lambda pair: pair[0], reverse=True)]

    def _plan(
        self, known: Mapping[int, RankState], saved_size: int, *, complete: bool, own: bool = False
    ) -> LoadPlan | None:
        return self._planner(
            LoadRequest(
                known,
                base=self._world.rank if self._world.rank < saved_size else 0,
                moved=saved_size != self._world.size,
                complete=complete,
                own=own,
                size=saved_size,
            )
        )

    # ---- memory

    def _try_memory(
        self, candidate: Candidate, mine: Sequence[HeldGeneration]
    ) -> LoadedStep | None:
        assert self._client is not None, "there is something in memory"
        step = MemoryStep(self._world, self._client, candidate, mine)
        try:
            source = self._restore_from_memory(step, candidate.world_size)
        except StorageAwayError:
            raise  # another rank cannot go on
        except InfrastructureError as error:
            logger.warning("Step %d is not loaded from memory: %s", candidate.step, error)
            self.problems.append(str(error))
            return None
        self._keep(candidate.save)
        return LoadedStep(candidate.step, source, candidate.save)

    def _restore_from_memory(self, step: MemoryStep, saved_size: int) -> Literal["memory", "peer"]:
        world = self._world
        planned = world.agree(lambda: self._plan_at_hand(step, saved_size))
        known: dict[int, RankState] = {}
        fetched: Fetched = {}
        if any(needs_more for (needs_more,) in world.exchange([planned is None])):
            if world.alone:
                raise InfrastructureError(
                    "It takes the memory of other ranks, which go on training."
                )
            known = step.everything()
            planned = world.agree(
                lambda: self._plan(known, saved_size, complete=True, own=step.is_at_hand)
            )
            assert planned is not None, "everything is known"
            fetched = step.fetch(planned, known)
        ready = planned
        assert ready is not None, "no rank needs more"
        world.agree(lambda: step.restore(ready, known, fetched))
        return "peer" if fetched else "memory"

    def _plan_at_hand(self, step: MemoryStep, saved_size: int) -> LoadPlan | None:
        """Plan with this rank's own part; return None if that is not enough."""
        if self._replay is not None and saved_size == self._world.size and step.is_at_hand:
            again = self._replay.plan(step.index())
            if again is not None:
                state = again.targets
                return LoadPlan(again, self._world.rank, state.entries, None)
        return self._plan(step.at_hand(), saved_size, complete=False)

    # ---- storage

    def _last_stored(self) -> SaveId | None:
        """Return the newest save that rank 0 knows to be stored; None if there is none. Collective.

        Raises:
            StorageAwayError: storage cannot be read now, and memory may be older.
        """

        def look() -> SaveId | None:
            return storage.tracked(self._store) if self._world.leads else None

        last = self._world.agree(look)
        agreed: SaveId | None = _tracked.decode(self._world.gather(msgspec.msgpack.encode(last))[0])
        return agreed

    def _try_stored(self, step: int, save: SaveId | None) -> LoadedStep | None:
        """Restore a step; return None if it is damaged.

        Raises:
            StorageAwayError: a rank cannot read it now; an older step would be no better.
        """
        seen = self._world.agree(functools.partial(self._manifest, step))
        try:
            save = self._restore_same(step, save)
        except StorageAwayError:
            raise
        except InfrastructureError as error:
            self._world.agree(self._check_directory)  # else every file would be missing
            self.problems.append(str(error))
            self.damaged[step] = seen
            logger.error("Step %d cannot be loaded: %s", step, error)  # noqa: TRY400
            return None
        self._keep(None)
        return LoadedStep(step, "storage", save)

    def _manifest(self, step: int) -> bytes:
        """Return the step's manifest on rank 0, to recognize the step if another save replaces it."""
        if not self._world.leads:
            return b""
        try:
            return self._store.read(join(step_folder(step), MANIFEST))
        except FileNotFoundError:
            return b""
        except (OSError, MemoryError) as error:
            raise failure(error, f"Step {step} in {self._store.location} cannot be read") from error

    def _check_directory(self) -> None:
        with explained(f"{self._store.location} cannot be read"):
            storage.check_identity(self._store, self._identity)

    def load_stored(self, step: int) -> LoadedStep:
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
        return LoadedStep(step, "storage", self._restore_same(step, there[step]))

    def _stored_steps(self) -> dict[int, SaveId | None]:
        """Return the stored steps that rank 0 sees, newest first. Collective."""
        listed = msgspec.msgpack.encode(self._world.agree(self._listed))
        return dict(_stored.decode(self._world.gather(listed)[0]))

    def _listed(self) -> list[tuple[int, SaveId | None]]:
        found: dict[int, SaveId | None] = {}
        if self._world.leads:
            self._check_directory()
            with explained(f"{self._store.location} cannot be read"):
                found = storage.saves(self._store)
        return list(found.items())

    def _restore_same(
        self, step: int, save: SaveId | None, attempts: int = ATTEMPTS
    ) -> SaveId | None:
        """Restore the same save of a step on all ranks, or its replacement; return the save. Collective."""
        try:
            self._await_sight(step)
            self._world.agree(functools.partial(self._restore_stored, step, save))
        except StorageAwayError:
            raise
        except InfrastructureError:
            replaced = self._world.agree(functools.partial(self._is_replaced, step, save))
            again = attempts > 1 and any(flag for (flag,) in self._world.exchange([replaced]))
            there = self._stored_steps() if again else {}
            if step not in there:
                raise
        else:
            return save
        logger.info("Step %d was stored again while it was read", step)
        return self._restore_same(step, there[step], attempts - 1)

    def _is_replaced(self, step: int, save: SaveId | None) -> bool:
        with explained(f"Step {step} in {self._store.location} cannot be read"):
            return _differ(storage.save_of(self._store, step), save)

    def _await_sight(self, step: int) -> None:
        """Wait until all ranks see a step that rank 0 sees. Collective.

        Raises:
            StorageAwayError: a rank does not see it, although rank 0 still does.
            InfrastructureError: the step was deleted.
        """
        world, manifest = self._world, join(step_folder(step), MANIFEST)
        sees = world.agree(lambda: world.rank == 0 or shared.until_seen(self._store, manifest))
        blind = [rank for rank, (flag,) in enumerate(world.exchange([sees])) if not flag]
        if not blind:
            return
        there = world.agree(lambda: world.leads and self._store.exists(manifest))
        where = self._store.where(manifest)
        if not world.exchange([there])[0][0]:
            raise InfrastructureError(f"{where} was deleted while it was loaded.")
        raise StorageAwayError(
            f"Rank {blind[0]} does not see {where} after {shared.PATIENCE:g} s, and rank 0 does: look whether"
            " the directory is mounted on its node."
        )

    def _restore_stored(self, step: int, save: SaveId | None) -> None:
        with StoredStep(self._store, step_folder(step)) as stored:
            if save is not None and _differ(stored.manifest.save, save):
                raise InfrastructureError(
                    f"Step {step} in {self._store.location} was stored again while it was read."
                )
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


def _differ(found: SaveId | None, save: SaveId | None) -> bool:
    """Return whether ``found`` is another save than ``save``; a new line does not make it another one."""
    if found is None or save is None:
        return found is not None
    return (found.session, found.number) != (save.session, save.number)


class _Stored:
    """Reader of pieces of a stored step."""

    def __init__(self, stored: StoredStep) -> None:
        self._stored = stored

    def tensors(self, planned: LoadPlan) -> Sequence[torch.Tensor]:
        """Return the tensors that the plan needs.

        Raises:
            InfrastructureError: some of it is damaged.
        """
        if planned.needed is None:
            tensors = self._stored.index(planned.base).tensors
            self._stored.expect(tensors)
            return _OnDemand(self._stored, tensors)
        self._stored.expect(self._tensor(piece) for piece in planned.pieces)
        return assemble(planned, planned.needed, self._read)

    def _read(self, piece: Piece) -> torch.Tensor:
        tensor = self._tensor(piece)
        part = buffers.cut(buffers.view(self._stored.verified(tensor), tensor), piece.box)
        return part.clone() if part.nbytes < tensor.nbytes else part  # this releases the rest

    def _tensor(self, piece: Piece) -> StoredTensor:
        return self._stored.index(piece.rank).tensors[piece.entry]


class _OnDemand(Sequence[torch.Tensor]):
    """The tensors of one rank, read and checked one by one, where possible straight into their targets."""

    def __init__(self, stored: StoredStep, tensors: Sequence[StoredTensor]) -> None:
        self._stored = stored
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        tensor = self._tensors[index]
        return buffers.view(self._stored.verified(tensor), tensor)

    def fill(self, pending: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Read each tensor whose target is plain memory; return the others."""
        direct = [self._fits(target, self._tensors[index]) for target, index in pending]
        chosen = list(itertools.compress(pending, direct))
        pointers = np.fromiter((target.data_ptr() for target, _ in chosen), np.uint64, len(chosen))
        sizes = np.fromiter((target.nbytes for target, _ in chosen), np.uint64, len(chosen))
        # Targets that share memory are read one after another: else the check of one would see another's bytes.
        threads = 1 if overlap(pointers, sizes) else buffers.threads(1)
        with ThreadPoolExecutor(threads) as pool:
            for done in pool.map(self._fill, chosen):
                assert done is None
        return [item for item, is_direct in zip(pending, direct, strict=True) if not is_direct]

    def _fits(self, target: torch.Tensor, tensor: StoredTensor) -> bool:
        same = (tuple(target.shape), target.dtype) == (tensor.shape, DTYPES[tensor.dtype])
        return same and buffers.is_plain(target)

    def _fill(self, item: tuple[torch.Tensor, int]) -> None:
        target, index = item
        flat = target.detach().view(-1).view(torch.uint8)
        self._stored.fill(self._tensors[index], memoryview(flat.numpy()))


def _rank_state(stored: StoredStep, rank: int) -> RankState:
    index = stored.index(rank)
    return RankState(index.tensors, index.skeleton, [tensor.xxh3 for tensor in index.tensors])
