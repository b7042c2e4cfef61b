"""The memory of a node's ranks: its generations, which of them may be overwritten, and their checksums."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass, field

from dlrover._util import kernel
from dlrover._util.cgroup import available_memory
from dlrover.checkpoint.machine.layout import name
from dlrover.checkpoint.machine.saves import Newest, SaveId
from dlrover.checkpoint.saver import memory, protocol
from dlrover.checkpoint.saver.memory import Generation, Header, State
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.checkpoint.storage.persist import RankPart
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)

ENOUGH = 2
"""Number of generations that a rank needs."""


class NoMemoryError(InfrastructureError):
    """Raised when memory does not suffice for a generation."""


@dataclass
class GenerationSlot:
    """One generation of a rank."""

    fd: int
    generation: Generation
    saved: SaveId | None = None
    """Save in the generation; None if it is not valid."""
    metrics: dict[str, float] = field(default_factory=dict)
    pins: int = 0
    """Number of users that need the content unchanged, to persist it."""
    epoch: int = 0
    """Number of times that the generation was granted."""
    outdated: bool = False
    """True if the generation is given up once it is no longer pinned."""

    @property
    def pinned(self) -> bool:
        """True if the generation must not be overwritten."""
        return self.pins > 0

    def header(self) -> Header | None:
        """Return the header of a valid generation; None if the generation is not valid, or damaged."""
        try:
            return self.generation.header()
        except InfrastructureError as error:
            logger.warning("A generation is given up: %s", error)
            return None

    def remap(self) -> None:
        """Map the memory again if its size has changed."""
        if os.fstat(self.fd).st_size != self.generation.size:
            self.generation = Generation(self.fd)

    def give_up(self, state: State = State.EMPTY) -> None:
        """Mark the generation as unusable."""
        self.saved = None
        self.outdated = False
        self.generation.invalidate(state)

    def retire(self) -> None:
        """Give the generation up once it is no longer pinned."""
        if self.pinned:
            self.outdated = True
        else:
            self.give_up()

    def unpin(self) -> None:
        """Remove one pin; give an outdated generation up when the last one goes."""
        self.pins -= 1
        if self.outdated and not self.pins:
            self.give_up()


@dataclass
class SaveGroup:
    """The ranks that save together, as far as this node knows them."""

    joined: protocol.JoinSaver
    store_at_end: bool = False
    """True if the newest save in memory is to be stored once the workers end, however they do."""
    stopping: float = 0.0
    """Seconds that other nodes' workers may take to end then."""
    partial: bool = False
    """True if nodes of the world are lost by then, and their savers with them."""
    problems: list[str] = field(default_factory=list)
    """Sentences about saves that were not stored, with the reasons."""
    stored: SaveId | None = None
    """Newest stored save."""
    failing: bool = False
    """True if the last save to storage failed."""
    news: str = ""
    """Sentence about storage that fails or works again; empty once a worker of the node has received it."""
    voted: tuple[SaveId, ...] | None = None
    """Newest save in memory, if any, at this node's last vote on what to store of this world."""
    at_end: protocol.SavedNow | None = None
    """What became of that vote."""

    def note(self, save: SaveId, problem: str) -> None:
        """Record that a save was stored, or why not if there is a ``problem``."""
        if problem:
            if self.stored is not None and self.stored.step == save.step:
                problem += " What was saved of the step before is stored."
            self.problems.append(problem)
        else:
            self.stored = save if self.stored is None else max(self.stored, save)
        if problem and not self.failing:
            self.news = f"{problem} Training goes on, and later steps are tried."
        elif self.failing and not problem:
            self.news = f"Step {save.step} was stored: the storage takes steps again."
        self.failing = bool(problem)


