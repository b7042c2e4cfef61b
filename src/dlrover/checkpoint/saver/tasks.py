"""The steps to persist, and the generations pinned until they are persisted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import EndedWorker
from dlrover.checkpoint.saver.ranks import Checksums, GenerationSlot, RankMemory, Ranks, SaveGroup
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.persist import RankPart
from dlrover.errors import InfrastructureError


@dataclass(eq=False)
class Task:
    """One save to persist, once all its ranks on this node have committed it."""

    group: SaveGroup
    save: SaveId
    ranks: tuple[int, ...]
    """Ranks whose parts this node writes."""
    slots: dict[int, GenerationSlot] = field(default_factory=dict)
    mark: str = storage.GIVEN_UP
    """Mark file if it is given up: the program asked for it, a user did, or the world ended."""
    given_up: str = ""
    """Cancellation reason; empty while active."""
    problem: str = ""
    """Why the save was not stored; empty until then, and if it was."""

    elsewhere: set[int] = field(default_factory=set)
    """Ranks among these whose workers write their parts themselves."""

    @property
    def step(self) -> int:
        """The saved step."""
        return self.save.step

    @property
    def session(self) -> int:
        """Session of the world."""
        return self.save.session

    @property
    def world_size(self) -> int:
        """The number of ranks of the step."""
        return self.group.joined.world_size

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of rank 0; empty if rank 0 is on another node."""
        return self.slots[0].metrics if 0 in self.slots else {}

    @property
    def lacking(self) -> set[int]:
        """Ranks that have not committed the save."""
        return set(self.ranks) - self.slots.keys() - self.elsewhere

    @property
    def complete(self) -> bool:
        """True if the save can be persisted."""
        return bool(self.slots) and not self.lacking


class Tasks:
    """All tasks of this saver."""

    def __init__(self, ranks: Ranks, sums: Checksums) -> None:
        self._ranks = ranks
        self._changed = ranks.changed
        self._sums = sums
        self._tasks: dict[SaveId, Task] = {}
        self._running: Task | None = None
        self._starved: set[int] = set()
        """Ranks that wait for a free generation."""

    # ---- call these with the lock of the ranks held

    @property
    def ready(self) -> bool:
        """True if a step can be persisted."""
        return any(task.complete for task in self._tasks.values())

    def wants(self, rank: int) -> bool:
        """Return True if a rank's memory must still be persisted."""
        return any(rank in task.slots for task in self._tasks.values())

    def find(self, save: SaveId) -> Task | None:
        """Return the task for a save; None if there is none."""
        return self._tasks.get(save)

    def of(self, session: int) -> list[Task]:
        """Return a world's tasks."""
        return [task for task in self._tasks.values() if task.session == session]

    def only(self, session: int) -> bool:
        """Return True if no other world has anything left to persist."""
        return all(task.session == session for task in self._tasks.values())

    def add(self, task: Task) -> None:
        """Add a task; its generations are pinned already."""
        self._tasks[task.save] = task
        self._changed.notify_all()

    def add_part(self, group: SaveGroup, save: SaveId, rank: int, slot: GenerationSlot) -> None:
        """Add a rank's part of a save, which is persisted once all ranks of the node have committed theirs."""
        task = self._task(group, save)
        if rank not in task.slots:
            slot.pins += 1
            task.slots[rank] = slot
        self._drop_hopeless(task)

    def exempt(self, group: SaveGroup, save: SaveId, rank: int) -> None:
        """Persist a save without the part of one rank, whose worker writes it itself."""
        task = self._task(group, save)
        task.elsewhere.add(rank)
        if task.elsewhere >= set(task.ranks):
            del self._tasks[save]  # nothing is left to do here
        else:
            self._drop_hopeless(task)

    def _task(self, group: SaveGroup, save: SaveId) -> Task:
        task = self.find(save)
        if task is None:
            task = Task(group, save, group.joined.ranks)
            self.add(task)
        return task

    def drop_passed(self, rank: int, mine: RankMemory) -> None:
        """End tasks that a rank has passed without committing its part: it never will."""
        for task in self.of(mine.session):
            if task.save.number <= mine.passed and rank in task.lacking:
                self._end_without(task, rank, "did not save it")

    def _drop_hopeless(self, task: Task) -> None:
        """Give a save up if a rank of the node will never commit it."""
        for rank in sorted(task.lacking):
            known = self._ranks.memories.get(rank)
            if known is None or known.group is None:
                continue  # it has yet to connect
            if not known.owner or known.session != task.session:
                self._end_without(task, rank, "ended before")
                return
            if known.passed >= task.save.number:
                self._end_without(task, rank, "did not save it")
                return

    def _end_without(self, task: Task, rank: int, why: str) -> None:
        self.cancel(task, f"Step {task.step} was not stored: rank {rank} {why}.")

    def drop_incomplete(self, rank: int) -> None:
        """End all tasks that lack the part of a rank that is gone."""
        for task in list(self._tasks.values()):
            if rank in task.lacking:
                self._end_without(task, rank, "ended before")

    def drop_others(self, session: int) -> None:
        """End the incomplete tasks of earlier worlds, because another world has begun."""
        for task in list(self._tasks.values()):
            if task.session != session and not task.complete:
                self.end(task, f"Step {task.step} was not stored: its world ended before.")

    def drop_ended(self, ended: Iterable[EndedWorker]) -> None:
        """Give up the saves of earlier worlds for which this node waits for the part of a worker that is gone.

        What the savers agreed to persist is in the memory of some node for each rank.
        """
        for one in ended:
            for task in self.of(one.session):
                if task.save.number > one.number and task.mark == storage.GIVEN_UP:
                    self._end_without(task, one.rank, "ended before")

    def cancel(self, task: Task, problem: str) -> None:
        """Give a task up, even while it is being persisted."""
        if task is self._running:
            task.given_up = problem
            self._changed.notify_all()
        else:
            self.end(task, problem)

    def end(self, task: Task, problem: str) -> None:
        """End a task; an empty ``problem`` means that the save is stored."""
        if self._tasks.pop(task.save, None) is None:
            return
        for slot in task.slots.values():
            slot.unpin()
        task.problem = problem
        task.group.note(task.save, problem)
        self._changed.notify_all()

    def is_starved(self, rank: int) -> bool:
        """Return True if a rank waits for memory."""
        return rank in self._starved

    def wait_for_memory(self, rank: int, mine: RankMemory) -> None:
        """Wait until a rank has a generation to write."""
        self._starved.add(rank)
        self._changed.notify_all()
        self._changed.wait_for(lambda: mine.has_room(len(mine.slots)))
        self._starved.discard(rank)

    # ---- for the thread that persists

    def next(self) -> Task:
        """Wait for a complete task; return the oldest one."""
        with self._changed:
            self._changed.wait_for(lambda: self.ready)
            ready = [task for task in self._tasks.values() if task.complete]
            self._running = min(ready, key=lambda task: task.save)
            return self._running

    def sources(self, task: Task) -> dict[int, RankPart]:
        """Return the sources to persist, by rank.

        Raises:
            InfrastructureError: the step is no longer in memory.
        """
        return {rank: self._sums.source(slot, task.save) for rank, slot in task.slots.items()}

    def pause(self, task: Task, seconds: float, *, yielding: bool) -> bool:
        """Wait; with ``yielding`` only while no rank needs the task's memory. Return True if one does.

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
        """End the task that is being persisted; see `end`."""
        with self._changed:
            self._running = None
            self.end(task, problem)
