"""How the savers of a world agree on a step and store it: when the world ended, or when a user asks for it.

Each saver writes a `Vote` with the saves that it holds to a directory that all savers see; for a user's request, its
name ends with the request's number::

    <directory>/.breakpoint.<session>/<saver>.vote      not finished yet
    <directory>/.breakpoint.<session>/<saver>.done      finished; the last one removes the directory

The same votes lead every saver to the same decision, without further communication.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dlrover._util import decoding
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import protocol
from dlrover.checkpoint.saver.ranks import GenerationSlot, RankMemory, Ranks, SaveGroup
from dlrover.checkpoint.saver.tasks import Task, Tasks
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import Store, join, reason

logger = logging.getLogger(__name__)

VOTE_PATIENCE = 30.0
"""Seconds to wait for the votes of other savers, which may notice the end of the world later."""
PARTIAL_PATIENCE = 10.0
"""The same where nodes of the world are lost: the others have stopped their workers long since."""
_PLACE = ".breakpoint."
_VOTE, _DONE = ".vote", ".done"
ASKED_PATIENCE = 10.0
"""The same on a user's request: the training may wait as long for memory to save to."""
ATTEMPTS = 3
"""Votes on a user's request, as long as the nodes have no save in common."""
NOTHING_SAVED = "The program has saved nothing to memory yet."
NO_ANSWER = "The savers of some ranks do not answer."
NOT_COMMON = "The ranks have no save in common."
SETTLE = 2.0
"""Seconds that a world's other ranks get, after the first one ends, to complete a save or end."""
_NOT_COMMON = "Step {} was not stored: its world ended before all ranks had saved it."


@dataclass(eq=False)
class Break:
    """A world that ended, or whose newest save a user wants stored; and the memory that is kept for that."""

    group: SaveGroup
    since: float
    request: str = ""
    """Number of the user's request; empty if the world ended."""
    stored: SaveId | None = None
    """The save that is stored."""
    problem: str = ""
    """Why nothing is stored, in one sentence."""
    slots: dict[int, list[GenerationSlot]] = field(default_factory=dict)
    """By rank: its pinned generations."""
    saves: dict[int, tuple[SaveId, ...]] = field(default_factory=dict)
    """By rank: the saves in memory after the workers ended; empty until then."""


