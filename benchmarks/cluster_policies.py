"""Policies that divide a simulated cluster: ours, and those it is compared with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dlrover.planning.allreduce import Form, RingModel, RingSample, RingShape, fit_ring
from dlrover.planning.cluster import Demand, Option, allocate
from dlrover.planning.efficiency import BatchLimits, GradientNoise, best_batches
from dlrover.planning.warmstart import FIRST_SECONDS, expected_remaining
from tests.support.workload import Placement, Setting, SimulatedJob


def fixed_batch(job: SimulatedJob, total: int) -> tuple[int, int]:
    """A batch of all replicas, divided among them and into passes."""
    kind = job.application
    each = math.ceil(total / job.replicas - 1e-8)
    passes = math.ceil(each / kind.replica_most - 1e-8)
    if job.replicas == 1 and total > kind.reference_batch:
        passes = max(passes, 2)
    batch = math.ceil(each / passes - 1e-8)
    return min(batch, kind.most_batch // (job.replicas * passes)), passes


def spread_out(count: int, free: list[int]) -> Placement:
    """Take from the nodes with most free slots, one node after the other."""
    placement = [0] * len(free)
    while count:
        node = max(range(len(free)), key=lambda n: free[n])
        took = min(count, free[node])
        placement[node] += took
        free[node] -= took
        count -= took
    return tuple(placement)


def free_slots(placements: Mapping[str, Placement], setting: Setting) -> list[int]:
    """Slots of each node that no placement takes."""
    free = [setting.slots] * setting.nodes
    for placement in placements.values():
        free = [slots - count for slots, count in zip(free, placement, strict=True)]
    return free


def pack(
    jobs: Sequence[SimulatedJob], counts: Mapping[str, int], setting: Setting
) -> dict[str, Placement]:
    """Place jobs of 1, 2 or 4 replicas on one node each, larger ones on whole nodes.

    A job whose number did not change stays where it is, unless a larger one needs the room.
    """
    kept = {
        job.name: job.placement
        for job in jobs
        if job.replicas
        and job.replicas == counts.get(job.name, 0)
        and _whole(job.placement, setting.slots)
    }
    free = free_slots(kept, setting)
    queue = sorted(
        (name for name, count in counts.items() if count and name not in kept),
        key=lambda n: -counts[n],
    )
    while queue:
        name = queue.pop(0)
        need = min(counts[name], setting.slots)
        placement = [0] * setting.nodes
        for _ in range(counts[name] // need):
            moved = _room(need, free, kept, counts)
            node = _tightest(need, free)
            placement[node], free[node] = need, free[node] - need
            queue = sorted([*queue, *moved], key=lambda n: -counts[n])
        kept[name] = tuple(placement)
    return kept


def _whole(placement: Placement, slots: int) -> bool:
    used = [count for count in placement if count]
    return len(used) == 1 or all(count == slots for count in used)


def _tightest(need: int, free: Sequence[int]) -> int:
    return min((n for n in range(len(free)) if free[n] >= need), key=lambda n: free[n])


def _room(
    need: int, free: list[int], kept: dict[str, Placement], counts: Mapping[str, int]
) -> list[str]:
    """Move smaller jobs away from one node until there is room; their names."""
    if max(free) >= need:
        return []
    on_node: dict[int, list[str]] = defaultdict(list)
    for name, placement in kept.items():
        if counts[name] < need:
            on_node[next(n for n, count in enumerate(placement) if count)].append(name)
    total = {n: free[n] + sum(counts[name] for name in names) for n, names in on_node.items()}
    node = max((n for n in total if total[n] >= need), key=lambda n: free[n])
    moved = []
    for name in sorted(on_node[node], key=lambda name: -counts[name]):
        if free[node] >= need:
            break
        del kept[name]
        free[node] += counts[name]
        moved.append(name)
    return moved


class Fixed:
    """What the user asked for, first come, first served.

    ``static`` waits until all of it is free. ``original`` follows the rule of the original DLRover for
    all-reduce jobs: begin with what is free, look every 1,800 s whether the rest has become free, give
    nothing back.
    """

    def __init__(self, name: Literal["static", "original"]) -> None:
        self.name = name
        self._looked: dict[str, float] = {}

    def divide(
        self, now: float, jobs: Sequence[SimulatedJob], setting: Setting
    ) -> dict[str, Placement]:
        """Keep what runs; start what fits."""
        placements = {job.name: job.placement for job in jobs if job.placement}
        free = free_slots(placements, setting)
        for job in sorted(jobs, key=lambda job: job.submitted):
            if not job.placement:
                count = min(sum(free), job.wanted_replicas)
                if self.name == "static" and count < job.wanted_replicas:
                    break
                if count:
                    placements[job.name] = spread_out(count, free)
                    self._looked[job.name] = now
            elif self.name == "original" and now - self._looked[job.name] >= 1800:
                self._looked[job.name] = now
                more = min(sum(free), job.wanted_replicas - job.replicas)
                if more:
                    added = spread_out(more, free)
                    placements[job.name] = tuple(
                        a + b for a, b in zip(job.placement, added, strict=True)
                    )
        return placements

    def batch(self, job: SimulatedJob) -> tuple[int, int]:
        """The user's."""
        return fixed_batch(job, job.wanted_batch)


