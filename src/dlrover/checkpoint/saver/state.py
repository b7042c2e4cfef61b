"""The saver's records: each rank's generations, which of them are in use, and what is left to persist.

Every method may be called from any thread; methods that block say so.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator

from dlrover._util import procs
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import protocol
from dlrover.checkpoint.saver.breakpoint import Breaks
from dlrover.checkpoint.saver.exchange import Exchange
from dlrover.checkpoint.saver.ranks import (
    ENOUGH,
    Checksums,
    NoMemoryError,
    RankMemory,
    Ranks,
    SaveGroup,
    reserve,
)
from dlrover.checkpoint.saver.tasks import Tasks
from dlrover.checkpoint.storage.first_save import FirstSaves
from dlrover.errors import InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

PREDECESSOR_WAIT = 10.0
"""Seconds that an attaching worker waits for its rank's previous process to end."""
FIRST_WAIT = 60.0
"""Seconds that a new saver waits for its first worker to connect."""
PREDECESSOR_POLL = 0.05
"""Seconds between checks for that process: its children may keep its connection open."""


class SaverState:
    """The state of a saver."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._changed = self._ranks.changed
        self.sums = Checksums(self._ranks)
        self.tasks = Tasks(self._ranks, self.sums)
        self.breaks = Breaks(self._ranks, self.tasks)
        self.exchange = Exchange(self._ranks)
        self.saver = secrets.randbits(63)
        """Random identifier of this saver."""
        self._first: list[FirstSaves] = []
        """First saves of the newest world, and of earlier worlds whose saves are not recorded yet."""
        self._connections = 0
        self._owners = 0
        self._stopping = False
        self._closed = False

    # ---- life

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Count a connection while the block runs.

        Raises:
            SaverGoneError: the saver is shutting down.
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
            if self._ranks.group is not None:
                self.breaks.note(self._ranks.group)
            self._changed.notify_all()

    def wait_until_idle(self, linger: float) -> None:
        """Wait until nothing is left to persist and no client was connected for ``linger`` seconds.

        The saver accepts no connections afterwards.
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
        pending = any(first.pending for first in self._first)
        return self.tasks.ready or self.breaks.pending or pending

    def only(self, session: int) -> bool:
        """Return whether no world but ``session`` has anything left to persist."""
        with self._changed:
            return self.tasks.only(session) and self.breaks.only(session)

    def wait_for_world(self) -> None:
        """Wait until a worker has joined a world."""
        with self._changed:
            self._changed.wait_for(lambda: self._ranks.group is not None)

    # ---- workers

    def attach(
        self, rank: int, pid: int, job: str = ""
    ) -> tuple[protocol.Attached, int, list[int]]:
        """Give a worker its rank's memory; wait for the rank's previous process and other jobs to end.

        Return the reply, the owner number that `detach` expects, and the memory's file descriptors.

        Raises:
            InfrastructureError: one of them still runs after `PREDECESSOR_WAIT` seconds.
        """
        with self._changed:
            until = time.monotonic() + PREDECESSOR_WAIT
            while (other := self._living(rank, job)) is not None:
                if time.monotonic() > until:
                    pid_of = self._ranks.memories[other].pid
                    raise InfrastructureError(
                        f"Process {pid_of} uses this checkpoint directory as rank {other}; two jobs cannot share"
                        " one. A program that only reads it makes its Checkpointer with read_only=True."
                    )
                self._changed.wait(PREDECESSOR_POLL)
            mine = self._ranks.of(rank)
            if mine.owner:
                self._end_worker(rank, mine, goodbye=False)
            if mine.group is not None:
                mine.ended = protocol.EndedWorker(mine.session, rank, mine.passed)
            self._owners += 1
            mine.owner, mine.pid, mine.job, mine.group = self._owners, pid, job, None
            self._changed.notify_all()
            attached = protocol.Attached(self.saver, self._ranks.newest, mine.ended)
            return attached, mine.owner, [slot.fd for slot in mine.slots]

    def _living(self, rank: int, job: str) -> int | None:
        """Return a rank whose living worker is this rank's own or another job's, or None."""
        for other, known in self._ranks.memories.items():
            concerned = other == rank or known.job != job
            if known.owner and concerned and (not known.pid or procs.start_time(known.pid)):
                return other
        return None

    def open(self, rank: int) -> tuple[protocol.Attached, list[int]]:
        """Return the memory of any rank, for reading."""
        with self._changed:
            return protocol.Attached(self.saver), [slot.fd for slot in self._known(rank).slots]

    def look(self) -> tuple[protocol.HeldGeneration, ...]:
        """Return all valid generations."""
        with self._changed:
            return self._ranks.held()

    def detach(self, rank: int, owner: int, *, goodbye: bool = True) -> None:
        """Note that the rank's worker is gone; drop the steps that can no longer be completed."""
        with self._changed:
            mine = self._ranks.memories[rank]
            if mine.owner == owner:
                self._end_worker(rank, mine, goodbye=goodbye)

    def _end_worker(self, rank: int, mine: RankMemory, *, goodbye: bool) -> None:
        mine.owner = 0
        if mine.group is not None and (mine.group.store_at_end or not goodbye):
            self.breaks.note(mine.group)
        self.breaks.left(rank, mine)
        self.tasks.drop_incomplete(rank)
        self._changed.notify_all()

    def join(self, rank: int, joined: protocol.JoinSaver) -> None:
        """Record the world that the rank's worker belongs to."""
        if rank not in joined.ranks or not 0 <= rank < joined.world_size:
            raise ProtocolError(f"Rank {rank} is not one of {joined.ranks} of {joined.world_size}.")
        with self._changed:
            group = self._ranks.group
            if group is None or group.joined.session != joined.session:
                group = self._ranks.group = SaveGroup(joined)
                self._first = [*(first for first in self._first if first.due), FirstSaves(joined)]
            mine = self._ranks.memories[rank]
            mine.group, mine.problems_sent, mine.passed = group, 0, 0
            self.tasks.drop_others(joined.session)
            self.tasks.drop_ended(joined.ended)
            self._changed.notify_all()

    def reserve(self, rank: int, number: int, nbytes: int) -> int:
        """Have the kernel provide memory for one generation; return how many generations the rank has left.

        If memory is short, drop the last generations, even the requested one. Wait while a generation to
        drop is still to be persisted.

        Raises:
            NoMemoryError: there is not enough for even one generation.
        """
        mine = self._known(rank)
        with mine.providing:
            while number < len(mine.slots) and not self._try_to_reserve(mine, number, nbytes, rank):
                with self._changed:
                    self._changed.wait_for(lambda: not mine.slots[-1].pinned)
                    self._ranks.drop_last(mine)
            return len(mine.slots)

    def _try_to_reserve(self, mine: RankMemory, number: int, nbytes: int, rank: int) -> bool:
        try:
            # A third generation is a convenience: it must not take what the training needs.
            reserve([mine.slots[number]], nbytes, rank, spare=number >= ENOUGH)
        except NoMemoryError as error:
            if len(mine.slots) == 1:
                raise
            logger.warning("%s One less is kept", error)
            return False
        return True

    def keep(self, rank: int, save: SaveId | None) -> None:
        """Continue from a save in memory, or from none; all other generations become invalid.

        The save stays valid until the rank's second save, even if its ranks differ from the current ones.
        """
        with self._changed:
            self._ranks.continue_from(self._known(rank), save)

    def _known(self, rank: int) -> RankMemory:
        mine = self._ranks.memories.get(rank)
        if mine is None:
            raise InfrastructureError(f"Nothing of rank {rank} is in this node's memory.")
        return mine

    # ---- saves

    def begin(self, rank: int, save: SaveId, ready: int = protocol.GENERATIONS) -> int:
        """Return the number of the generation to write; wait while all but the newest are still to be persisted.

        Only the first ``ready`` generations have their memory. If none of them but the newest may be
        overwritten, return the next one, which is not granted: ask again when it has its memory.
        """
        with self._changed:
            mine = self._known(rank)
            if self._ranks.must_wait(mine, ready):
                return ready
            if not mine.has_room(ready):
                logger.warning(
                    "Step %d waits: storage is slower than the steps sent to it", save.step
                )
                self.tasks.wait_for_memory(rank, mine)
            granted = self._ranks.grant(mine, mine.session, to_worker=True, ready=ready)
            return mine.slots.index(granted)

    def news(self, rank: int) -> str:
        """Return a pending storage message for the user; empty if none, or if another rank reports it."""
        with self._changed:
            group = self._known(rank).group
            if group is None or rank != min(group.joined.ranks):
                return ""
            news, group.news = group.news, ""
            return news

    def commit(self, rank: int, done: protocol.Commit) -> None:
        """Mark a generation as valid; persist it once all ranks of the node have committed the save.

        Raises:
            ConfigurationError: another rank of the node has saved a different step instead.
        """
        save = done.save
        with self._changed:
            mine = self._known(rank)
            if not 0 <= done.slot < len(mine.slots):
                raise ProtocolError(f"There is no generation {done.slot}.")
            if mine.group is None:
                raise ProtocolError(f"Rank {rank} saves before it has joined a world.")
            slot = mine.slots[done.slot]
            slot.remap()
            header = slot.generation.header()
            if header is None or header.save != save or slot.pinned:
                raise ProtocolError(f"Generation {done.slot} does not hold step {save.step}.")
            if save.session != mine.session:
                raise ProtocolError(f"Rank {rank} saves for another world than its own.")
            self._ranks.check_agreement(mine, save)
            self._ranks.admit(slot, save)
            slot.metrics = done.metrics
            mine.passed = save.number
            for first in self._first:
                if first.joined.session == save.session:
                    first.note_part(save, rank)
            if done.to_storage:
                self.tasks.add_part(mine.group, save, rank, slot)
            self.tasks.drop_passed(rank, mine)
            self.sums.ask(slot)
            self._changed.notify_all()

    def pass_over(self, rank: int, save: SaveId, *, written: bool) -> None:
        """Note that a rank will not commit its part of a save; ``written``: its worker stores the part."""
        with self._changed:
            mine = self._known(rank)
            if mine.group is not None and save.session == mine.session:
                mine.passed = max(mine.passed, save.number)
                if written:
                    self.tasks.exempt(mine.group, save, rank)
                self.tasks.drop_passed(rank, mine)
                self._changed.notify_all()

    def next_first_saves(self) -> tuple[FirstSaves, tuple[SaveId, ...]]:
        """Wait until a world's first saves are due to be recorded; return its entry and these saves."""
        with self._changed:
            self._changed.wait_for(lambda: any(first.due for first in self._first))
            due = [first for first in self._first if first.due]
            chosen = next((first for first in due if first.pending), due[0])
            return chosen, tuple(chosen.whole)

    def note_first_saves(
        self, first: FirstSaves, tried: int, *, recorded: bool, problem: str = ""
    ) -> None:
        """Note an attempt to record ``tried`` saves: the record exists now, does not yet, or failed."""
        with self._changed:
            first.note(tried, recorded=recorded, problem=problem)
            for other in self._first if problem else ():
                if other.pending:  # it would fail too, and nothing should wait for it
                    other.problem = problem
            if recorded:
                self._first = [first] if first is self._first[-1] else self._first[-1:]
            group = self._ranks.group
            if problem and group is not None:
                group.news = group.news or problem
            self._changed.notify_all()

    @property
    def unrecorded(self) -> str:
        """Reason why the record of whole saves is missing; empty if it exists or there were none."""
        with self._changed:
            return next((first.problem for first in self._first if first.problem), "")

    def save_now(self, request: str) -> protocol.SavedNow:
        """Store the newest save in memory, together with the world's other savers; wait until that is done.

        Raises:
            ProtocolError: the request's number cannot be part of a file's name.
        """
        if not request.isalnum():
            raise ProtocolError(f"The request {request!r} has no number.")
        with self._changed:
            asked = self.breaks.ask(request)
        return protocol.SavedNow(asked.stored.step if asked.stored else -1, asked.problem)

    def store_at_end(self, stopping: float = 0.0, *, partial: bool = False) -> None:
        """Store the newest save in memory, together with the world's other savers, once the workers end.

        Other nodes' workers may take ``stopping`` seconds for it. With ``partial``, some nodes are lost.
        """
        with self._changed:
            group = self._ranks.group
            if group is None:
                return
            group.store_at_end, group.stopping, group.partial = True, stopping, partial
            if not any(mine.owner for mine in self._ranks.memories.values()):
                self.breaks.note(group)

    def stored_at_end(self) -> protocol.SavedNow:
        """Wait until what `store_at_end` orders is done, once the workers end; return what became of it."""
        with self._changed:
            group = self._ranks.group
            if group is not None:
                self.breaks.note(group)
                self._changed.wait_for(lambda: not self.breaks.pending)
                if group.at_end and (group.at_end.problem or 0 in group.joined.ranks):
                    return group.at_end
            return protocol.SavedNow(-1, "")

    def verify(self, rank: int, number: int) -> str:
        """Compare a generation with its checksums; return what is wrong with it, or an empty text."""
        with self._changed:
            slot = self._known(rank).slots[number]
        return self.sums.verify(slot)

    def settled(self, rank: int) -> tuple[str, ...]:
        """Wait until all that the rank asked to store is durable or has failed; return the new failures."""
        with self._changed:
            mine = self._known(rank)
            self._changed.wait_for(lambda: not self.tasks.wants(rank))
            problems = mine.group.problems if mine.group is not None else []
            sent, mine.problems_sent = mine.problems_sent, len(problems)
            return tuple(problems[sent:])

    def stored(self, rank: int) -> SaveId | None:
        """Return the newest stored save of the rank's world."""
        with self._changed:
            group = self._known(rank).group
            return group.stored if group is not None else None
