"""Latest reports of a round's nodes on what their workers do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from dlrover.master.machine import inputs
from dlrover.rpc.messages import Heartbeat
from dlrover.spec.activity import Activity
from dlrover.spec.measurements import WorkerActivity

RATE_WINDOW = 60.0
"""Seconds over which the rate of steps is measured."""


class Activities:
    """Activities of the workers of the latest round, by node."""

    def __init__(self) -> None:
        self.round = 0
        self.steps = 0
        """Maximum number of steps of any node."""
        self._workers: dict[int, tuple[float, tuple[WorkerActivity, ...]]] = {}
        self._reported: set[int] = set()
        self._left_before: float | None = None
        """Seconds that the training had left at the end of an earlier round; None while unknown."""
        self._paces: deque[tuple[float, int]] = deque()
        """Times and numbers of steps of the last `RATE_WINDOW`."""

    def note(self, node: int, message: Heartbeat, now: float) -> None:
        """Record a node's report; ignore one of an older round."""
        round_, steps, workers = message.round, message.steps, message.workers
        if round_ < self.round:
            return
        if round_ > self.round:
            self._left_before = self.latest_seconds_left()
            self.round, self.steps = round_, 0
            self._workers.clear()
            self._reported.clear()
            self._paces.clear()
        self._reported.add(node)
        if steps > self.steps or not self._paces:
            self._paces.append((now, max(steps, self.steps)))
            while now - self._paces[0][0] > RATE_WINDOW and len(self._paces) > 2:
                self._paces.popleft()
        self.steps = max(self.steps, steps)
        if workers:
            self._workers[node] = now, workers

    @property
    def known(self) -> bool:
        """True if any node has reported what its workers do."""
        return bool(self._workers)

    @property
    def first_step(self) -> int:
        """Step that the round began with; -1 while no worker has reported it."""
        return max((worker.first_step for _, worker in self._latest()), default=-1)

    def rate(self, now: float) -> float:
        """Return the steps per second lately; 0.0 while unknown, and lower the longer no new step comes."""
        if len(self._paces) < 2:
            return 0.0
        (since, first), (until, last) = self._paces[0], self._paces[-1]
        seconds = max(until - since, now - since - RATE_WINDOW / 2)
        return (last - first) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Return how long the training will take at the pace of this round; None while unknown.

        The pace includes everything between steps, such as checkpoints and evaluations.
        """
        left = (
            worker.left * sum(worker.seconds[Activity.STEP :]) / worker.steps
            for _, node in self._workers.values()
            for worker in node
            if worker.left >= 0 and worker.steps > 0
        )
        return max(left, default=None)

    def latest_seconds_left(self) -> float | None:
        """Return `seconds_left`; before the first steps of a round that of an earlier one."""
        left = self.seconds_left()
        return self._left_before if left is None else left

    def progress(self, members: Iterable[int], now: float) -> inputs.Progressed:
        """Return the progress of the round: the mean over the workers of ``members``, the training nodes.

        The mean is left out until every member has reported. Otherwise the next mean would be over other
        workers, and their difference would mean nothing. A new master hears from the nodes one after another.
        """
        idle = self._idle(now)
        seconds = self._mean(now, idle) if self._reported.issuperset(members) else ()
        return inputs.Progressed(
            self.round, self.steps, seconds, self.first_step, idle, self._age_at_end()
        )

    def _mean(self, now: float, idle: float) -> tuple[float, ...]:
        """Return the mean seconds by `Activity`; a worker's current activity goes on since its report.

        Otherwise the time since the oldest reports would be missing and count as something else.
        """
        latest = list(self._latest())
        sums = [
            sum(column) for column in zip(*(worker.seconds for _, worker in latest), strict=True)
        ]
        for at, worker in latest:
            if not worker.ended:
                sums[worker.doing] += max(0.0, now - at) - idle
        return tuple(seconds / len(latest) for seconds in sums)

    def _idle(self, now: float) -> float:
        """Return for how long all living workers have been in the same step; 0.0 if any does something else.

        After a fault that the master has not heard of yet, such as during its absence, this is no training.
        """
        living = [(at, worker) for at, worker in self._latest() if not worker.ended]
        if any(worker.doing != Activity.STEP for _, worker in living):
            return 0.0
        waits = (
            min(max(0.0, worker.since), worker.seconds[Activity.STEP]) + max(0.0, now - at)
            for at, worker in living
        )
        return min(waits, default=0.0)

    def _age_at_end(self) -> float:
        """Return the mean age of the workers at their end; 0.0 while any lives."""
        workers = [worker for _, worker in self._latest()]
        if not workers or not all(worker.ended for worker in workers):
            return 0.0
        return sum(sum(worker.seconds) for worker in workers) / len(workers)

    def _latest(self) -> Iterator[tuple[float, WorkerActivity]]:
        """Yield the latest report of each worker with its time."""
        for at, workers in self._workers.values():
            for worker in workers:
                yield at, worker
