"""The steps that are to be persisted, and the memory that must stay as it is until they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.checkpoint.persist import Source
from dlrover.checkpoint.ranks import RankMemory, Ranks, Slot, World
from dlrover.checkpoint.saves import SaveId
from dlrover.checkpoint.sums import Checksums
from dlrover.errors import InfrastructureError


@dataclass(eq=False)
class Task:
    """One save to persist, once all its ranks of this node have published it."""

    world: World
    save: SaveId
    ranks: tuple[int, ...]
    """Those whose parts this node writes."""
    slots: dict[int, Slot] = field(default_factory=dict)
    at_breakpoint: bool = False
    """Whether nobody asked for it: the world has ended."""
    given_up: str = ""
    """Why it is not to be gone on with."""

    elsewhere: set[int] = field(default_factory=set)
    """Of these ranks: those whose workers write their parts themselves."""

    @property
    def step(self) -> int:
        """Which one is saved."""
        return self.save.step

    @property
    def session(self) -> int:
        """The world's."""
        return self.save.session

    @property
    def world_size(self) -> int:
        """The number of ranks of the step."""
        return self.world.joined.world_size

    @property
    def metrics(self) -> dict[str, float]:
        """What rank 0 measured, if it is of this node."""
        return self.slots[0].metrics if 0 in self.slots else {}

    @property
    def lacking(self) -> set[int]:
        """The ranks that have not published it."""
        return set(self.ranks) - self.slots.keys() - self.elsewhere

    @property
    def complete(self) -> bool:
        """Whether it can be persisted."""
        return bool(self.slots) and not self.lacking


class Tasks:
    """All of them, the oldest first."""

    def __init__(self, ranks: Ranks, sums: Checksums) -> None:
        self._ranks = ranks
        self._changed = ranks.changed
        self._sums = sums
        self._tasks: dict[SaveId, Task] = {}
        self._running: Task | None = None
        self._starved: set[int] = set()
        """Ranks that wait for a generation."""

    # ---- for whoever holds the lock of the ranks

    @property
    def ready(self) -> bool:
        """Whether there is a step that can be persisted."""
        return any(task.complete for task in self._tasks.values())

    def wants(self, rank: int) -> bool:
        """Whether a rank's memory is still to be persisted."""
        return any(rank in task.slots for task in self._tasks.values())

    def find(self, save: SaveId) -> Task | None:
        """The task for a save."""
        return self._tasks.get(save)

    def of(self, session: int) -> list[Task]:
        """A world's tasks."""
        return [task for task in self._tasks.values() if task.session == session]

    def only(self, session: int) -> bool:
        """Whether no other world has anything left to persist."""
        return all(task.session == session for task in self._tasks.values())

    def add(self, task: Task) -> None:
        """Persist a step; its generations are pinned already."""
        self._tasks[task.save] = task
        self._changed.notify_all()

    def publish(self, world: World, save: SaveId, rank: int, slot: Slot) -> None:
        """Persist a save once all ranks of the node have published it."""
        task = self._task(world, save)
        if rank not in task.slots:
            slot.pins += 1
            task.slots[rank] = slot
        self._drop_hopeless(task)

    def exempt(self, world: World, save: SaveId, rank: int) -> None:
        """Persist a save without the part of a rank, whose worker writes it itself."""
        task = self._task(world, save)
        task.elsewhere.add(rank)
        if task.elsewhere >= set(task.ranks):
            del self._tasks[save]  # there is nothing left to do here
        else:
            self._drop_hopeless(task)

    def _task(self, world: World, save: SaveId) -> Task:
        task = self.find(save)
        if task is None:
            task = Task(world, save, world.joined.ranks)
            self.add(task)
        return task

    def drop_passed(self, rank: int, mine: RankMemory) -> None:
        """A rank has gone on: what it has not published by now it will not publish."""
        for task in self.of(mine.session):
            if task.save.number <= mine.passed and rank in task.lacking:
                self._end_without(task, rank, "did not save it")

    def _drop_hopeless(self, task: Task) -> None:
        """Give a save up that a rank of the node will not publish any more."""
        for rank in sorted(task.lacking):
            known = self._ranks.memories.get(rank)
            if known is None or known.world is None:
                continue  # it has yet to connect
            if not known.owner or known.session != task.session:
                self._end_without(task, rank, "ended before")
                return
            if known.passed >= task.save.number:
                self._end_without(task, rank, "did not save it")
                return

    def _end_without(self, task: Task, rank: int, why: str) -> None:
        self.end(task, f"Step {task.step} was not stored: rank {rank} {why}.")

    def drop_incomplete(self, rank: int) -> None:
        """A rank is gone, and with it the steps that it has not published."""
        for task in list(self._tasks.values()):
            if rank in task.lacking:
                self._end_without(task, rank, "ended before")

    def drop_others(self, session: int) -> None:
        """Another world has begun, and the earlier ones will not complete their steps."""
        for task in list(self._tasks.values()):
            if task.session != session and not task.complete:
                self.end(task, f"Step {task.step} was not stored: its world ended before.")

    def cancel(self, task: Task, problem: str) -> None:
        """Give a step up, also when it is being persisted."""
        if task is self._running:
            task.given_up = problem
            self._changed.notify_all()
        else:
            self.end(task, problem)

    def end(self, task: Task, problem: str) -> None:
        """The task is done, or has failed."""
        if self._tasks.pop(task.save, None) is None:
            return
        for slot in task.slots.values():
            slot.unpin()
        task.world.note(task.save, problem)
        self._changed.notify_all()

    def is_starved(self, rank: int) -> bool:
        """Whether a rank waits for memory."""
        return rank in self._starved

    def wait_for_memory(self, rank: int, mine: RankMemory) -> None:
        """Wait while all of a rank's generations are to be persisted."""
        self._starved.add(rank)
        self._changed.notify_all()
        self._changed.wait_for(lambda: any(not slot.pinned for slot in mine.slots))
        self._starved.discard(rank)

    # ---- for the thread that persists

    def next(self) -> Task:
        """Wait for a step that is complete; the oldest one."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready)
            ready = [task for task in self._tasks.values() if task.complete]
            self._running = min(ready, key=lambda task: task.save)
            return self._running

    def sources(self, task: Task) -> dict[int, Source]:
        """What is to be written.

        Raises:
            InfrastructureError: the step is not in memory any more.
        """
        return {rank: self._sums.source(slot, task.save) for rank, slot in task.slots.items()}

    def pause(self, task: Task, seconds: float, *, yielding: bool) -> bool:
        """Wait; with ``yielding`` only while no rank needs the task's memory. Whether one does.

        Raises:
            InfrastructureError: the task was given up.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: bool(task.given_up) or (yielding and self._is_starving(task)), seconds
            )
            if task.given_up:
                raise InfrastructureError(task.given_up)
            return yielding and self._is_starving(task)

    def _is_starving(self, task: Task) -> bool:
        return any(map(self.is_starved, task.slots))

    def finish(self, task: Task, problem: str) -> None:
        """The task is done, or has failed."""
        with self._changed:
            self._running = None
            self.end(task, problem)