@dataclass
class RankMemory:
    """One rank's generations and its worker. Without a worker: left from an earlier world, or a replica."""

    slots: list[GenerationSlot]
    owner: int = 0
    """Connection of the rank's worker; 0 if there is none."""
    pid: int = 0
    """Process id of the worker; 0 if unknown."""
    job: str = ""
    """Job identifier of the worker; empty if the job has none."""
    group: SaveGroup | None = None
    problems_sent: int = 0
    """Number of the world's problems that the worker has received."""
    providing: threading.Lock = field(default_factory=threading.Lock)
    """Lock held while memory is provided for one of the generations."""
    receiving: int = 0
    """Number of copies from other nodes being written to this memory."""
    passed: int = 0
    """Number of the worker's newest save, even if the save is not in memory."""
    ended: protocol.EndedWorker | None = None
    """The last worker before this one that belonged to a world."""

    @property
    def session(self) -> int:
        """Session of the world; 0 if there is none."""
        return self.group.joined.session if self.group is not None else 0

    def has_room(self, ready: int) -> bool:
        """Return whether a generation may be written that is neither pinned nor the newest valid one.

        Only the first ``ready`` generations have memory. A rank whose memory does not suffice for three of them
        overwrites the newest one rather than wait for the storage.
        """
        newest = max(self.slots, key=_age)
        short = len(self.slots) <= ENOUGH
        return any(
            not slot.pinned
            and (slot is not newest or slot.saved is None or (short and ready == len(self.slots)))
            for slot in self.slots[:ready]
        )