class Breaks:
    """Queue of ended worlds, which are handled one at a time."""

    def __init__(self, ranks: Ranks, tasks: Tasks) -> None:
        self._ranks = ranks
        self._tasks = tasks
        self._changed = ranks.changed
        self._open: list[Break] = []

    # ---- for callers that hold the lock of the ranks

    @property
    def pending(self) -> bool:
        """True if an ended world is not finished yet."""
        return bool(self._open)

    def only(self, session: int) -> bool:
        """Return whether no world but ``session`` is in the queue."""
        return all(ended.group.joined.session == session for ended in self._open)

    def note(self, group: SaveGroup) -> None:
        """Queue an ending world that is to be stored, unless its newest save was voted on before."""
        known = any(b.group is group and not b.request for b in self._open)
        if known or not (group.joined.save_at_breakpoint or group.store_at_end):
            return
        held = {rank: _slots_of(mine, group) for rank, mine in self._ranks.memories.items()}
        if group.voted is None or _newest(_saves(held)) > group.voted:
            self._open.append(Break(group, time.monotonic()))
            self._changed.notify_all()

    def ask(self, request: str) -> Break:
        """Queue a user's request to store the newest save of the present world; wait until it is carried out."""
        group = self._ranks.group
        if group is None:
            group = SaveGroup(protocol.JoinSaver(0, 0, ()))
            return Break(group, 0.0, request, problem="No worker has joined its saver yet.")
        asked = Break(group, time.monotonic(), request)
        self._open.append(asked)
        self._changed.notify_all()
        self._changed.wait_for(lambda: asked not in self._open)
        return asked

    def left(self, rank: int, mine: RankMemory) -> None:
        """Pin the saves of a rank whose worker left an ended world: they may still be needed."""
        for ended in self._open:
            if ended.group is mine.group and not ended.saves:
                self._pin(ended, rank, mine)

    def _pin(self, ended: Break, rank: int, mine: RankMemory) -> None:
        kept = ended.slots.setdefault(rank, [])
        for slot in _slots_of(mine, ended.group):
            if all(slot is not other for other in kept):
                slot.pins += 1
                kept.append(slot)

    def _is_settled(self, ended: Break) -> bool:
        memories = self._ranks.memories
        present = [memories[rank] for rank in ended.group.joined.ranks if rank in memories]
        return not any(mine.owner and mine.group is ended.group for mine in present)

    # ---- for the thread that carries them out

    def next(self) -> Break:
        """Wait for an ended world, and up to `SETTLE` seconds for its workers to end; pin its memory.

        A user's request waits for nothing, and its memory is pinned later.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._open))
            ended = self._open[0]
            if ended.request:
                return ended
            left = ended.since + SETTLE - time.monotonic()
            self._changed.wait_for(lambda: self._is_settled(ended), max(0.0, left))
            for rank, mine in self._ranks.memories.items():
                self._pin(ended, rank, mine)
            ended.saves = _saves(ended.slots)
            ended.group.voted = _newest(ended.saves)
            return ended

    def pause(self, ended: Break, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether another world needs the memory.

        On a user's request, wait in any case: the training gets the memory afterwards.
        """
        with self._changed:
            if ended.request:
                self._changed.wait_for(lambda: False, seconds)
                return False
            return self._changed.wait_for(
                lambda: any(self._tasks.is_starved(rank) for rank in ended.slots), seconds
            )

    def store(self, ended: Break, save: SaveId | None, ranks: tuple[int, ...]) -> None:
        """Persist some ranks' parts of a save; give up newer saves that were requested.

        Wait until nothing of the world is left to persist.
        """
        session = ended.group.joined.session
        with self._changed:
            for task in self._tasks.of(session):
                other = task.save == save and ranks and set(task.ranks) != set(ranks)
                if save is None or task.save > save or other:
                    self._tasks.cancel(task, _NOT_COMMON.format(task.step))
            self._changed.wait_for(lambda: not self._is_cancelling(session))
            stored = self._begin(ended, save, ranks) if save is not None and ranks else None
            self._unpin(ended)
            sessions = {session} if save is None else {session, save.session}
            self._changed.wait_for(
                lambda: not any(t.complete for of in sessions for t in self._tasks.of(of))
            )
            if stored is not None and stored.problem:
                ended.stored, ended.problem = None, stored.problem

    def pin_own(self, asked: Break) -> None:
        """Pin all that the node's own ranks hold; what is pinned already stays so."""
        with self._changed:
            for rank in asked.group.joined.ranks:
                if rank in self._ranks.memories:
                    self._pin(asked, rank, self._ranks.memories[rank])
            asked.saves = _saves(asked.slots)

    def store_asked(self, asked: Break, ranks: tuple[int, ...]) -> None:
        """Persist some ranks' parts of the save that a user wants, and wait until that is done or has failed."""
        save = asked.stored
        with self._changed:
            if save is not None and ranks:
                task = self._begin(asked, save, ranks)
                self._unpin(asked)
                self._changed.wait_for(lambda: self._tasks.find(save) is None)
                if task.problem:
                    asked.stored, asked.problem = None, task.problem

    def _begin(self, ended: Break, save: SaveId, ranks: tuple[int, ...]) -> Task:
        """Return the task that persists a save; it may be under way since the program asked for it."""
        task = self._tasks.find(save)
        if task is None:
            task = self._task(ended, save, ranks)
            self._tasks.add(task)
        return task

    def _is_cancelling(self, session: int) -> bool:
        return any(task.given_up for task in self._tasks.of(session))

    def _task(self, ended: Break, save: SaveId, ranks: tuple[int, ...]) -> Task:
        slots = {rank: next(s for s in ended.slots[rank] if s.saved == save) for rank in ranks}
        for slot in slots.values():
            slot.pins += 1
        request = ended.request
        mark = storage.requested(request) if request else storage.BREAKPOINT_GIVEN_UP
        return Task(ended.group, save, ranks, slots, mark=mark)

    def finish(self, ended: Break) -> None:
        """Remove a world that has been stored, or cannot be."""
        with self._changed:
            self._unpin(ended)
            if not ended.request:
                step = -1 if ended.stored is None else ended.stored.step
                ended.group.at_end = protocol.SavedNow(step, ended.problem)
            self._open.remove(ended)
            self._changed.notify_all()

    def _unpin(self, ended: Break) -> None:
        for slots in ended.slots.values():
            for slot in slots:
                slot.unpin()
        ended.slots.clear()
        self._changed.notify_all()