class Tiresias:
    """Two queues by accelerator time, each first come, first served, with preemption (NSDI 2019)."""

    name = "tiresias"
    THRESHOLD = 16 * 3600.0
    """Accelerator-seconds after which a job goes to the second queue."""

    def divide(
        self, now: float, jobs: Sequence[SimulatedJob], setting: Setting
    ) -> dict[str, Placement]:
        """In the order of the queues, each job gets all that it wants or nothing."""
        order = sorted(jobs, key=lambda job: (job.service >= self.THRESHOLD, job.submitted))
        left, chosen = setting.nodes * setting.slots, []
        for job in order:
            if job.wanted_replicas <= left:
                left -= job.wanted_replicas
                chosen.append(job)
        placements = {job.name: job.placement for job in chosen if job.placement}
        free = free_slots(placements, setting)
        for job in chosen:
            if not job.placement:
                placements[job.name] = spread_out(job.wanted_replicas, free)
        return placements

    def batch(self, job: SimulatedJob) -> tuple[int, int]:
        """The user's."""
        return fixed_batch(job, job.wanted_batch)


class Modelled:
    """What the policies with a throughput model share: fits, sizes, the choice of the batch."""

    form: Form = "ring"
    shared = False
    """Whether jobs of one application share what was measured."""
    adaptive = True
    """Whether the batch may be changed."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[tuple[int, int, int], tuple[float, float]]] = defaultdict(dict)
        self._models: dict[str, tuple[int, RingModel]] = {}
        self._tables: dict[Any, Any] = {}

    def model(self, job: SimulatedJob) -> RingModel | None:
        """Fitted to what was measured so far."""
        key = job.application.name if self.shared else job.name
        pool = self._pools[key] if self.shared else job.measured
        if self.shared:
            pool.update({k: v for k, v in job.measured.items() if k not in pool})
        if not pool:
            return None
        count, model = self._models.get(key, (0, None))
        if count != len(pool):
            samples = [
                RingSample(RingShape(*shape), step, max(step - exchange, 1e-6))
                for shape, (step, exchange) in pool.items()
            ]
            model = fit_ring(samples, self.form, start=model)
            self._models[key] = (len(pool), model)
        return model

    def limits(self, job: SimulatedJob) -> BatchLimits:
        """Of a job whose batch may grow, or of one whose batch stays."""
        kind = job.application
        if kind.name == "ncf" or not self.adaptive:
            total = kind.most_batch if kind.name == "ncf" and self.adaptive else job.wanted_batch
            return BatchLimits(total, total, kind.replica_least, kind.replica_most)
        return BatchLimits(
            kind.reference_batch, kind.most_batch, kind.replica_least, kind.replica_most
        )

    def most_replicas(self, job: SimulatedJob, slots: int) -> int:
        """Twice what was measured, at most."""
        if job.application.name == "ncf":
            return 1
        model = self.model(job)
        measured = model.replicas if model is not None else 0
        return max(
            1, min(2 * measured, slots, self.limits(job).most // job.application.replica_least)
        )

    def speeds(self, job: SimulatedJob, sizes: Sequence[int], slots: int) -> Any:
        """Steps of the reference batch per second at each size."""
        model = self.model(job)
        if model is None:
            return np.array(sizes, dtype=float) / 10
        replicas = np.array(sizes)
        best = best_batches(
            model, self._noise(job), self.limits(job), np.ceil(replicas / slots), replicas
        )
        return best.goodput / job.application.reference_batch

    def batch(self, job: SimulatedJob) -> tuple[int, int]:
        """The best one for where the job is."""
        kind, limits = job.application, self.limits(job)
        if limits.least == limits.most:
            return fixed_batch(job, limits.most)
        model = self.model(job)
        if model is None:
            return fixed_batch(job, max(kind.reference_batch, kind.replica_least * job.replicas))
        best = best_batches(model, self._noise(job), limits, job.nodes, job.replicas)
        passes = int(best.passes[0])
        return min(int(best.batch[0]), kind.most_batch // (job.replicas * passes)), passes

    def _noise(self, job: SimulatedJob) -> GradientNoise | None:
        if job.gradients is None or not self.adaptive:
            return None
        return GradientNoise(*job.gradients, job.application.reference_batch)


def sizes_up_to(most: int, slots: int) -> list[int]:
    """1, 2, 4, ... on one node, then whole nodes."""
    small = [2**i for i in range(slots.bit_length()) if 2**i <= min(most, slots)]
    return small + list(range(2 * slots, most + 1, slots))


class Ours(Modelled):
    """`dlrover.planning`: models, efficiency, marginal gain, with or without knowledge of the length.

    Not the Brain's own policy, `dlrover.brain.machine.division`: that doubts sizes by their spread, changes a batch within
    a trust region, guesses lengths from jobs that ended, and leaves each running job its smallest size.
    """

    def __init__(
        self, length: Literal["unknown", "history", "declared"], *, adaptive: bool = True
    ) -> None:
        super().__init__()
        self.name = f"ours{'' if adaptive else ', batches stay'}, length {length}"
        self.adaptive = adaptive
        self.length = length
        self.shared = length == "history"
        self._past: dict[str, dict[str, float]] = defaultdict(dict)
        self._alive: dict[str, SimulatedJob] = {}

    def divide(
        self, now: float, jobs: Sequence[SimulatedJob], setting: Setting
    ) -> dict[str, Placement]:
        """By marginal gain."""
        self._note_ended(jobs)
        slots = setting.nodes * setting.slots
        shares = allocate(
            [self._demand(job, slots, setting) for job in jobs], {"accelerator": float(slots)}
        )
        counts = {
            name: int(share.size.name) for name, share in shares.items() if share.size is not None
        }
        return pack(jobs, counts, setting)

    def _demand(self, job: SimulatedJob, slots: int, setting: Setting) -> Demand:
        sizes = sizes_up_to(self.most_replicas(job, slots), setting.slots)
        speeds = self.speeds(job, sizes, setting.slots)
        return Demand(
            job=job.name,
            sizes=[
                Option(str(n), {"accelerator": n}, float(s))
                for n, s in zip(sizes, speeds, strict=True)
            ],
            remaining=self._remaining(job, float(speeds[0])),
            current=str(job.replicas) if job.replicas else None,
            restart=setting.restart,
        )

    def _remaining(self, job: SimulatedJob, speed: float) -> float:
        if self.length == "declared" and self.model(job) is not None:
            return job.remaining
        past = list(self._past[job.application.name].values()) if self.length == "history" else []
        return max(expected_remaining(job.done, past, FIRST_SECONDS * max(speed, 1e-9)), 1e-9)

    def _note_ended(self, jobs: Sequence[SimulatedJob]) -> None:
        here = {job.name: job for job in jobs}
        for name, job in self._alive.items():
            if name not in here:
                self._past[job.application.name][name] = job.done
        self._alive = here


class PolluxLike(Modelled):
    """Pollux' objective and its published form, by marginal gain instead of a genetic search.

    The harmonic mean of the speed-ups over a fair share, with Pollux' discount for restarts.
    """

    name = "pollux-like"
    form: Form = "pollux"

    def divide(
        self, now: float, jobs: Sequence[SimulatedJob], setting: Setting
    ) -> dict[str, Placement]:
        """By marginal gain of the objective."""
        slots = setting.nodes * setting.slots
        fair = max(1, math.ceil(slots / len(jobs)))
        demands = []
        for job in jobs:
            sizes = sizes_up_to(self.most_replicas(job, slots), setting.slots)
            speeds = self.speeds(job, [*sizes, fair], setting.slots)
            age = now - job.submitted
            factor = max(age - max(0, job.restarts - 1) * setting.restart, 0) / (
                age + setting.restart
            )
            offers = []
            for size, speed in zip(sizes, speeds, strict=False):
                gain = (
                    speed
                    / max(float(speeds[-1]), 1e-12)
                    * (factor if size != job.replicas else 1.0)
                )
                offers.append(Option(str(size), {"accelerator": size}, 1e3 - 1 / (gain + 1e-3)))
            demands.append(Demand(job.name, offers, remaining=1.0))
        shares = allocate(demands, {"accelerator": float(slots)}, worth=lambda _, size: size.speed)
        counts = {
            name: int(share.size.name) for name, share in shares.items() if share.size is not None
        }
        return pack(jobs, counts, setting)


def _steepest(times: Any, count: int, left: int) -> tuple[float, int]:
    """The largest gain of time per added accelerator, and how many that takes."""
    later = times[count : count + left]
    if not len(later):
        return 0.0, 0
    gains = (times[count - 1] - later) / np.arange(1, len(later) + 1)
    more = int(np.argmax(gains))
    return float(gains[more]), more + 1


class Optimus(Modelled):
    """The next accelerator to the job whose remaining time it shortens most (EuroSys 2018).

    With the published form, the user's batch, and the true number of steps that remain.
    """

    name = "optimus, length declared"
    form: Form = "pollux"
    adaptive = False

    def most_replicas(self, job: SimulatedJob, slots: int) -> int:
        """As many as the user's batch can be divided among."""
        if job.application.name == "ncf":
            return 1
        return max(1, min(slots, job.wanted_batch // job.application.replica_least))

    def divide(
        self, now: float, jobs: Sequence[SimulatedJob], setting: Setting
    ) -> dict[str, Placement]:
        """One for each, by age, then by gain."""
        slots = setting.nodes * setting.slots
        counts = {job.name: 0 for job in jobs}
        times: dict[str, Any] = {}
        for job in jobs:
            sizes = list(range(1, self.most_replicas(job, slots) + 1))
            speeds = np.maximum(self.speeds(job, sizes, setting.slots), 1e-9)
            times[job.name] = job.remaining / speeds
        left = slots
        for job in sorted(jobs, key=lambda job: job.submitted)[:slots]:
            counts[job.name], left = 1, left - 1
        while left:
            steps = {name: _steepest(times[name], n, left) for name, n in counts.items() if n}
            name = max(steps, key=lambda n: steps[n][0], default="")
            if not name or steps[name][0] <= 0:
                break
            counts[name], left = counts[name] + steps[name][1], left - steps[name][1]
        kept = {
            job.name: job.placement
            for job in jobs
            if job.replicas and job.replicas == counts[job.name]
        }
        free = free_slots(kept, setting)
        for name, count in sorted(counts.items(), key=lambda item: -item[1]):
            if count and name not in kept:
                kept[name] = spread_out(count, free)
        return kept
