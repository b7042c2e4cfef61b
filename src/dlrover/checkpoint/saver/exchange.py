"""Replicas in the memory of a node: which saves to send to other nodes, and which to accept.

A replica is memory of a rank that has no worker on this node. It has two generations, and the older one
is overwritten. A generation becomes valid only after all of it was compared with its checksums.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from dlrover.checkpoint.machine.layout import PackedLayout, name
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import INDEX_RESERVE, PAGE, Generation, Header
from dlrover.checkpoint.saver.ranks import (
    ENOUGH,
    GenerationSlot,
    RankMemory,
    Ranks,
    SaveGroup,
    reserve,
)
from dlrover.checkpoint.storage import faults
from dlrover.errors import DLRoverError, InfrastructureError, ProtocolError


class SupersededError(DLRoverError):
    """A replica is no longer wanted, which is not a failure."""

    def __init__(self) -> None:
        super().__init__(
            "There is another world, or the memory of the replica is used for something else."
        )


@dataclass(frozen=True)
class Copy:
    """A generation that is being sent or received, valid until its memory is granted again."""

    group: SaveGroup
    header: Header
    slot: GenerationSlot
    epoch: int
    generation: Generation

    @property
    def nbytes(self) -> int:
        """Bytes after the header page, without the last word."""
        return self._sums_at + 8 * self.header.tensors

    @property
    def _sums_at(self) -> int:
        return self.header.data_bytes + self.header.index_bytes

    @property
    def index(self) -> bytes:
        """The encoded index."""
        return bytes(self.generation.data[self.header.data_bytes : self._sums_at])

    @property
    def sums(self) -> bytes:
        """The encoded checksums of the tensors."""
        return bytes(self.generation.data[self._sums_at : self.nbytes])


class Exchange:
    """Exchange of generations with other nodes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._changed = ranks.changed

    def group(self) -> SaveGroup | None:
        """Return the world that was joined last."""
        with self._changed:
            return self._ranks.group

    # ---- to other nodes

    def next(self, group: SaveGroup, sent: Mapping[int, int]) -> Copy | None:
        """Wait for a save newer than the last one sent for its rank; return None if the world changes.

        ``sent``: by rank, the number of the newest save sent.
        """
        with self._changed:
            while self._ranks.group is group:
                found = self._newest(group, sent)
                if found is not None:
                    return found
                self._changed.wait()
            return None

    def _newest(self, group: SaveGroup, sent: Mapping[int, int]) -> Copy | None:
        """Return the newest unsent save, trying ranks with the oldest sent save first."""
        for rank in sorted(group.joined.ranks, key=lambda rank: (sent.get(rank, -1), rank)):
            mine = self._ranks.memories.get(rank)
            ours = {
                slot.saved: slot
                for slot in (mine.slots if mine is not None else ())
                if slot.saved is not None and slot.saved.session == group.joined.session
            }
            for save in sorted(ours, reverse=True):
                slot = ours[save]
                header = slot.header() if save.number > sent.get(rank, -1) else None
                if header is not None and _is_summed(slot.generation, header):
                    return Copy(group, header, slot, slot.epoch, slot.generation)
        return None

    def pause(self, copy: Copy, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether the copy can continue."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_current(copy), seconds)
            return self._is_current(copy)

    def _is_current(self, copy: Copy) -> bool:
        return copy.slot.epoch == copy.epoch and self._ranks.group is copy.group

    def wait(self, group: SaveGroup, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether the world is still the newest one."""
        with self._changed:
            self._changed.wait_for(lambda: self._ranks.group is not group, seconds)
            return self._ranks.group is group

    # ---- from other nodes

    def begin(self, group: SaveGroup, header: Header) -> Copy | None:
        """Return where to put a generation; None if it is here already. Call `end` when it is done.

        Raises:
            SupersededError: there is another world, or the rank has a worker here.
            InfrastructureError: the generation cannot be accepted.
        """
        rank, joined = header.rank, group.joined
        sizes = (header.data_bytes, header.index_bytes, header.tensors, header.save.step)
        if min(sizes) < 0 or (header.save.session, header.world_size) != (
            joined.session, joined.world_size
        ):  # fmt: skip
            raise InfrastructureError("It is not of this world.")
        if rank in joined.ranks or not 0 <= rank < joined.world_size:
            raise InfrastructureError(f"Rank {rank} is not one of another node.")
        with self._changed:
            mine = self._ranks.of(rank, ENOUGH)
            self._check(group, mine)
            if any(slot.saved == header.save for slot in mine.slots):
                return None
            mine.receiving += 1
        try:
            needed = memory.required(header.data_bytes, header.index_bytes, header.tensors)
            reserve(mine.slots, -(-(needed + INDEX_RESERVE) // PAGE) * PAGE, rank)
            with self._changed:
                self._check(group, mine)
                slot = self._ranks.grant(mine, joined.session, to_worker=False)
                slot.remap()
                return Copy(group, header, slot, slot.epoch, slot.generation)
        except BaseException:
            self.end(header)
            raise

    def end(self, header: Header) -> None:
        """Note that no more data arrives for a generation that was begun."""
        with self._changed:
            mine = self._ranks.memories.get(header.rank)
            if mine is not None:
                mine.receiving -= 1

    def _check(self, group: SaveGroup, mine: RankMemory) -> None:
        if self._ranks.group is not group or mine.owner:
            raise SupersededError
        if all(slot.pinned for slot in mine.slots):
            raise InfrastructureError("All memory of the replica is being stored.")

    def fill(self, copy: Copy, offset: int, data: bytes) -> None:
        """Write some received bytes to their place.

        Raises:
            SupersededError: the memory is used for something else by now.
            ProtocolError: the bytes lie outside of the replica.
        """
        if not 0 <= offset <= offset + len(data) <= copy.nbytes:
            raise ProtocolError("A part of a replica lies outside of it.")
        with self._changed:  # so that the memory is not granted meanwhile
            if not self._is_current(copy):
                raise SupersededError
            copy.generation.data[offset : offset + len(data)] = data

    def admit(self, copy: Copy, sums_hash: int) -> None:
        """Check a received generation and make it valid.

        Raises:
            SupersededError: it is no longer wanted.
            InfrastructureError: it is damaged.
        """
        header, generation = copy.header, copy.generation
        layout = generation.layout(header)
        if xxhash.xxh3_64_intdigest(copy.sums) != sums_hash:
            raise InfrastructureError(f"The checksums of step {header.save.step} are damaged.")
        sums = array("Q", copy.sums).tolist()
        found = memory.compute_sums(generation, layout.entries)
        for entry, expected, actual in zip(layout.entries, sums, found, strict=True):
            if expected != actual:
                raise InfrastructureError(
                    f"The tensor {name(entry.path)} of step {header.save.step} of rank {header.rank} was damaged"
                    " on its way."
                )
        faults.point("replicate.received")
        packed = PackedLayout(
            copy.index, header.data_bytes, header.tensors, header.layout_hash, header.index_hash
        )
        with self._changed:
            mine = self._ranks.memories[header.rank]
            if not self._is_current(copy) or mine.owner:
                raise SupersededError
            generation.seal(
                packed,
                rank=header.rank,
                world_size=header.world_size,
                save=header.save,
            )
            generation.store_sums(header, sums)
            self._ranks.admit(copy.slot, header.save)
            self._changed.notify_all()
        faults.point("replicate.kept")


def _is_summed(generation: Generation, header: Header) -> bool:
    try:
        return generation.sums(header) is not None
    except InfrastructureError:
        return False  # damaged: `verify` will find it
