"""How fast a world trains, from what its agents report: one sample for each window of steady steps.

In a synchronous training all ranks' steps take equally long. With parameter servers each worker goes at its own
pace: what counts is the sum of their rates.

The first steps of a round are left out: they warm caches up, compile, and wait for each other's start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

from dlrover.spec.activities import Activity
from dlrover.spec.activity import WorkerActivity
from dlrover.spec.job import Limits
from dlrover.spec.speed import ModelProfile, SpeedSample

WARM_UP_STEPS = 5
"""First steps of a worker in a round that do not count."""
MIN_STEPS = 10
"""Steps in a window, at least."""
LATE_WINDOWS = 3
"""Windows after which a worker counts nothing that has not made so many, where workers do not wait for each other."""
WATCHED = 0.98
"""A compute time above this share of the step's is none: nobody saw the last gradient, so all counts."""


@dataclass(frozen=True)
class Servers:
    """The parameter servers of a world."""

    count: int
    worker_cpu: float = 0.0
    """Cores of a worker's node, the mean; 0 if nobody knows them."""
    server_cpu: float = 0.0
    """The same of a server's node."""


@dataclass
class Meter:
    """Measures one round after the other. It is told what is reported, by rank."""

    limits: Limits = field(default_factory=Limits)
    #: what each rank reported when the window began
    marks: dict[int, WorkerActivity] = field(default_factory=dict)
    latest: dict[int, WorkerActivity] = field(default_factory=dict)
    began: float | None = None

    def begin(self) -> None:
        """A new world."""
        self.marks.clear()
        self.latest.clear()
        self.began = None

    def note(self, workers: Mapping[int, WorkerActivity], now: float) -> None:
        """Take in a report of a node's ranks."""
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
        """The sample of a window that has passed, and the next one begins; None while it goes on.

        Args:
            nodes: Of role worker.
            replicas: Workers of the world.
            now: Seconds since the epoch.
            servers: What serves them; None: they exchange their gradients.
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
        compute = median_low(_per_step(old, new, _computing) for old, new in known)
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
        """The same for workers that do not wait for each other. A slow one may take a few windows to be known."""
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
        """What a worker's optimizer holds, the largest one; zeros while nobody told."""
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
    """Seconds of all steps that are complete, with the waits for their data."""
    spent = worker.seconds[Activity.STEP] + worker.seconds[Activity.DATA]
    begun = worker.since if worker.doing in (Activity.STEP, Activity.DATA) else 0.0
    return spent - begun


def _computing(worker: WorkerActivity) -> float:
    return worker.compute