class Ranks:
    """Memory of all ranks. Hold ``changed`` while using it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.memories: dict[int, RankMemory] = {}
        self.group: SaveGroup | None = None
        """World that was joined last."""
        self._base: SaveId | None = None
        """Save that the world continues from."""
        self.newest = Newest()
        """Greatest line and number of all saves that were ever in memory here."""

    def of(self, rank: int, generations: int = protocol.GENERATIONS) -> RankMemory:
        """Return the memory of a rank; create it if there is none."""
        mine = self.memories.get(rank)
        if mine is None:
            slots = [_new_slot(rank, number) for number in range(generations)]
            mine = self.memories[rank] = RankMemory(slots)
        return mine

    def held(self) -> tuple[protocol.HeldGeneration, ...]:
        """Return all usable generations; give damaged ones up."""
        held = []
        for rank, mine in self.memories.items():
            for number, slot in enumerate(mine.slots):
                if slot.outdated:
                    continue
                if slot.saved is None:
                    continue
                header = slot.header()
                if header is not None and header.save == slot.saved:
                    held.append(
                        protocol.HeldGeneration(rank, number, slot.saved, header.world_size)
                    )
                elif not slot.pinned:
                    slot.give_up()
        return tuple(held)

    def continue_from(self, mine: RankMemory, save: SaveId | None) -> None:
        """Retire every other save of a rank, and of all ranks without a worker."""
        self._base = save
        for known in self.memories.values():
            if known is mine or not known.owner:
                for slot in known.slots:
                    if slot.saved is None or slot.saved != save:
                        slot.retire()

    def admit(self, slot: GenerationSlot, save: SaveId) -> None:
        """Record that a generation holds a valid save."""
        slot.saved = save
        self.newest = self.newest.including(save)

    def check_agreement(self, mine: RankMemory, save: SaveId) -> None:
        """Refuse a save if another rank of the node made the same save at another step.

        Raises:
            ConfigurationError: another rank did.
        """
        for rank, known in self.memories.items():
            for slot in known.slots if known is not mine else ():
                other = slot.saved
                same = other is not None and (other.session, other.number) == (
                    save.session, save.number
                )  # fmt: skip
                if other is not None and same and other.step != save.step:
                    raise ConfigurationError(
                        f"This rank saves step {save.step} where rank {rank} has saved step {other.step};"
                        " all ranks must make the same saves in the same order."
                    )

    def must_wait(self, mine: RankMemory, ready: int) -> bool:
        """Return True if the next generation to write is one that has no memory yet."""
        return ready < len(mine.slots) and not mine.has_room(ready)

    def grant(
        self,
        mine: RankMemory,
        session: int,
        *,
        to_worker: bool,
        ready: int = protocol.GENERATIONS,
    ) -> GenerationSlot:
        """Return the generation to write next, the oldest that is free and has memory; there must be one."""
        free = [slot for slot in mine.slots[:ready] if not slot.pinned]
        for slot in free:
            if (
                slot.saved is not None
                and slot.saved.session != session
                and slot.saved != self._base
            ):
                slot.give_up()
        chosen = min(free, key=_age)
        if chosen.saved is not None and to_worker:
            self._forget_strangers(mine)
        chosen.give_up(State.WRITING)
        chosen.epoch += 1
        return chosen

    def drop_last(self, mine: RankMemory) -> None:
        """Remove the last generation of a rank for good."""
        dropped = mine.slots.pop()
        dropped.give_up()
        os.close(dropped.fd)

    def _forget_strangers(self, mine: RankMemory) -> None:
        """Free the memory of ranks that no longer belong to the world."""
        ranks = mine.group.joined.ranks if mine.group is not None else ()
        for rank, known in list(self.memories.items()):
            in_use = any(
                slot.pinned or (slot.saved is not None and slot.saved.session == mine.session)
                for slot in known.slots
            )
            in_use = in_use or known.owner > 0 or known.receiving > 0
            if not (known is mine or rank in ranks or in_use):
                for slot in known.slots:
                    os.close(slot.fd)
                del self.memories[rank]


def _age(slot: GenerationSlot) -> tuple[int, int]:
    """Return a sort key, greater for newer content."""
    return (slot.saved.line, slot.saved.number) if slot.saved is not None else (-1, -1)


def reserve(slots: list[GenerationSlot], nbytes: int, rank: int, *, spare: bool = False) -> None:
    """Enlarge generations to ``nbytes`` each and have the kernel provide the memory.

    With ``spare``, take at most half of the available memory: the training needs the rest more.

    Raises:
        NoMemoryError: memory is short.
    """
    more = sum(max(0, nbytes - os.fstat(slot.fd).st_size) for slot in slots)
    available = available_memory()
    if more > (available // 2 if spare else available):
        raise NoMemoryError(
            f"The memory checkpoints of rank {rank} need {more >> 20} MiB more for {len(slots)}"
            f" generation{'s' if len(slots) > 1 else ''}; {available >> 20} MiB are available."
        )
    for slot in slots:
        if nbytes > os.fstat(slot.fd).st_size:
            _provide(slot.fd, nbytes, rank)


def _provide(fd: int, nbytes: int, rank: int) -> None:
    try:
        memory.provide(fd, nbytes)
    except OSError as error:
        raise NoMemoryError(
            f"The kernel does not provide {nbytes >> 20} MiB of memory for rank {rank}: {error}."
        ) from error


def _new_slot(rank: int, number: int) -> GenerationSlot:
    fd = kernel.memfd_create(f"dlrover-checkpoint-{FORMAT}-{rank}-{number}")
    return GenerationSlot(fd, Generation(fd))


class Checksums:
    """Checksums of all ranks' generations."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._unsummed: deque[tuple[GenerationSlot, int]] = deque()

    def ask(self, slot: GenerationSlot) -> None:
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

    def _add(self, slot: GenerationSlot, generation: Generation, epoch: int) -> list[int] | None:
        header = generation.header()
        if header is None:
            return None
        known = generation.sums(header)  # the worker computes them while it copies, if it can
        if known is not None:
            return known
        sums = memory.compute_sums(generation, generation.layout(header).entries)
        with self._ranks.changed:
            if slot.epoch != epoch:
                return None
            generation.store_sums(header, sums)
            self._ranks.changed.notify_all()
        return sums

    def verify(self, slot: GenerationSlot) -> str:
        """Compare a generation with its checksums; return the problem, or an empty text."""
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
        found = memory.compute_sums(generation, layout.entries)
        for entry, expected, actual in zip(layout.entries, sums, found, strict=True):
            if actual != expected:
                return f"The tensor {name(entry.path)} of step {header.save.step} in memory is damaged."
        return ""

    def source(self, slot: GenerationSlot, save: SaveId) -> RankPart:
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
        return RankPart(generation.tensor_bytes, generation.layout(header), sums)