def _slots_of(mine: RankMemory, group: SaveGroup) -> list[GenerationSlot]:
    """Return a world's saves; if it is to be stored at its end, also what it has loaded: valid saves of as many ranks."""
    session = group.joined.session
    return [
        slot
        for slot in mine.slots
        if slot.saved is not None
        and (slot.saved.session == session or (group.store_at_end and _fits(slot, group)))
    ]


def _fits(slot: GenerationSlot, group: SaveGroup) -> bool:
    header = None if slot.outdated else slot.header()
    return header is not None and header.world_size == group.joined.world_size


def _saves(slots: Mapping[int, Sequence[GenerationSlot]]) -> dict[int, tuple[SaveId, ...]]:
    return {
        rank: tuple(slot.saved for slot in held if slot.saved is not None)
        for rank, held in slots.items()
    }


def _newest(saves: Mapping[int, Sequence[SaveId]]) -> tuple[SaveId, ...]:
    """Return only the newest save; empty if there is none."""
    return tuple(sorted({save for held in saves.values() for save in held})[-1:])


class Vote(msgspec.Struct, frozen=True):
    """One saver's view of a world that ended."""

    saver: int
    ranks: tuple[int, ...]
    """The ranks of its node."""
    held: dict[int, tuple[SaveId, ...]]
    """By rank: the saves in this saver's memory, of its own ranks and of replicas."""
    stored: SaveId | None
    """The newest stored save of this world."""


class StoreDecision(msgspec.Struct, frozen=True):
    """The outcome of a vote: which save to store, and which saver writes which parts."""

    save: SaveId | None
    """The newest save in storage once the decision is carried out; None if there is none."""
    parts: dict[int, tuple[int, ...]]
    """By saver: the ranks whose parts it writes; empty if the save is stored already."""


def complete(votes: Sequence[Vote], world_size: int) -> bool:
    """Return whether every rank's own node has voted."""
    return {rank for vote in votes for rank in vote.ranks} >= set(range(world_size))


def common(votes: Sequence[Vote], world_size: int) -> set[SaveId]:
    """Return the saves that are in memory for all ranks."""
    held = ({s for vote in votes for s in vote.held.get(rank, ())} for rank in range(world_size))
    return set.intersection(*held)


def decide(votes: Sequence[Vote], world_size: int) -> StoreDecision:
    """Choose the newest save that is in memory for all ranks, unless it is stored already.

    A rank's own node writes its part if it holds it, else the first saver that holds a replica does.
    """
    newest = max(common(votes, world_size), default=None)
    stored = max((vote.stored for vote in votes if vote.stored is not None), default=None)
    if newest is None or (stored is not None and newest <= stored):
        return StoreDecision(stored, {})
    parts: dict[int, list[int]] = {vote.saver: [] for vote in votes}
    for rank in range(world_size):
        able = [vote for vote in votes if newest in vote.held.get(rank, ())]
        chosen = min(able, key=lambda vote: (rank not in vote.ranks, vote.saver))
        parts[chosen.saver].append(rank)
    return StoreDecision(newest, {saver: tuple(ranks) for saver, ranks in parts.items()})


class Ballot:
    """The votes on one world, as files in the checkpoint directory; those on a user's request lie by themselves."""

    def __init__(self, store: Store, session: int, request: str = "") -> None:
        self._store = store
        self._session = session
        self._request = request
        self._place = f"{_PLACE}{session:016x}" + (f".{request}" if request else "")

    def cast(self, vote: Vote) -> None:
        """Add a vote; replace an earlier one of the same saver."""
        self._store.write(self._file(vote.saver, _VOTE), msgspec.json.encode(vote))
        self._store.delete(self._file(vote.saver, _DONE))

    def votes(self) -> list[Vote]:
        """Return all readable votes, in the same order for every saver."""
        found: dict[int, Vote] = {}
        for name in self._store.names(self._place):
            if name.endswith((_VOTE, _DONE)):
                try:
                    data = self._store.read(join(self._place, name))
                    vote = decoding.json(data, Vote)
                except (FileNotFoundError, msgspec.DecodeError):
                    continue  # its saver has just renamed it
                found[vote.saver] = vote
        return [found[saver] for saver in sorted(found)]

    def close(self, saver: int) -> None:
        """Mark this saver as finished. The last saver removes the votes and the world's incomplete saves."""
        vote = self._file(saver, _VOTE)
        self._store.write(self._file(saver, _DONE), self._store.read(vote))
        self._store.delete(vote)
        if all(name.endswith(_DONE) for name in self._store.names(self._place)):
            if not self._request:
                storage.remove_given_up(self._store, self._session)
            with contextlib.suppress(OSError):
                self._store.remove(self._place)

    def _file(self, saver: int, suffix: str) -> str:
        return join(self._place, f"{saver:016x}{suffix}")


