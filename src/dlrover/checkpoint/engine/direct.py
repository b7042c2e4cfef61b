"""Writes to storage by the worker itself: of a state that fits in no generation, and of what a load found.

The files have the saver's format and place, because other ranks' savers may write their own parts.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from dlrover._util import decoding
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import Layout, PackedLayout, TensorEntry
from dlrover.checkpoint.machine.policies import Policy
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import persist, storage
from dlrover.checkpoint.storage.lease import Lease
from dlrover.checkpoint.storage.persist import PEER_PATIENCE, PersistJob, RankPart
from dlrover.checkpoint.storage.stored_step import index_file
from dlrover.checkpoint.storage.stores import Store, reason
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DirectWriter:
    """Writer of one rank's part of steps."""

    store: Store
    identity: str
    keep: Policy
    rank: int
    world_size: int
    lease: Lease | None = None
    """Rank 0's lease; None on other ranks."""

    def write(
        self,
        save: SaveId,
        packed: PackedLayout,
        tensors: Sequence[torch.Tensor],
        metrics: Mapping[str, float],
    ) -> str:
        """Store a step and wait until all ranks have; return what went wrong, or an empty text.

        ``tensors`` are those of the layout, in its order. They are read twice, as checksums come first.
        """
        layout = decoding.msgpack(packed.encoded, Layout)
        paths = [entry.path for entry in layout.entries]
        read = functools.partial(_live, dict(zip(paths, tensors, strict=True)))
        sums = [xxhash.xxh3_64_intdigest(read(entry)) for entry in layout.entries]
        job = PersistJob(
            store=self.store,
            save=save,
            world_size=self.world_size,
            sources={self.rank: RankPart(read, layout, sums)},
            pause=_wait,
            patience=PEER_PATIENCE,
            guard=lambda: self._guard(save.session, _wait),
            metrics=metrics,
        )
        problem = "it was interrupted"
        try:
            problem = persist.retry(
                save.step,
                self.store.location,
                lambda: self._persist(job),
                _wait,
                lambda: self._prune(job),
            )
        finally:
            if problem:
                self.give_up(save)
        return problem

    def give_up(self, save: SaveId) -> None:
        """Let other ranks, and savers of other nodes, see at once that a save will not be complete."""
        try:
            storage.give_up(self.store, self.identity, save)
        except OSError as error:
            logger.warning("Other ranks may wait for step %d in vain: %s", save.step, error)

    def give_up_lost(self, save: SaveId) -> None:
        """Give up a save whose saver has ended, unless this rank's part is written and rank 0's saver may publish it."""
        try:
            part = self.store.draft(save).path(index_file(self.rank))
            written = self.rank > 0 and self.store.exists(part)
        except OSError:
            written = False
        if not written:
            self.give_up(save)

    def guard(self, session: int) -> None:
        """Raise if this world may not change the directory, or if that is not known yet.

        Raises:
            OSError: the directory is another one, or cannot be read.
            InfrastructureError: another training has taken the directory, or may still use it.
        """
        self._guard(session, _refuse_to_wait)

    def _guard(self, session: int, pause: Callable[[float], object]) -> None:
        if self.identity:
            storage.check_identity(self.store, self.identity)
        if self.lease is not None:
            self.lease.check(session, pause)

    def _persist(self, job: PersistJob) -> None:
        persist.persist(job)
        self._prune(job)

    def _prune(self, job: PersistJob) -> None:
        if self.rank == 0:
            try:
                storage.prune(self.store, self.keep, job.guard)
            except (OSError, InfrastructureError) as error:
                logger.warning("Old checkpoints in %s stay: %s", self.store.location, error)


class LoadFindings:
    """What loads found and the directory does not show yet: damaged steps, and a return to an older step."""

    def __init__(self) -> None:
        self.damaged: dict[int, bytes] = {}
        """Damaged stored steps, with their manifests; a checkpointer that only reads leaves them in place."""
        self._went_back: tuple[int, int] | None = None
        """After going back: the stored step to continue from and its line, until a save follows."""

    def go_back(self, step: int, line: int) -> None:
        """Begin a new line at a stored step."""
        self._went_back = step, line

    def continue_from(self, step: int | None) -> None:
        """After going back: continue from another stored step, perhaps the newest one; None: from none."""
        if self._went_back is not None:
            self._went_back = None if step is None else (step, self._went_back[1])

    def apply(self, writer: DirectWriter, session: int) -> None:
        """Quarantine damaged steps before new ones come; record the line of a training that went back."""
        if not self.damaged and self._went_back is None:
            return
        if writer.rank == 0:
            try:
                writer.guard(session)
            except (OSError, InfrastructureError) as error:
                logger.warning("What the load found is not marked in storage yet: %s", error)
                return
        damaged, self.damaged = self.damaged, {}
        if writer.rank == 0:
            for step, manifest in damaged.items():
                storage.quarantine(writer.store, step, manifest)
            if self._went_back is not None:
                step, line = self._went_back
                try:
                    storage.begin_line(writer.store, step, line)
                except (OSError, InfrastructureError) as error:
                    logger.warning("It is not recorded that step %d is the newest: %s", step, error)
                    return
        self._went_back = None


def lost(store: Store, save: SaveId) -> str:
    """Return the error message for a save whose saver ended; empty if the save, or a later one, is stored."""
    step = save.step
    try:
        last = storage.tracked(store)
        if last is not None and last.session == save.session and last > save:
            return ""  # this one may have been stored and pruned
        if storage.is_published(store, save):
            return ""
    except (OSError, InfrastructureError) as error:
        return (
            f"The saver ended, and whether step {step} is stored cannot be read: {reason(error)}."
        )
    return f"Step {step} was not stored: the saver ended before."


def _wait(seconds: float) -> bool:
    return threading.Event().wait(seconds)


def _refuse_to_wait(_: float) -> None:
    raise InfrastructureError("Another training may still use the directory.")


def _live(tensors: Mapping[layouts.Path, torch.Tensor], entry: TensorEntry) -> memoryview:
    """Return the bytes of one tensor of a state."""
    if not entry.nbytes:
        return memoryview(b"")
    tensor = tensors[entry.path].detach().resolve_conj().resolve_neg().cpu()
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
