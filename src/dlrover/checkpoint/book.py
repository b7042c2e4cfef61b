"""What a saver knows: each rank's generations, which of them are in use, and what is to be persisted.

Every method may be called from any thread; those that must wait say so.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping

from dlrover._util import procs
from dlrover.checkpoint import protocol
from dlrover.checkpoint.breaks import Breaks
from dlrover.checkpoint.exchange import Exchange
from dlrover.checkpoint.ranks import RankMemory, Ranks, World, reserve
from dlrover.checkpoint.sums import Checksums
from dlrover.checkpoint.tasks import Tasks
from dlrover.errors import InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

PREDECESSOR_WAIT = 10.0
"""Seconds that a rank's former process has to end when a new one attaches."""
FIRST_WAIT = 60.0
"""Seconds that whoever started the saver has to connect."""
PREDECESSOR_POLL = 0.05
"""Seconds between two looks for it: its children may keep its connection open."""


class Book:
    """The state of a saver."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._changed = self._ranks.changed
        self.sums = Checksums(self._ranks)
        self.tasks = Tasks(self._ranks, self.sums)
        self.breaks = Breaks(self._ranks, self.tasks)
        self.exchange = Exchange(self._ranks)
        self.saver = secrets.randbits(63)
        """The saver's name for itself."""
        self._connections = 0
        self._owners = 0
        self._stopping = False
        self._closed = False

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
            if self._ranks.world is not None:
                self.breaks.note(self._ranks.world)
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
                    self._changed.wait_for(lambda: not self._is_busy())
                    if not self._needed():
                        self._closed = True
                        return

    def _needed(self) -> bool:
        return bool(self._connections) and not self._stopping

    def _is_busy(self) -> bool:
        return self.tasks.ready or self.breaks.pending

    def only(self, session: int) -> bool:
        """Whether no other world has anything left to persist."""
        with self._changed:
            return self.tasks.only(session) and self.breaks.only(session)

    def wait_for_world(self) -> None:
        """Wait until a worker has joined one."""
        with self._changed:
            self._changed.wait_for(lambda: self._ranks.world is not None)

    # ---- workers

    def attach(self, rank: int, pid: int) -> tuple[protocol.Attached, int, list[int]]:
        """Give a worker its rank's memory; waits for the rank's former process to end.

        Also returns what `detach` is to be called with.
        """
        with self._changed:
            mine = self._ranks.of(rank)
            until = time.monotonic() + PREDECESSOR_WAIT
            while mine.owner and (not mine.pid or procs.start_time(mine.pid)):
                if time.monotonic() > until:
                    raise InfrastructureError(
                        f"Process {mine.pid} uses this checkpoint directory as rank {rank}; two jobs cannot"
                        " share one."
                    )
                self._changed.wait(PREDECESSOR_POLL)
            if mine.owner:
                self._end_worker(rank, mine, goodbye=False)
            self._owners += 1
            mine.owner, mine.pid, mine.world = self._owners, pid, None
            self._changed.notify_all()
            return protocol.Attached(self.saver), mine.owner, [slot.fd for slot in mine.slots]

    def open(self, rank: int) -> tuple[protocol.Attached, list[int]]:
        """The memory of any rank, to be read."""
        with self._changed:
            return protocol.Attached(self.saver), [slot.fd for slot in self._known(rank).slots]

    def look(self) -> tuple[protocol.Held, ...]:
        """All valid generations."""
        with self._changed:
            return self._ranks.held()

    def detach(self, rank: int, owner: int, *, goodbye: bool = True) -> None:
        """The rank's worker is gone; steps that now can never be complete are dropped."""
        with self._changed:
            mine = self._ranks.memories[rank]
            if mine.owner == owner:
                self._end_worker(rank, mine, goodbye=goodbye)

    def _end_worker(self, rank: int, mine: RankMemory, *, goodbye: bool) -> None:
        mine.owner = 0
        if mine.world is not None and not goodbye:
            self.breaks.note(mine.world)
        self.breaks.left(rank, mine)
        self.tasks.drop_incomplete(rank)
        self._changed.notify_all()

    def join(self, rank: int, joined: protocol.Join) -> None:
        """The world that the rank's worker belongs to."""
        if rank not in joined.ranks or not 0 <= rank < joined.world_size:
            raise ProtocolError(f"Rank {rank} is not one of {joined.ranks} of {joined.world_size}.")
        with self._changed:
            world = self._ranks.world
            if world is None or world.joined.session != joined.session:
                world = self._ranks.world = World(joined)
            mine = self._ranks.memories[rank]
            mine.world, mine.told = world, 0
            self.tasks.drop_others(joined.session)
            self._changed.notify_all()

    def reserve(self, rank: int, nbytes: int) -> int:
        """Have the kernel provide that much memory for each generation; how many generations there are.

        Where there is not enough for all, fewer are kept from then on. Waits while one that is to go is
        to be persisted.

        Raises:
            InfrastructureError: there is not enough for one.
        """
        mine = self._known(rank)
        while not self._try_to_reserve(mine, nbytes, rank):
            with self._changed:
                self._changed.wait_for(lambda: not mine.slots[-1].pinned)
                self._ranks.drop_last(mine)
        return len(mine.slots)

    def _try_to_reserve(self, mine: RankMemory, nbytes: int, rank: int) -> bool:
        try:
            reserve(mine.slots, nbytes, rank)
        except InfrastructureError as error:
            if len(mine.slots) == 1:
                raise
            logger.warning("%s One less is kept", error)
            return False
        return True

    def keep(self, rank: int, step: int, session: int) -> None:
        """Continue from a step, or from none in memory: what else there is becomes invalid.

        It stays valid until the rank's second save, even if other ranks than now's saved it.
        """
        with self._changed:
            self._ranks.continue_from(self._known(rank), step, session)

    def _known(self, rank: int) -> RankMemory:
        mine = self._ranks.memories.get(rank)
        if mine is None:
            raise InfrastructureError(f"Nothing of rank {rank} is in this node's memory.")
        return mine

    # ---- saves

    def begin(self, rank: int, step: int) -> int:
        """The generation to write; waits while both are to be persisted."""
        with self._changed:
            mine = self._known(rank)
            if all(slot.pinned for slot in mine.slots):
                logger.warning("Step %d waits: storage is slower than the steps sent to it", step)
                self.tasks.wait_for_memory(rank, mine)
            return mine.slots.index(self._ranks.grant(mine, mine.session, to_worker=True))

    def news(self, rank: int) -> str:
        """What the rank is to tell the user of the storage; empty if nothing, or if another rank tells it."""
        with self._changed:
            world = self._known(rank).world
            if world is None or rank != min(world.joined.ranks):
                return ""
            news, world.news = world.news, ""
            return news

    def publish(
        self,
        rank: int,
        number: int,
        step: int,
        *,
        to_storage: bool,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """A generation is valid; persist it once all ranks of the node have published the step."""
        with self._changed:
            mine = self._known(rank)
            if not 0 <= number < len(mine.slots):
                raise ProtocolError(f"There is no generation {number}.")
            if mine.world is None:
                raise ProtocolError(f"Rank {rank} saves before it has joined a world.")
            slot = mine.slots[number]
            slot.remap()
            header = slot.generation.header()
            if header is None or header.step != step or slot.pinned:
                raise ProtocolError(f"Generation {number} does not hold step {step}.")
            slot.step, slot.session = step, mine.session
            slot.metrics = dict(metrics or {})
            self._ranks.supersede(mine, slot)
            if to_storage:
                self.tasks.publish(mine.world, step, rank, slot)
            self.sums.ask(slot)
            self._changed.notify_all()

    def verify(self, rank: int, number: int, below: int = 0) -> str:
        """Compare a generation with its checksums; what is wrong with it, or an empty text.

        Only tensors of less than ``below`` bytes; 0: all.
        """
        with self._changed:
            slot = self._known(rank).slots[number]
        return self.sums.verify(slot, below)

    def settled(self, rank: int) -> tuple[str, ...]:
        """Wait until all that the rank asked to store is durable or has failed; what failed."""
        with self._changed:
            mine = self._known(rank)
            self._changed.wait_for(lambda: not self.tasks.wants(rank))
            problems = mine.world.problems if mine.world is not None else []
            told, mine.told = mine.told, len(problems)
            return tuple(problems[told:])

    def stored(self, rank: int) -> int:
        """The newest step of the rank's world that was stored; -1: none."""
        with self._changed:
            world = self._known(rank).world
            return world.stored if world is not None else -1
