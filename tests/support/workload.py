"""Simulated cluster that replays a workload of training jobs under a policy, from measured tables.

Time passes in ticks. In each, every job trains with its placement; then the policy divides the cluster
again. A job whose placement changed makes no progress for `Setting.restart` seconds. Progress is counted
in steps of the reference batch: a larger batch makes more of them per step, by the noise of its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Placement = tuple[int, ...]
"""Replicas on each node of the cluster."""


class Application(Protocol):
    """Measurements of a kind of job."""

    name: str
    reference_batch: int
    most_batch: int
    replica_least: int
    """Least samples of one replica in one pass."""
    replica_most: int
    epochs: int

    def times(self, replicas: Placement, batch: int) -> tuple[float, float]:
        """Return the seconds of a step of one pass, and of its exchange of gradients.

        Args:
            replicas: Replicas on each node that the job uses.
            batch: Samples of one replica in one pass.
        """
        ...

    def gradients(self, batch: int, epoch: int) -> tuple[float, float]:
        """Return the gradients' squared norm and variance for the reference batch, seen with a batch."""
        ...

    def progress(self, epoch: int) -> float:
        """Return the steps of the reference batch that make up the first ``epoch`` epochs."""
        ...


@dataclass(frozen=True)
class Setting:
    """The cluster and its clock. Times are seconds."""

    nodes: int = 16
    slots: int = 4
    """Accelerators of each node."""
    tick: float = 60.0
    restart: float = 30.0


@dataclass
class SimulatedJob:
    """A job, with what a policy may know about it."""

    name: str
    application: Application
    submitted: float
    wanted_replicas: int
    """Replicas that the user asked for."""
    wanted_batch: int
    placement: Placement = ()
    """Empty while the job has no accelerator."""
    batch: int = 0
    passes: int = 1
    measured: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    """Seconds of a step and of its exchange, by nodes, replicas and batch."""
    gradients: tuple[float, float] | None = None
    done: float = 0.0
    """Completed steps of the reference batch."""
    epoch: int = 0
    service: float = 0.0
    """Accelerator-seconds that the job has had."""
    restarts: int = 0
    ended: float | None = None
    now: float = 0.0
    _wait: float = 0.0

    @property
    def replicas(self) -> int:
        """Number of its replicas."""
        return sum(self.placement)

    @property
    def nodes(self) -> int:
        """Number of nodes that it uses."""
        return sum(1 for count in self.placement if count)

    @property
    def remaining(self) -> float:
        """Steps of the reference batch until its end."""
        return max(self.application.progress(self.application.epochs) - self.done, 1e-9)

    def place(self, placement: Placement, restart: float) -> None:
        """Change the job's placement."""
        if placement == self.placement:
            return
        self.placement = placement
        if placement:
            self.restarts += 1
            self._wait = restart

    def train(self, seconds: float, policy: ClusterPolicy) -> None:
        """Advance the job's time by ``seconds``."""
        end = self.now + seconds
        if self.placement and self.ended is None:
            held = min(self._wait, seconds)
            self._wait -= held
            self.now += held
            self.service += held * self.replicas
            while self.now < end and self.ended is None:
                self._train_until(end, policy)
        self.now = end

    def _train_until(self, end: float, policy: ClusterPolicy) -> None:
        """Train to the end of the epoch, or to time ``end`` if that is earlier."""
        self.batch, self.passes = policy.batch(self)
        rate = self._measure()
        goal = self.application.progress(self.epoch + 1)
        seconds = float(round((goal - self.done) / rate))
        if self.now + seconds > end or self.done + rate * (end - self.now) < goal:
            self.done = min(self.done + rate * (end - self.now), goal)
            self.service += (end - self.now) * self.replicas
            self.now = end
            return
        self.done, self.epoch = goal, self.epoch + 1
        self.now += seconds
        self.service += seconds * self.replicas
        if self.epoch == self.application.epochs:
            self.ended = self.now

    def _measure(self) -> float:
        """Return the progress per second, and record the measurements."""
        here = tuple(count for count in self.placement if count)
        step, exchange = self.application.times(here, self.batch)
        total = self.batch * self.passes * self.replicas
        square, variance = self.gradients = self.application.gradients(total, self.epoch)
        self.measured.setdefault((len(here), self.replicas, self.batch), (step, exchange))
        scale = total / self.application.reference_batch
        gain = (variance + square) / (variance / scale + square)
        return gain / (step + (step - exchange) * (self.passes - 1))


class ClusterPolicy(Protocol):
    """Division of the cluster among jobs, and the batch that each job trains with."""

    name: str

    def divide(
        self, now: float, jobs: Sequence[SimulatedJob], setting: Setting
    ) -> Mapping[str, Placement]:
        """Return placements by job; a job that is missing gets nothing."""
        ...

    def batch(self, job: SimulatedJob) -> tuple[int, int]:
        """Return the samples of one replica in one pass, and the passes per step."""
        ...


@dataclass(frozen=True)
class Replay:
    """Result of a replayed workload. Times are seconds."""

    policy: str
    completion: dict[str, float]
    """Time from submission to end, by job."""
    makespan: float
    restarts: int
    used: float
    """Share of the accelerators' time that jobs had, from the first submission to the last end."""

    @property
    def average(self) -> float:
        """Mean completion time."""
        return sum(self.completion.values()) / len(self.completion)

    def percentile(self, share: float) -> float:
        """Return the completion time that ``share`` of the jobs do not exceed."""
        times = sorted(self.completion.values())
        return times[max(0, math.ceil(share * len(times)) - 1)]


def replay(
    jobs: Sequence[SimulatedJob], policy: ClusterPolicy, setting: Setting | None = None
) -> Replay:
    """Run all jobs to their end; return the result.

    Raises:
        ValueError: The policy assigns more than a node has.
    """
    cluster = setting or Setting()
    now = 0.0
    while any(job.ended is None for job in jobs):
        for job in jobs:
            job.train(cluster.tick, policy)
        now += cluster.tick
        active = [job for job in jobs if job.submitted <= now and job.ended is None]
        if not active:
            continue
        placements = policy.divide(now, active, cluster)
        _check(placements, cluster)
        for job in active:
            job.place(placements.get(job.name, ()), cluster.restart)
    return _result(jobs, policy, cluster)


def _check(placements: Mapping[str, Placement], cluster: Setting) -> None:
    for node, counts in enumerate(zip(*[p for p in placements.values() if p], strict=True)):
        if sum(counts) > cluster.slots:
            raise ValueError(f"node {node} has {cluster.slots} accelerators, not {sum(counts)}")


def _result(jobs: Sequence[SimulatedJob], policy: ClusterPolicy, cluster: Setting) -> Replay:
    ends = {job.name: job.ended for job in jobs if job.ended is not None}
    first, last = min(job.submitted for job in jobs), max(ends.values())
    slots = cluster.nodes * cluster.slots * (last - first)
    return Replay(
        policy=policy.name,
        completion={job.name: ends[job.name] - job.submitted for job in jobs},
        makespan=last - first,
        restarts=sum(max(0, job.restarts - 1) for job in jobs),
        used=sum(job.service for job in jobs) / slots,
    )
