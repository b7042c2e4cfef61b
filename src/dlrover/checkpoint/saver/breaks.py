"""Worlds that ended without a goodbye, whose newest step in memory should be stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.ranks import RankMemory, Ranks, Slot, World
from dlrover.checkpoint.saver.tasks import Task, Tasks

SETTLE = 2.0
"""Seconds that a world's other ranks get, after the first one ends, to complete a save or end."""
_NOT_COMMON = "Step {} was not stored: its world ended before all ranks had saved it."


@dataclass(eq=False)
class Break:
    """A world that ended, and the memory that is kept for it."""

    world: World
    since: float
    slots: dict[int, list[Slot]] = field(default_factory=dict)
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
        return all(ended.world.joined.session == session for ended in self._open)

    def note(self, world: World) -> None:
        """Queue an ending world that wants save at breakpoint, unless its newest save was voted on before."""
        if not world.joined.save_at_breakpoint or any(b.world is world for b in self._open):
            return
        held = {rank: _slots_of(mine, world) for rank, mine in self._ranks.memories.items()}
        if world.voted is None or _newest(_saves(held)) > world.voted:
            self._open.append(Break(world, time.monotonic()))
            self._changed.notify_all()

    def left(self, rank: int, mine: RankMemory) -> None:
        """Pin the saves of a rank whose worker left an ended world: they may still be needed."""
        for ended in self._open:
            if ended.world is mine.world and not ended.saves:
                self._pin(ended, rank, mine)

    def _pin(self, ended: Break, rank: int, mine: RankMemory) -> None:
        kept = ended.slots.setdefault(rank, [])
        for slot in _slots_of(mine, ended.world):
            if all(slot is not other for other in kept):
                slot.pins += 1
                kept.append(slot)

    def _is_settled(self, ended: Break) -> bool:
        memories = self._ranks.memories
        present = [memories[rank] for rank in ended.world.joined.ranks if rank in memories]
        return not any(mine.owner and mine.world is ended.world for mine in present)

    # ---- for the thread that carries them out

    def next(self) -> Break:
        """Wait for an ended world, and up to `SETTLE` seconds for its workers to end; pin its memory."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._open))
            ended = self._open[0]
            left = ended.since + SETTLE - time.monotonic()
            self._changed.wait_for(lambda: self._is_settled(ended), max(0.0, left))
            for rank, mine in self._ranks.memories.items():
                self._pin(ended, rank, mine)
            ended.saves = _saves(ended.slots)
            ended.world.voted = _newest(ended.saves)
            return ended

    def pause(self, ended: Break, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether another world needs the memory."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(self._tasks.is_starved(rank) for rank in ended.slots), seconds
            )

    def store(self, ended: Break, save: SaveId | None, ranks: tuple[int, ...]) -> None:
        """Persist some ranks' parts of a save; give up newer saves that were requested.

        Wait until nothing of the world is left to persist.
        """
        session = ended.world.joined.session
        with self._changed:
            for task in self._tasks.of(session):
                other = task.save == save and ranks and set(task.ranks) != set(ranks)
                if save is None or task.save > save or other:
                    self._tasks.cancel(task, _NOT_COMMON.format(task.step))
            self._changed.wait_for(lambda: not self._is_cancelling(session))
            if save is not None and ranks and self._tasks.find(save) is None:
                self._tasks.add(self._task(ended, save, ranks))
            self._unpin(ended)
            self._changed.wait_for(lambda: not any(t.complete for t in self._tasks.of(session)))

    def _is_cancelling(self, session: int) -> bool:
        return any(task.given_up for task in self._tasks.of(session))

    def _task(self, ended: Break, save: SaveId, ranks: tuple[int, ...]) -> Task:
        slots = {rank: next(s for s in ended.slots[rank] if s.saved == save) for rank in ranks}
        for slot in slots.values():
            slot.pins += 1
        return Task(ended.world, save, ranks, slots, at_breakpoint=True)

    def finish(self, ended: Break) -> None:
        """Remove a world that has been stored, or cannot be."""
        with self._changed:
            self._unpin(ended)
            self._open.remove(ended)
            self._changed.notify_all()

    def _unpin(self, ended: Break) -> None:
        for slots in ended.slots.values():
            for slot in slots:
                slot.unpin()
        ended.slots.clear()
        self._changed.notify_all()


def _slots_of(mine: RankMemory, world: World) -> list[Slot]:
    session = world.joined.session
    return [s for s in mine.slots if s.saved is not None and s.saved.session == session]


def _saves(slots: Mapping[int, Sequence[Slot]]) -> dict[int, tuple[SaveId, ...]]:
    return {
        rank: tuple(slot.saved for slot in held if slot.saved is not None)
        for rank, held in slots.items()
    }


def _newest(saves: Mapping[int, Sequence[SaveId]]) -> tuple[SaveId, ...]:
    """Return only the newest save; empty if there is none."""
    return tuple(sorted({save for held in saves.values() for save in held})[-1:])
