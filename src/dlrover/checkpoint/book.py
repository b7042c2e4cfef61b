"""What a saver knows: each rank's generations, which of them are in use, and what is to be persisted.

Every method may be called from any thread; those that must wait say so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dlrover._util import procs
from dlrover.checkpoint import memory, protocol
from dlrover.checkpoint.layout import name
from dlrover.checkpoint.limits import available_memory
from dlrover.checkpoint.memory import Generation, Header, State
from dlrover.checkpoint.persist import Source
from dlrover.errors import InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

PREDECESSOR_WAIT = 10.0
"""Seconds that a rank's former process has to end when a new one attaches."""
FIRST_WAIT = 60.0
"""Seconds that whoever started the saver has to connect."""
PREDECESSOR_POLL = 0.05
"""Seconds between two looks for it: its children may keep its connection open."""


@dataclass
class Slot:
    """One generation of a rank."""

    fd: int
    generation: Generation
    step: int = -1
    """-1: it is not valid."""
    session: int = 0
    pinned: bool = False
    """Whether it is to be persisted: it must not be written."""
    epoch: int = 0
    """Counts how often it was granted."""


@dataclass
class RankMemory:
    """One rank's generations and its worker."""

    slots: list[Slot]
    owner: int = 0
    """The connection of its worker; 0: there is none."""
    pid: int = 0
    """Its worker's process; 0: not known."""
    session: int = 0
    world_size: int = 0
    ranks: tuple[int, ...] = ()
    told: int = 0
    """How many of the session's problems its worker has heard."""


