"""The latest that the nodes of a round told of what their workers do."""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.master.machine import inputs
from dlrover.spec.activities import Activity
from dlrover.spec.activity import WorkerActivity, mean


class Activities:
    """What the workers of the latest round do, by node."""

    def __init__(self) -> None:
        self.round = 0
        self.steps = 0
        """The most steps of a node."""
        self._workers: dict[int, tuple[WorkerActivity, ...]] = {}
        self._heard: set[int] = set()

    def note(self, node: int, round_: int, steps: int, workers: tuple[WorkerActivity, ...]) -> None:
        """Keep a node's report. What is said of an older round is forgotten."""
        if round_ < self.round:
            return
        if round_ > self.round:
            self.round, self.steps = round_, 0
            self._workers.clear()
            self._heard.clear()
        self._heard.add(node)
        self.steps = max(self.steps, steps)
        if workers:
            self._workers[node] = workers

    @property
    def known(self) -> bool:
        """Whether any node told what its workers do."""
        return bool(self._workers)

    @property
    def first_step(self) -> int:
        """The step that the round began with; -1 while no worker has told it."""
        return max((worker.first_step for worker in self._told()), default=-1)

    def seconds_left(self) -> float | None:
        """How long the training will take at its pace of this round; None while nobody knows.

        The pace is that of all that happens between steps, checkpoints and evaluations included.
        """
        left = (
            worker.left * sum(worker.seconds[Activity.STEP :]) / worker.steps
            for node in self._workers.values()
            for worker in node
            if worker.left >= 0 and worker.steps > 0
        )
        return max(left, default=None)

    def progress(self, members: Iterable[int]) -> inputs.Progressed:
        """Where the round stands: the mean over the workers of its ``members``, the nodes that train.

        The mean is left out until every member was heard: the next one has to be over the same workers, or
        the difference of the two says nothing. A new master hears them one after another. Records of another
        shape, as another version of the agent might send, are left out.
        """
        seconds = mean(self._told()) if self._heard.issuperset(members) else ()
        return inputs.Progressed(self.round, self.steps, seconds, self.first_step)

    def _told(self) -> tuple[WorkerActivity, ...]:
        """The latest report of each worker, in the shape that this version knows."""
        reported = (worker for node in self._workers.values() for worker in node)
        return tuple(worker for worker in reported if len(worker.seconds) == len(Activity))
