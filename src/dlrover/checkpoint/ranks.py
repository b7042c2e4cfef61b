"""The memory of a node's ranks: who wrote it, who uses it, and what may be written over."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field

from dlrover.checkpoint import memory, protocol
from dlrover.checkpoint.formats import FORMAT
from dlrover.checkpoint.limits import available_memory
from dlrover.checkpoint.memory import Generation, Header, State
from dlrover.checkpoint.saves import Newest, SaveId
from dlrover.errors import ConfigurationError, InfrastructureError

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
    saved: SaveId | None = None
    """What is in it; None: nothing that is valid."""
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
        self.saved = None
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
    stored: SaveId | None = None
    """The newest save that was stored."""
    failing: bool = False
    """Whether the last step that was to be stored was not."""
    news: str = ""
    """A sentence about storage that fails, or works again; empty once a worker of the node has told it."""
    voted: tuple[SaveId, ...] | None = None
    """The newest save in memory, if any, when it was asked last what of this world is to be stored."""

    def note(self, save: SaveId, problem: str) -> None:
        """A save was stored, or was not because of a problem."""
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
    """One rank's generations and its worker. Without a worker: of an earlier world, or a replica."""

    slots: list[Slot]
    owner: int = 0
    """The connection of its worker; 0: there is none."""
    pid: int = 0
    """Its worker's process; 0: not known."""
    job: str = ""
    """Its worker's job; empty if that has no identifier."""
    world: World | None = None
    told: int = 0
    """How many of the world's problems its worker has heard."""
    providing: threading.Lock = field(default_factory=threading.Lock)
    """Held while memory is provided for one of its generations."""
    receiving: int = 0
    """How many copies from another node are being written to it."""
    passed: int = 0
    """The number of its worker's newest save, whether or not it is in memory."""

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
        self._base: SaveId | None = None
        """The save that the world continues from."""
        self.newest = Newest()
        """Of all saves that were ever here."""

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
                if slot.saved is None:
                    continue
                header = slot.header()
                if header is not None and header.save == slot.saved:
                    held.append(protocol.Held(rank, number, slot.saved, header.world_size))
                elif not slot.pinned:
                    slot.give_up()
        return tuple(held)

    def continue_from(self, mine: RankMemory, save: SaveId | None) -> None:
        """What else a rank, or one without a worker, has is not used any more."""
        self._base = save
        for known in self.memories.values():
            if known is mine or not known.owner:
                for slot in known.slots:
                    if slot.saved is None or slot.saved != save:
                        slot.retire()

    def admit(self, slot: Slot, save: SaveId) -> None:
        """A generation is valid."""
        slot.saved = save
        self.newest = self.newest.including(save)

    def check_agreement(self, mine: RankMemory, save: SaveId) -> None:
        """Refuse a save that another rank of the node has made of another step.

        Raises:
            ConfigurationError: it has.
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
        """Whether a generation without memory yet has to be written next.

        So it is when the first ``ready`` ones are to be persisted, or are the newest valid one.
        """
        newest = max(mine.slots, key=_age)
        return ready < len(mine.slots) and all(
            slot.pinned or (slot is newest and slot.saved is not None)
            for slot in mine.slots[:ready]
        )

    def grant(
        self,
        mine: RankMemory,
        session: int,
        *,
        to_worker: bool,
        ready: int = protocol.GENERATIONS,
    ) -> Slot:
        """The generation to write next, of those that are free and have their memory: there must be one."""
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
        """Keep one generation of a rank less from now on."""
        dropped = mine.slots.pop()
        dropped.give_up()
        os.close(dropped.fd)

    def _forget_strangers(self, mine: RankMemory) -> None:
        """Let go of the memory of ranks that are not part of the world any more."""
        ranks = mine.world.joined.ranks if mine.world is not None else ()
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


def _age(slot: Slot) -> tuple[int, int]:
    """Greater for newer content."""
    return (slot.saved.line, slot.saved.number) if slot.saved is not None else (-1, -1)


def reserve(slots: list[Slot], nbytes: int, rank: int, *, spare: bool = False) -> None:
    """Make generations that large, and have the kernel provide the memory.

    For a ``spare`` one at most half of what is available is taken: the training needs the rest more.

    Raises:
        NoMemoryError: there is not enough.
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


def _new_slot(rank: int, number: int) -> Slot:
    fd = os.memfd_create(f"dlrover-checkpoint-{FORMAT}-{rank}-{number}", os.MFD_CLOEXEC)
    return Slot(fd, Generation(fd))
