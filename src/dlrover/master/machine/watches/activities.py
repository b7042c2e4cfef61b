"""Latest reports of a round's nodes on what their workers do."""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.master.machine import inputs
from dlrover.spec.activity import Activity
from dlrover.spec.measurements import WorkerActivity, mean


class Activities:
    """Activities of the workers of the latest round, by node."""

    def __init__(self) -> None:
        self.round = 0
        self.steps = 0
        """Maximum number of steps of any node."""
        self._workers: dict[int, tuple[WorkerActivity, ...]] = {}
        self._reported: set[int] = set()

    def note(self, node: int, round_: int, steps: int, workers: tuple[WorkerActivity, ...]) -> None:
        """Record a node's report; ignore one of an older round."""
        if round_ < self.round:
            return
        if round_ > self.round:
            self.round, self.steps = round_, 0
            self._workers.clear()
            self._reported.clear()
        self._reported.add(node)
        self.steps = max(self.steps, steps)
        if workers:
            self._workers[node] = workers

    @property
    def known(self) -> bool:
        """True if any node has reported what its workers do."""
        return bool(self._workers)

    @property
    def first_step(self) -> int:
        """Step that the round began with; -1 while no worker has reported it."""
        return max((worker.first_step for worker in self._latest()), default=-1)

    def seconds_left(self) -> float | None:
        """Return how long the training will take at the pace of this round; None while unknown.

        The pace includes everything between steps, such as checkpoints and evaluations.
        """
        left = (
            worker.left * sum(worker.seconds[Activity.STEP :]) / worker.steps
            for node in self._workers.values()
            for worker in node
            if worker.left >= 0 and worker.steps > 0
        )
        return max(left, default=None)

    def progress(self, members: Iterable[int]) -> inputs.Progressed:
        """Return the progress of the round: the mean over the workers of ``members``, the training nodes.

        The mean is left out until every member has reported. Otherwise the next mean would be over other
        workers, and their difference would mean nothing. A new master hears from the nodes one after another.
        Reports of another shape, as another version of the agent may send, are ignored.
        """
        seconds = mean(self._latest()) if self._reported.issuperset(members) else ()
        return inputs.Progressed(self.round, self.steps, seconds, self.first_step)

    def _latest(self) -> tuple[WorkerActivity, ...]:
        """Return the latest report of each worker, in the shape that this version knows."""
        reported = (worker for node in self._workers.values() for worker in node)
        return tuple(worker for worker in reported if len(worker.seconds) == len(Activity))
