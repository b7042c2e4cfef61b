"""Checksums of generations: computed in the background, and compared when memory is read."""

from __future__ import annotations

import contextlib
from collections import deque

from dlrover.checkpoint.machine.layout import name
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.ranks import Ranks, Slot
from dlrover.checkpoint.storage.persist import Source
from dlrover.errors import InfrastructureError


class Checksums:
    """Checksums of all ranks' generations."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._unsummed: deque[tuple[Slot, int]] = deque()

    def ask(self, slot: Slot) -> None:
        """Queue a generation for its checksums. Hold the lock of the ranks."""
        self._unsummed.append((slot, slot.epoch))

    def compute_next(self) -> None:
        """Wait for a queued generation and compute its checksums, unless it is granted again meanwhile."""
        with self._ranks.changed:
            self._ranks.changed.wait_for(lambda: bool(self._unsummed))
            slot, epoch = self._unsummed.popleft()
            generation = slot.generation
            if slot.epoch != epoch:
                return
        with contextlib.suppress(InfrastructureError):  # overwritten while it was read
            self._add(slot, generation, epoch)

    def _add(self, slot: Slot, generation: Generation, epoch: int) -> list[int] | None:
        header = generation.header()
        if header is None:
            return None
        sums = memory.compute_sums(generation, generation.layout(header))
        with self._ranks.changed:
            if slot.epoch != epoch:
                return None
            generation.store_sums(header, sums)
            self._ranks.changed.notify_all()
        return sums

    def verify(self, slot: Slot, below: int = 0) -> str:
        """Compare a generation with its checksums; return the problem, or an empty text.

        Only tensors of less than ``below`` bytes are compared; 0 means all.
        """
        with self._ranks.changed:
            generation, epoch = slot.generation, slot.epoch
        try:
            header = generation.header()
            if header is None:
                return "The generation is not valid."
            sums = generation.sums(header)
            if sums is None:
                self._add(slot, generation, epoch)
                return ""
            layout = generation.layout(header)
        except InfrastructureError as error:
            return str(error)
        for entry, expected in zip(layout.entries, sums, strict=True):
            if (not below or entry.nbytes < below) and memory.sum_of(generation, entry) != expected:
                return f"The tensor {name(entry.path)} of step {header.save.step} in memory is damaged."
        return ""

    def source(self, slot: Slot, save: SaveId) -> Source:
        """Return the source to persist a save from a generation.

        Raises:
            InfrastructureError: the generation no longer holds the save.
        """
        generation, epoch = slot.generation, slot.epoch
        header = generation.header()
        sums = generation.sums(header) if header is not None else None
        if header is not None and sums is None:
            sums = self._add(slot, generation, epoch)
        if header is None or sums is None or header.save != save:
            raise InfrastructureError(f"Step {save.step} is not in memory any more.")
        return Source(generation, generation.layout(header), sums)
