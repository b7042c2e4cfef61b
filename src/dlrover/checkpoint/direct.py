"""A state written to storage by the worker itself: what is left where no generation fits in memory.

The files are those that the saver would write, in the same place: other ranks' savers may write theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from dlrover.checkpoint import layout as layouts, persist, storage
from dlrover.checkpoint.layout import Layout, PackedLayout, TensorEntry
from dlrover.checkpoint.persist import PEER_PATIENCE, RETRY_DELAYS, Job, Source
from dlrover.checkpoint.policies import Policy
from dlrover.checkpoint.stores import StorageAwayError, Store
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    """Writes one rank's part of steps."""

    store: Store
    identity: str
    keep: Policy
    rank: int
    world_size: int
    session: int

    def write(
        self,
        step: int,
        packed: PackedLayout,
        tensors: Sequence[torch.Tensor],
        metrics: Mapping[str, float],
    ) -> str:
        """Store a step, and wait until all ranks have; what went wrong, or an empty text.

        ``tensors`` are those of the layout, in its order. They are read twice: checksums come first.
        """
        layout = msgspec.msgpack.decode(packed.encoded, type=Layout)
        live = _Live(layout, tensors)
        sums = [xxhash.xxh3_64_intdigest(live.tensor_bytes(entry)) for entry in layout.entries]
        job = Job(
            store=self.store,
            step=step,
            session=self.session,
            world_size=self.world_size,
            sources={self.rank: Source(live, layout, sums)},
            pause=_pause,
            patience=PEER_PATIENCE,
            identity=self.identity,
            metrics=metrics,
        )
        for delay in RETRY_DELAYS:
            problem, again = self._attempt(job)
            if not again:
                return problem
            logger.warning("It is tried again in %g s: %s", delay, problem)
            _pause(delay)
        return self._attempt(job)[0]

    def _attempt(self, job: Job) -> tuple[str, bool]:
        """Persist once; what went wrong, and whether it may go better next time."""
        try:
            persist.persist(job)
        except OSError as error:
            where, reason = self.store.location, error.strerror or error
            return f"Step {job.step} was not stored in {where}: {reason}.", True
        except InfrastructureError as error:
            return str(error), False
        if self.rank == 0:
            try:
                storage.prune(self.store, self.keep)
            except (OSError, StorageAwayError) as error:
                logger.warning("Old checkpoints in %s stay: %s", self.store.location, error)
        return "", False


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class _Live:
    """Has the tensors' bytes as a generation has them, one at a time."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        paths = [entry.path for entry in layout.entries]
        self._tensors: dict[layouts.Path, torch.Tensor] = dict(zip(paths, tensors, strict=True))

    def tensor_bytes(self, entry: TensorEntry) -> memoryview:
        """The bytes of one tensor."""
        if not entry.nbytes:
            return memoryview(b"")
        tensor = self._tensors[entry.path].detach().resolve_conj().resolve_neg().cpu()
        return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
