"""Save at breakpoint: how the savers of a world that ended agree on a step and store it.

Each saver writes a `Vote` with the saves that it holds to a directory that all savers see::

    <directory>/.breakpoint.<session>/<saver>.vote      not finished yet
    <directory>/.breakpoint.<session>/<saver>.done      finished; the last one removes the directory

The same votes lead every saver to the same decision, without further communication.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec

from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.breaks import Break, Breaks
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import Store, join

logger = logging.getLogger(__name__)

VOTE_PATIENCE = 30.0
"""Seconds to wait for the votes of other savers, which may notice the end of the world later."""
_PLACE = ".breakpoint."
_VOTE, _DONE = ".vote", ".done"


class Vote(msgspec.Struct, frozen=True):
    """One saver's view of a world that ended."""

    saver: int
    ranks: tuple[int, ...]
    """The ranks of its node."""
    held: dict[int, tuple[SaveId, ...]]
    """By rank: the saves in this saver's memory, of its own ranks and of replicas."""
    stored: SaveId | None
    """The newest stored save of this world."""


class Decision(msgspec.Struct, frozen=True):
    """The outcome of a vote: which save to store, and which saver writes which parts."""

    save: SaveId | None
    """The newest save in storage once the decision is carried out; None if there is none."""
    parts: dict[int, tuple[int, ...]]
    """By saver: the ranks whose parts it writes; empty if the save is stored already."""


def complete(votes: Sequence[Vote], world_size: int) -> bool:
    """Return whether every rank's own node has voted."""
    return {rank for vote in votes for rank in vote.ranks} >= set(range(world_size))


def decide(votes: Sequence[Vote], world_size: int) -> Decision:
    """Choose the newest save that is in memory for all ranks, unless it is stored already.

    A rank's own node writes its part if it holds it, else the first saver that holds a replica does.
    """
    common: set[SaveId] | None = None
    for rank in range(world_size):
        saves = {save for vote in votes for save in vote.held.get(rank, ())}
        common = saves if common is None else common & saves
    newest = max(common or (), default=None)
    stored = max((vote.stored for vote in votes if vote.stored is not None), default=None)
    if newest is None or (stored is not None and newest <= stored):
        return Decision(stored, {})
    parts: dict[int, list[int]] = {vote.saver: [] for vote in votes}
    for rank in range(world_size):
        able = [vote for vote in votes if newest in vote.held.get(rank, ())]
        chosen = min(able, key=lambda vote: (rank not in vote.ranks, vote.saver))
        parts[chosen.saver].append(rank)
    return Decision(newest, {saver: tuple(ranks) for saver, ranks in parts.items()})


class Ballot:
    """The votes on one world, as files in the checkpoint directory."""

    def __init__(self, store: Store, session: int) -> None:
        self._store = store
        self._session = session
        self._place = f"{_PLACE}{session:016x}"

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
                    vote = msgspec.json.decode(data, type=Vote)
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
            storage.remove_given_up(self._store, self._session)
            with contextlib.suppress(OSError):
                self._store.remove(self._place)

    def _file(self, saver: int, suffix: str) -> str:
        return join(self._place, f"{saver:016x}{suffix}")


def remove_votes(store: Store, session: int) -> None:
    """Delete votes that killed savers have left, for worlds other than ``session``."""
    for name in store.names():
        if name.startswith(_PLACE) and name != f"{_PLACE}{session:016x}":
            with contextlib.suppress(OSError):
                store.remove(name)


class Breakpoints:
    """Background loop that stores what ended worlds had in memory."""

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
                logger.error("What is in memory is not stored: %s", error)  # noqa: TRY400
            finally:
                self._breaks.finish(ended)

    def _carry_out(self, ended: Break) -> None:
        session, size = ended.world.joined.session, ended.world.joined.world_size
        vote = Vote(self._saver, ended.world.joined.ranks, ended.saves, ended.world.stored)
        ballot = Ballot(self._store, session)
        ballot.cast(vote)
        try:
            votes = self._collect(ballot, ended)
            decision = decide(votes, size)
            if decision.save is not None and decision.parts:
                step = decision.save.step
                logger.info("The world has ended; step %d is stored from memory", step)
            if decision.parts or complete(votes, size):
                self._breaks.store(ended, decision.save, decision.parts.get(self._saver, ()))
        finally:
            ballot.close(self._saver)

    def _collect(self, ballot: Ballot, ended: Break) -> list[Vote]:
        size = ended.world.joined.world_size
        until = time.monotonic() + VOTE_PATIENCE
        votes = ballot.votes()
        while not complete(votes, size):
            if self._breaks.pause(ended, self._store.poll) or time.monotonic() > until:
                logger.warning(
                    "The world has ended, and the savers of some of its ranks do not answer"
                )
                break
            votes = ballot.votes()
        return votes