@dataclass
class Task:
    """One step to persist, once all ranks of this node have published it."""

    session: int
    step: int
    world_size: int
    ranks: tuple[int, ...]
    slots: dict[int, Slot] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether it can be persisted."""
        return self.slots.keys() >= set(self.ranks)


class Book:
    """The state of a saver."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saver = secrets.randbits(63)
        self._ranks: dict[int, RankMemory] = {}
        self._tasks: dict[tuple[int, int], Task] = {}
        self._unsummed: deque[tuple[Slot, int]] = deque()
        self._problems: dict[int, list[str]] = {}
        self._starved: set[int] = set()
        """Ranks that wait for a generation."""
        self._connections = 0
        self._owners = 0
        self._stopping = False
        self._closed = False
        self._base = (-1, 0)
        """Step and session that the world continues from."""

    # ---- life

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Count a connection.

        Raises:
            SaverGoneError: the saver is leaving.
        """
        with self._changed:
            if self._closed:
                raise protocol.SaverGoneError("The checkpoint saver is leaving.")
            self._connections += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._connections -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Make `wait_until_idle` return as soon as nothing is left to persist."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def wait_until_idle(self, linger: float) -> None:
        """Wait until there is nothing to persist, and nobody was connected for ``linger`` seconds.

        Afterwards there are no more connections.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._owners > 0, FIRST_WAIT)
            while True:
                self._changed.wait_for(lambda: self._stopping or not self._connections)
                until = time.monotonic() + linger
                while not self._needed() and not self._stopping and time.monotonic() < until:
                    self._changed.wait(until - time.monotonic())
                if not self._needed():
                    self._changed.wait_for(lambda: not self._can_persist())
                    if not self._needed():
                        self._closed = True
                        return

    def _needed(self) -> bool:
        return bool(self._connections) and not self._stopping

    def _can_persist(self) -> bool:
        return any(task.complete for task in self._tasks.values())

    # ---- workers

    def attach(self, rank: int, pid: int) -> tuple[protocol.Attached, int, list[int]]:
        """Give a worker its rank's memory; waits for the rank's former process to end.

        Also returns what `detach` is to be called with.
        """
        with self._changed:
            mine = self._ranks.get(rank)
            if mine is None:
                mine = self._ranks[rank] = RankMemory([_new_slot(rank, n) for n in range(2)])
            until = time.monotonic() + PREDECESSOR_WAIT
            while mine.owner and (not mine.pid or procs.start_time(mine.pid)):
                if time.monotonic() > until:
                    raise InfrastructureError(
                        f"Process {mine.pid} uses this checkpoint directory as rank {rank}; two jobs cannot"
                        " share one."
                    )
                self._changed.wait(PREDECESSOR_POLL)
            self._owners += 1
            self._changed.notify_all()
            mine.owner, mine.pid = self._owners, pid
            return protocol.Attached(self._saver), mine.owner, [slot.fd for slot in mine.slots]

    def open(self, rank: int) -> tuple[protocol.Attached, list[int]]:
        """The memory of any rank, to be read."""
        with self._changed:
            mine = self._ranks.get(rank)
            if mine is None:
                raise InfrastructureError(f"Nothing of rank {rank} is in this node's memory.")
            return protocol.Attached(self._saver), [slot.fd for slot in mine.slots]

    def look(self) -> tuple[protocol.Held, ...]:
        """All valid generations."""
        with self._changed:
            held = []
            for rank, mine in self._ranks.items():
                for number, slot in enumerate(mine.slots):
                    header = _header(slot) if slot.step >= 0 else None
                    if header is not None and header.step == slot.step:
                        held.append(
                            protocol.Held(rank, number, slot.step, slot.session, header.world_size)
                        )
                    elif slot.step >= 0 and not slot.pinned:
                        _give_up(slot, State.EMPTY)
            return tuple(held)

    def detach(self, rank: int, owner: int) -> None:
        """The rank's worker is gone; steps that now can never be complete are dropped."""
        with self._changed:
            mine = self._ranks[rank]
            if mine.owner != owner:
                return
            mine.owner = 0
            for task in list(self._tasks.values()):
                if rank in task.ranks and rank not in task.slots:
                    self._end(task, f"Step {task.step} was not stored: rank {rank} ended before.")
            self._changed.notify_all()

    def join(self, rank: int, session: int, world_size: int, ranks: tuple[int, ...]) -> None:
        """The world that the rank's worker belongs to."""
        if rank not in ranks or not 0 <= rank < world_size:
            raise ProtocolError(f"Rank {rank} is not one of {ranks} of {world_size}.")
        with self._changed:
            mine = self._ranks[rank]
            mine.session, mine.world_size, mine.ranks, mine.told = session, world_size, ranks, 0
            self._problems.setdefault(session, [])
            self._changed.notify_all()
            for task in list(self._tasks.values()):
                if task.session != session and not task.complete:
                    self._end(task, f"Step {task.step} was not stored: its world ended before.")

    def reserve(self, rank: int, nbytes: int) -> None:
        """Make both generations that large, and have the kernel provide the memory."""
        slots = self._ranks[rank].slots
        more = sum(max(0, nbytes - os.fstat(slot.fd).st_size) for slot in slots)
        available = available_memory()
        if more > available:
            raise InfrastructureError(
                f"The memory checkpoints of rank {rank} need {more >> 20} MiB more for two generations;"
                f" {available >> 20} MiB are available."
            )
        for slot in slots:
            if nbytes > os.fstat(slot.fd).st_size:
                os.posix_fallocate(slot.fd, 0, nbytes)

    def keep(self, rank: int, step: int, session: int) -> None:
        """Continue from a step, or from none in memory: what else there is becomes invalid.

        It stays valid until the rank's second save, even if other ranks than now's saved it.
        """
        with self._changed:
            mine = self._ranks[rank]
            self._base = (step, session)
            for known in self._ranks.values():
                if known is mine or not known.owner:
                    for slot in known.slots:
                        if not (slot.pinned or (slot.step, slot.session) == self._base):
                            _give_up(slot, State.EMPTY)

    def _forget_strangers(self, mine: RankMemory) -> None:
        """Let go of the memory of ranks that are not part of the world any more."""
        for rank, known in list(self._ranks.items()):
            in_use = any(slot.pinned or slot.session == mine.session for slot in known.slots)
            if not (rank in mine.ranks or known.owner or in_use):
                for slot in known.slots:
                    os.close(slot.fd)
                del self._ranks[rank]

    # ---- saves

    def begin(self, rank: int, step: int) -> int:
        """The generation to write; waits while both are to be persisted."""
        with self._changed:
            mine = self._ranks[rank]
            free = [slot for slot in mine.slots if not slot.pinned]
            if not free:
                logger.warning("Step %d waits: storage is slower than the steps sent to it", step)
                self._starved.add(rank)
                self._changed.notify_all()
                self._changed.wait_for(lambda: any(not slot.pinned for slot in mine.slots))
                self._starved.discard(rank)
                free = [slot for slot in mine.slots if not slot.pinned]
            for slot in free:
                if mine.session != slot.session and self._base != (slot.step, slot.session):
                    _give_up(slot, State.EMPTY)
            chosen = min(free, key=lambda slot: slot.step)
            if chosen.step >= 0:
                self._forget_strangers(mine)
            _give_up(chosen, State.WRITING)
            chosen.epoch += 1
            return mine.slots.index(chosen)

    def publish(self, rank: int, number: int, step: int, *, to_storage: bool) -> None:
        """A generation is valid; persist it once all ranks of the node have published the step."""
        with self._changed:
            mine = self._ranks[rank]
            if not 0 <= number < len(mine.slots):
                raise ProtocolError(f"There is no generation {number}.")
            slot = mine.slots[number]
            slot.generation = _remapped(slot)
            header = slot.generation.header()
            if header is None or header.step != step or slot.pinned:
                raise ProtocolError(f"Generation {number} does not hold step {step}.")
            slot.step, slot.session = step, mine.session
            if to_storage:
                slot.pinned = True
                key = (mine.session, step)
                task = self._tasks.get(key)
                if task is None:
                    task = self._tasks[key] = Task(mine.session, step, mine.world_size, mine.ranks)
                task.slots[rank] = slot
            self._unsummed.append((slot, slot.epoch))
            self._changed.notify_all()

    def settled(self, rank: int) -> tuple[str, ...]:
        """Wait until all that the rank asked to store is durable or has failed; what failed."""
        with self._changed:
            mine = self._ranks[rank]
            self._changed.wait_for(
                lambda: not any(rank in task.slots for task in self._tasks.values())
            )
            problems = self._problems.get(mine.session, [])
            told, mine.told = mine.told, len(problems)
            return tuple(problems[told:])

    # ---- checksums

    def compute_next_sums(self) -> None:
        """Wait for a generation without checksums and compute them, unless it is written meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._unsummed))
            slot, epoch = self._unsummed.popleft()
            generation = slot.generation
            if slot.epoch != epoch:
                return
        with contextlib.suppress(InfrastructureError):  # overwritten while it was read
            self._add_sums(slot, generation, epoch)

    def _add_sums(self, slot: Slot, generation: Generation, epoch: int) -> list[int] | None:
        header = generation.header()
        if header is None:
            return None
        sums = memory.compute_sums(generation, generation.layout(header))
        with self._changed:
            if slot.epoch != epoch:
                return None
            generation.store_sums(header, sums)
        return sums

    def verify(self, rank: int, number: int) -> str:
        """Compare a generation with its checksums; what is wrong with it, or an empty text."""
        with self._changed:
            slot = self._ranks[rank].slots[number]
            generation, epoch = slot.generation, slot.epoch
        try:
            header = generation.header()
            if header is None:
                return "The generation is not valid."
            sums = generation.sums(header)
            if sums is None:
                self._add_sums(slot, generation, epoch)
                return ""
            layout = generation.layout(header)
        except InfrastructureError as error:
            return str(error)
        for entry, expected, found in zip(
            layout.entries, sums, memory.compute_sums(generation, layout), strict=True
        ):
            if expected != found:
                return f"The tensor {name(entry.path)} of step {header.step} in memory is damaged."
        return ""

    # ---- persist

    def wait_for_world(self) -> None:
        """Wait until a worker has joined one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._problems))

    def next_task(self) -> Task:
        """Wait for a step that is complete; the oldest one."""
        with self._changed:
            self._changed.wait_for(self._can_persist)
            return min((t for t in self._tasks.values() if t.complete), key=lambda t: t.step)

    def sources(self, task: Task) -> dict[int, Source]:
        """What is to be written."""
        found = {}
        for rank, slot in task.slots.items():
            header = slot.generation.header()
            if header is None:
                raise InfrastructureError(f"Step {task.step} is not in memory any more.")
            sums = slot.generation.sums(header)
            if sums is None:
                sums = self._add_sums(slot, slot.generation, slot.epoch)
            if sums is None:
                raise InfrastructureError(f"Step {task.step} is not in memory any more.")
            found[rank] = Source(slot.generation, slot.generation.layout(header), sums)
        return found

    def pause(self, task: Task, seconds: float, *, yielding: bool) -> bool:
        """Wait; with ``yielding`` only while no rank needs the task's memory. Whether one does."""
        with self._changed:
            wanted = self._changed.wait_for(
                lambda: yielding and any(rank in self._starved for rank in task.slots), seconds
            )
            return yielding and wanted

    def only(self, session: int) -> bool:
        """Whether no other world has anything left to persist."""
        with self._changed:
            return all(task.session == session for task in self._tasks.values())

    def finish(self, task: Task, problem: str) -> None:
        """The task is done, or has failed."""
        with self._changed:
            self._end(task, problem)

    def _end(self, task: Task, problem: str) -> None:
        self._tasks.pop((task.session, task.step), None)
        for slot in task.slots.values():
            slot.pinned = False
        if problem:
            self._problems.setdefault(task.session, []).append(problem)
        self._changed.notify_all()


def _new_slot(rank: int, number: int) -> Slot:
    fd = os.memfd_create(f"dlrover-checkpoint-{rank}-{number}", os.MFD_CLOEXEC)
    return Slot(fd, Generation(fd))


def _remapped(slot: Slot) -> Generation:
    """The generation with all the memory that it has by now."""
    if os.fstat(slot.fd).st_size == slot.generation.size:
        return slot.generation
    return Generation(slot.fd)


def _header(slot: Slot) -> Header | None:
    try:
        return slot.generation.header()
    except InfrastructureError as error:
        logger.warning("A generation is given up: %s", error)
        return None


def _give_up(slot: Slot, state: State) -> None:
    slot.step = -1
    slot.generation.invalidate(state)
