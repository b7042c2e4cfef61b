"""The tasks of a framework's own cluster: which processes serve, and which of them the coordinator uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.errors import ProtocolError
from dlrover.spec.requests.cluster import (
    MAX_TASKS,
    ClusterReply,
    ClusterRequest,
    ClusterTask,
    EnterCluster,
    LeaveCluster,
    LookCluster,
    UseCluster,
)


@dataclass
class TaskCluster:
    """The tasks of one job. Only `handle` changes them."""

    #: the latest start of each task, by role and index
    tasks: dict[tuple[str, int], ClusterTask] = field(default_factory=dict)
    #: tasks that are to end
    leaving: set[ClusterTask] = field(default_factory=set)
    #: tasks that the coordinator uses
    used: set[ClusterTask] = field(default_factory=set)
    #: the coordinator's latest note
    note: bytes = b""

    def handle(self, request: ClusterRequest) -> ClusterReply:
        """Handle a request and return the cluster.

        Raises:
            ProtocolError: a later start of the task is known; nothing has changed.
        """
        match request:
            case EnterCluster(task):
                self._enter(task)
            case LeaveCluster(task):
                if self.tasks.get((task.role, task.index)) == task:
                    self.leaving.add(task)
                self._let_go()
            case UseCluster(tasks, note):
                self.used, self.note = set(tasks), note
                self._let_go()
            case LookCluster():
                pass
        return ClusterReply(
            tasks=tuple(sorted(self.tasks.values())),
            leaving=tuple(sorted(self.leaving)),
            note=self.note,
        )

    def _enter(self, task: ClusterTask) -> None:
        place = task.role, task.index
        known = self.tasks.get(place)
        if known is not None and known.start > task.start:
            raise ProtocolError(
                f"Task {task.index} of {task.role} has start {known.start}; start {task.start} is over."
            )
        if known is None and len(self.tasks) >= MAX_TASKS:
            raise ProtocolError(f"Task {task.index} of {task.role} is one more than {MAX_TASKS}.")
        if known != task:
            self.leaving.discard(known or task)
            self.tasks[place] = task

    def _let_go(self) -> None:
        """Remove the tasks that are to end and are out of use."""
        for task in self.leaving - self.used:
            self.leaving.discard(task)
            del self.tasks[task.role, task.index]

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        for (role, index), task in self.tasks.items():
            assert (task.role, task.index) == (role, index)
        assert self.leaving <= set(self.tasks.values()), "a task leaves that is not there"
        assert self.leaving <= self.used, "a task that is out of use leaves"
