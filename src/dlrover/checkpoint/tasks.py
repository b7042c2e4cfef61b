"""The steps that are to be persisted, and the memory that must stay as it is until they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.checkpoint.persist import Source
from dlrover.checkpoint.ranks import RankMemory, Ranks, Slot, World
from dlrover.checkpoint.sums import Checksums
from dlrover.errors import InfrastructureError


@dataclass(eq=False)
class Task:
    """One step to persist, once all its ranks of this node have published it."""

    world: World
    step: int
    ranks: tuple[int, ...]
    """Those whose parts this node writes."""
    slots: dict[int, Slot] = field(default_factory=dict)
    at_breakpoint: bool = False
    """Whether nobody asked for it: the world has ended."""
    given_up: str = ""
    """Why it is not to be gone on with."""

    @property
    def session(self) -> int:
        """The world's."""
        return self.world.joined.session

    @property
    def world_size(self) -> int:
        """The number of ranks of the step."""
        return self.world.joined.world_size

    @property
    def metrics(self) -> dict[str, float]:
        """What rank 0 measured, if it is of this node."""
        return self.slots[0].metrics if 0 in self.slots else {}

    @property
    def complete(self) -> bool:
        """Whether it can be persisted."""
        return self.slots.keys() >= set(self.ranks)


class Tasks:
    """All of them, the oldest first."""

    def __init__(self, ranks: Ranks, sums: Checksums) -> None:
        self._changed = ranks.changed
        self._sums = sums
        self._tasks: dict[tuple[int, int], Task] = {}
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

    def find(self, session: int, step: int) -> Task | None:
        """The task for a world's step."""
        return self._tasks.get((session, step))

    def of(self, session: int) -> list[Task]:
        """A world's tasks."""
        return [task for task in self._tasks.values() if task.session == session]

    def only(self, session: int) -> bool:
        """Whether no other world has anything left to persist."""
        return all(task.session == session for task in self._tasks.values())

    def add(self, task: Task) -> None:
        """Persist a step; its generations are pinned already."""
        self._tasks[task.session, task.step] = task
        self._changed.notify_all()

    def publish(self, world: World, step: int, rank: int, slot: Slot) -> None:
        """Persist a step once all ranks of the node have published it."""
        task = self.find(world.joined.session, step)
        if task is None:
            task = Task(world, step, world.joined.ranks)
            self.add(task)
        slot.pins += 1
        task.slots[rank] = slot

    def drop_incomplete(self, rank: int) -> None:
        """A rank is gone, and with it the steps that it has not published."""
        for task in list(self._tasks.values()):
            if rank in task.ranks and rank not in task.slots:
                self.end(task, f"Step {task.step} was not stored: rank {rank} ended before.")

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
        if self._tasks.pop((task.session, task.step), None) is None:
            return
        for slot in task.slots.values():
            slot.unpin()
        task.world.note(task.step, problem)
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
            self._running = min(ready, key=lambda task: task.step)
            return self._running

    def sources(self, task: Task) -> dict[int, Source]:
        """What is to be written.

        Raises:
            InfrastructureError: the step is not in memory any more.
        """
        return {rank: self._sums.source(slot, task.step) for rank, slot in task.slots.items()}

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