def remove_votes(store: Store, session: int) -> None:
    """Delete votes that killed savers have left, for worlds other than ``session``."""
    for name in store.names():
        if name.startswith(_PLACE) and not name.startswith(f"{_PLACE}{session:016x}"):
            with contextlib.suppress(OSError):
                store.remove(name)


class Breakpoints:
    """Background loop that stores what ended worlds had in memory, and what users ask for."""

    def __init__(self, store: Store, breaks: Breaks, saver: int) -> None:
        self._store = store
        self._breaks = breaks
        self._saver = saver

    def run(self) -> None:
        """Run forever."""
        while True:
            ended = self._breaks.next()
            try:
                self._carry_out(ended)
            except OSError as error:
                ended.stored, ended.problem = None, f"The storage failed: {reason(error)}."
                logger.error("What is in memory is not stored. %s", ended.problem)  # noqa: TRY400
            finally:
                self._breaks.finish(ended)

    def _carry_out(self, ended: Break) -> None:
        if ended.request:
            self._carry_out_asked(ended)
            return
        session, size = ended.group.joined.session, ended.group.joined.world_size
        with self._vote(ended, Ballot(self._store, session)) as votes:
            decision = decide(votes, size)
            held = any(saves for vote in votes for saves in vote.held.values())
            if held and not common(votes, size):
                ended.problem = NOT_COMMON if complete(votes, size) else NO_ANSWER
                logger.warning("Nothing new is stored from memory: %s", ended.problem)
            elif held:
                ended.stored = decision.save
            if decision.save is not None and decision.parts:
                step = decision.save.step
                logger.info("The world has ended; step %d is stored from memory", step)
            if decision.parts or complete(votes, size):
                self._breaks.store(ended, decision.save, decision.parts.get(self._saver, ()))

    def _carry_out_asked(self, asked: Break) -> None:
        """Carry out a user's request, while the training goes on.

        A training that saves very often may leave no save in common to the moments at which the nodes pin theirs. It
        waits then until the next vote, to which each node adds what it has saved since.
        """
        session, size = asked.group.joined.session, asked.group.joined.world_size
        asked.problem = NOTHING_SAVED
        for attempt in range(ATTEMPTS):
            self._breaks.pin_own(asked)
            ballot = Ballot(self._store, session, f"{asked.request}.{attempt}")
            with self._vote(asked, ballot) as votes:
                decision = decide(votes, size)
            if not complete(votes, size):
                asked.problem = NO_ANSWER
                return
            if decision.save is not None:
                asked.stored, asked.problem = decision.save, ""
                self._breaks.store_asked(asked, decision.parts.get(self._saver, ()))
                return
            if not any(held for vote in votes for held in vote.held.values()):
                return
            asked.problem = NOT_COMMON

    @contextlib.contextmanager
    def _vote(self, ended: Break, ballot: Ballot) -> Iterator[list[Vote]]:
        """Vote; give the votes of all savers that answer, for as long as these count."""
        joined = ended.group.joined
        ballot.cast(Vote(self._saver, joined.ranks, ended.saves, ended.group.stored))
        try:
            yield self._collect(ballot, ended)
        finally:
            ballot.close(self._saver)

    def _collect(self, ballot: Ballot, ended: Break) -> list[Vote]:
        size = ended.group.joined.world_size
        group = ended.group
        patience = PARTIAL_PATIENCE if group.partial else VOTE_PATIENCE + group.stopping
        until = time.monotonic() + (ASKED_PATIENCE if ended.request else patience)
        votes = ballot.votes()
        while not complete(votes, size):
            if self._breaks.pause(ended, self._store.poll) or time.monotonic() > until:
                logger.warning("The savers of some ranks of the world are not waited for longer")
                break
            votes = ballot.votes()
        return votes
