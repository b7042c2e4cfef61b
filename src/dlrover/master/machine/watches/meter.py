"""Measurement of a world's training speed: one sample for each window of steady steps.

In synchronous training, the steps of all ranks take equally long. With parameter servers, each worker has its
own pace, so the sum of their rates counts.

The first steps of a round are excluded: they warm up caches, compile, and wait for other workers' start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median, median_low

from dlrover.spec.activity import Activity
from dlrover.spec.job import Limits
from dlrover.spec.measurements import ModelProfile, SpeedSample, WorkerActivity

WARM_UP_STEPS = 5
"""First steps of a worker in a round that do not count."""
MIN_STEPS = 10
"""Minimum number of steps in a window."""
LATE_WINDOWS = 3
"""Windows after which a worker with fewer than `MIN_STEPS` is left out, if workers do not wait for others."""
WATCHED = 0.98
"""Maximum share of compute time in a step; above it, the last gradient was missed and all time counted."""


@dataclass(frozen=True)
class Servers:
    """The parameter servers of a world."""

    count: int
    worker_cpu: float = 0.0
    """Mean number of cores of a worker's node; 0 if unknown."""
    server_cpu: float = 0.0
    """Mean number of cores of a server's node; 0 if unknown."""


@dataclass
class Meter:
    """Speed meter that measures one round after the other from the reports of its ranks."""

    limits: Limits = field(default_factory=Limits)
    #: report of each rank at the start of the window
    marks: dict[int, WorkerActivity] = field(default_factory=dict)
    latest: dict[int, WorkerActivity] = field(default_factory=dict)
    began: float | None = None

    def begin(self) -> None:
        """Start over for a new world."""
        self.marks.clear()
        self.latest.clear()
        self.began = None

    def note(self, workers: Mapping[int, WorkerActivity], now: float) -> None:
        """Record a report of a node's ranks."""
        for rank, worker in workers.items():
            if len(worker.seconds) != len(Activity) or worker.ended:
                continue
            self.latest[rank] = worker
            if worker.steps >= WARM_UP_STEPS and rank not in self.marks:
                self.marks[rank] = worker
                self.began = now if self.began is None else self.began

    def take(
        self, nodes: int, replicas: int, now: float, servers: Servers | None = None
    ) -> SpeedSample | None:
        """Return the sample of a window that has passed and begin the next one; None while it goes on.

        Args:
            nodes: Nodes of role worker.
            replicas: Workers of the world.
            now: Seconds since the epoch.
            servers: The parameter servers; None if the workers exchange their gradients.
        """
        if self.began is None or now - self.began < self.limits.autoscale_window:
            return None
        if servers is not None:
            return self._take_sum(nodes, replicas, now, servers)
        spans = [(mark, self.latest[rank]) for rank, mark in self.marks.items()]
        known = [(old, new) for old, new in spans if new.steps - old.steps >= MIN_STEPS]
        step = median([_per_step(old, new, _training) for old, new in known] or [0.0])
        if step <= 0:
            return None
        compute = median_low(_per_step(old, new, attrgetter("compute")) for old, new in known)
        found = SpeedSample(
            nodes=nodes,
            replicas=replicas,
            step_seconds=step,
            steps=max(new.steps - old.steps for old, new in known),
            compute_seconds=compute if replicas > 1 and 0 < compute < WATCHED * step else None,
            total_batch=max(new.total_batch for _, new in known),
            batches=next((new.batches for _, new in known if new.batches is not None), None),
        )
        self.marks = dict(self.latest)
        self.began = now
        return found

    def _take_sum(
        self, nodes: int, replicas: int, now: float, servers: Servers
    ) -> SpeedSample | None:
        """Return the sample if workers do not wait for each other; a slow one may take several windows."""
        assert self.began is not None
        late = now - self.began >= LATE_WINDOWS * self.limits.autoscale_window
        spans = [(mark, self.latest[rank]) for rank, mark in self.marks.items()]
        known = [(old, new) for old, new in spans if new.steps - old.steps >= MIN_STEPS]
        if not known or (len(known) < replicas and not late):
            return None
        times = [_per_step(old, new, _training) for old, new in known]
        if min(times) <= 0:
            return None
        found = SpeedSample(
            nodes=nodes,
            replicas=replicas,
            step_seconds=replicas / sum(1 / seconds for seconds in times),
            steps=max(new.steps - old.steps for old, new in known),
            servers=servers.count,
            worker_cpu=servers.worker_cpu,
            server_cpu=servers.server_cpu,
        )
        self.marks = dict(self.latest)
        self.began = now
        return found

    @property
    def profile(self) -> ModelProfile:
        """Largest optimizer among the workers; zeros while unknown."""
        largest = max(self.latest.values(), key=lambda w: w.parameters, default=None)
        if largest is None:
            return ModelProfile()
        return ModelProfile(
            parameters=largest.parameters,
            parameter_bytes=largest.parameter_bytes,
            state_bytes=largest.state_bytes,
        )


def _per_step(
    before: WorkerActivity, after: WorkerActivity, seconds: Callable[[WorkerActivity], float]
) -> float:
    return (seconds(after) - seconds(before)) / (after.steps - before.steps)


def _training(worker: WorkerActivity) -> float:
    """Return the seconds of all completed steps, including the waits for their data."""
    spent = worker.seconds[Activity.STEP] + worker.seconds[Activity.DATA]
    begun = worker.since if worker.doing in (Activity.STEP, Activity.DATA) else 0.0
    return spent - begun
