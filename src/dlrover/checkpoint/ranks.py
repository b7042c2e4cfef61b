"""The memory of a node's ranks: who wrote it, who uses it, and what may be written over."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field

from dlrover.checkpoint import protocol
from dlrover.checkpoint.limits import available_memory
from dlrover.checkpoint.memory import Generation, Header, State
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

ENOUGH = 2
"""Generations that a rank needs."""


class NoMemoryError(InfrastructureError):
    """There is not enough memory for a generation."""


@dataclass
class Slot:
    """One generation of a rank."""

    fd: int
    generation: Generation
    step: int = -1
    """-1: it is not valid."""
    session: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    pins: int = 0
    """How many need it as it is, to persist it."""
    epoch: int = 0
    """Counts how often it was granted."""
    outdated: bool = False
    """Whether it is given up as soon as nobody needs it."""

    @property
    def pinned(self) -> bool:
        """Whether it must not be written."""
        return self.pins > 0

    def header(self) -> Header | None:
        """The header of a valid generation; None if there is none, or it is damaged."""
        try:
            return self.generation.header()
        except InfrastructureError as error:
            logger.warning("A generation is given up: %s", error)
            return None

    def remap(self) -> None:
        """See all the memory that it has by now."""
        if os.fstat(self.fd).st_size != self.generation.size:
            self.generation = Generation(self.fd)

    def give_up(self, state: State = State.EMPTY) -> None:
        """Say that it cannot be used."""
        self.step = -1
        self.outdated = False
        self.generation.invalidate(state)

    def retire(self) -> None:
        """Give it up, as soon as nobody needs it."""
        if self.pinned:
            self.outdated = True
        else:
            self.give_up()

    def unpin(self) -> None:
        """One less needs it."""
        self.pins -= 1
        if self.outdated and not self.pins:
            self.give_up()


@dataclass
class World:
    """Ranks that save together, as far as this node knows them."""

    joined: protocol.Join
    problems: list[str] = field(default_factory=list)
    """What was not stored, and why."""
    stored: int = -1
    """The newest step that was stored."""
    failing: bool = False
    """Whether the last step that was to be stored was not."""
    news: str = ""
    """A sentence about storage that fails, or works again; empty once a worker of the node has told it."""
    voted: int = -2
    """The newest step in memory when it was asked last what of this world is to be stored."""

    def note(self, step: int, problem: str) -> None:
        """A step was stored, or was not because of a problem."""
        if problem:
            self.problems.append(problem)
        else:
            self.stored = max(self.stored, step)
        if problem and not self.failing:
            self.news = f"{problem} Training goes on, and later steps are tried."
        elif self.failing and not problem:
            self.news = f"Step {step} was stored: the storage takes steps again."
        self.failing = bool(problem)


@dataclass
class RankMemory:
    """One rank's generations and its worker. Without a worker: of an earlier world, or a replica."""

    slots: list[Slot]
    owner: int = 0
    """The connection of its worker; 0: there is none."""
    pid: int = 0
    """Its worker's process; 0: not known."""
    world: World | None = None
    told: int = 0
    """How many of the world's problems its worker has heard."""
    receiving: int = 0
    """How many copies from another node are being written to it."""

    @property
    def session(self) -> int:
        """The world's; 0 if there is none."""
        return self.world.joined.session if self.world is not None else 0


class Ranks:
    """All ranks' memory. Hold ``changed`` when you use it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.memories: dict[int, RankMemory] = {}
        self.world: World | None = None
        """The one that was joined last."""
        self._base = (-1, 0)
        """Step and session that the world continues from."""

    def of(self, rank: int, generations: int = protocol.GENERATIONS) -> RankMemory:
        """The memory of a rank, made if there is none."""
        mine = self.memories.get(rank)
        if mine is None:
            slots = [_new_slot(rank, number) for number in range(generations)]
            mine = self.memories[rank] = RankMemory(slots)
        return mine

    def held(self) -> tuple[protocol.Held, ...]:
        """All generations that can be used; a damaged one is given up."""
        held = []
        for rank, mine in self.memories.items():
            for number, slot in enumerate(mine.slots):
                if slot.outdated:
                    continue
                header = slot.header() if slot.step >= 0 else None
                if header is not None and header.step == slot.step:
                    held.append(
                        protocol.Held(rank, number, slot.step, slot.session, header.world_size)
                    )
                elif slot.step >= 0 and not slot.pinned:
                    slot.give_up()
        return tuple(held)

    def continue_from(self, mine: RankMemory, step: int, session: int) -> None:
        """What else a rank, or one without a worker, has is not used any more."""
        self._base = (step, session)
        for known in self.memories.values():
            if known is mine or not known.owner:
                for slot in known.slots:
                    if (slot.step, slot.session) != self._base:
                        slot.retire()

    def supersede(self, mine: RankMemory, newest: Slot) -> None:
        """Let go of what a rank had saved before as the same step."""
        for slot in mine.slots:
            same = (slot.step, slot.session) == (newest.step, newest.session)
            if same and slot is not newest:
                slot.retire()

    def grant(self, mine: RankMemory, session: int, *, to_worker: bool) -> Slot:
        """The generation to write next, of those that nobody needs: there must be one."""
        free = [slot for slot in mine.slots if not slot.pinned]
        for slot in free:
            if session != slot.session and self._base != (slot.step, slot.session):
                slot.give_up()
        chosen = min(free, key=lambda slot: slot.step)
        if chosen.step >= 0 and to_worker:
            self._forget_strangers(mine)
        chosen.give_up(State.WRITING)
        chosen.epoch += 1
        return chosen

    def drop_last(self, mine: RankMemory) -> None:
        """Keep one generation of a rank less from now on."""
        dropped = mine.slots.pop()
        dropped.give_up()
        os.close(dropped.fd)

    def _forget_strangers(self, mine: RankMemory) -> None:
        """Let go of the memory of ranks that are not part of the world any more."""
        ranks = mine.world.joined.ranks if mine.world is not None else ()
        for rank, known in list(self.memories.items()):
            in_use = any(slot.pinned or slot.session == mine.session for slot in known.slots)
            in_use = in_use or known.owner > 0 or known.receiving > 0
            if not (known is mine or rank in ranks or in_use):
                for slot in known.slots:
                    os.close(slot.fd)
                del self.memories[rank]


def reserve(slots: list[Slot], nbytes: int, rank: int) -> None:
    """Make generations that large, and have the kernel provide the memory.

    Raises:
        NoMemoryError: there is not enough.
    """
    more = sum(max(0, nbytes - os.fstat(slot.fd).st_size) for slot in slots)
    available = available_memory()
    # A third generation is a convenience: it must not take what the training needs.
    if more > (available if len(slots) <= ENOUGH else available // 2):
        raise NoMemoryError(
            f"The memory checkpoints of rank {rank} need {more >> 20} MiB more for {len(slots)}"
            f" generation{'s' if len(slots) > 1 else ''}; {available >> 20} MiB are available."
        )
    for slot in slots:
        if nbytes > os.fstat(slot.fd).st_size:
            os.posix_fallocate(slot.fd, 0, nbytes)


def _new_slot(rank: int, number: int) -> Slot:
    fd = os.memfd_create(f"dlrover-checkpoint-{rank}-{number}", os.MFD_CLOEXEC)
    return Slot(fd, Generation(fd))
