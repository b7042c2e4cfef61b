"""Hang detection from two independent signals and from learned durations of activities.

1. *No rank makes progress.* Every living rank has been in the same activity for longer than its limit. The
   limit is a multiple of the longest duration of that activity in this job, at most half an hour above the
   longest, and at least the configured limit of the activity. While one rank is within its limit, the others
   may be waiting for it: an evaluation on rank 0 alone is no hang. Once a rank has ended, the others have at
   least the limit of an evaluation to finish.
2. *The processes confirm it.* All nodes sample their workers twice. A rank is blocked if its main thread
   shows the same calls in both samples or its processes used no CPU in between, unless they moved data or its
   accelerator was computing in both samples. An accelerator that only waits in a collective is busy, too, but
   leaves its memory alone. The training hangs if the ranks that the others wait for are blocked. If one of
   them works, it gets the limit of an evaluation.

Progress of a rank in between ends the suspicion. Learned durations are kept for the whole job. Activities of
ranks are forgotten with their round, and only completed activities are learned from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover.master.machine.diagnosis.diagnosis import ended_thread
from dlrover.spec import stacks
from dlrover.spec.activity import Activity
from dlrover.spec.events import HangFound
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.stacks import WorkerEvidence
from dlrover.spec.words import counted

FLAT_CPU = 0.05
"""CPU seconds per second up to which a rank's processes count as idle, since helper threads use some."""
MOVED_BYTES = 1 << 20
"""Bytes per second above which a rank counts as reading or writing."""
MARGIN = 1800.0
"""Maximum seconds by which an activity's learned limit exceeds its longest duration so far."""
SHORT_WAIT = 5.0
"""Seconds up to which waiting for data is part of a normal step."""
SHORT_END = 5.0
"""Seconds within which ranks that have finished their program usually end."""
OVERTAKEN = 30.0
"""Seconds by which a report that a later one overtook may be older; it takes less to look at the processes."""
PATIENCE = 2.0
"""Factor by which all limits grow after each suspicion that proved wrong."""

# ---- inputs


class WorldFormed(msgspec.Struct, frozen=True):
    """The workers of a round are being started."""

    round: int
    world_size: int
    has_stepped: bool
    """True if the job has ever made a step."""


class NodeActivities(msgspec.Struct, frozen=True):
    """Activities of one node's workers, by rank."""

    round: int
    workers: dict[int, WorkerActivity]


class WorkersSampled(msgspec.Struct, frozen=True):
    """The nodes have sampled their workers, on the order `SampleWorkers`; some may not have answered."""

    round: int
    workers: tuple[WorkerEvidence, ...]


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Input: TypeAlias = WorldFormed | NodeActivities | WorkersSampled | Tick

# ---- commands


class SampleWorkers(msgspec.Struct, frozen=True):
    """Ask all nodes to sample their workers of the round."""

    round: int


class Hang(msgspec.Struct, frozen=True):
    """The training hangs."""

    hang: HangFound
    evidence: tuple[WorkerEvidence, ...]
    missing: tuple[int, ...]
    restart: bool


Command: TypeAlias = SampleWorkers | Hang


@dataclass
class Suspicion:
    """A suspected hang: no rank makes progress."""

    first: dict[int, WorkerEvidence] = field(default_factory=dict)
    #: when the second sample is due; None while an answer is awaited
    look_at: float | None = None


@dataclass
class HangDetector:
    """Hang detector of one job. Times are seconds."""

    limits: Limits = field(default_factory=Limits)
    round: int = 0
    world_size: int = 0
    #: last reported activity of each rank
    workers: dict[int, WorkerActivity] = field(default_factory=dict)
    #: when a rank last reported
    reported_at: float = 0.0
    #: ranks in an activity for which the others have to wait
    awaited: set[int] = field(default_factory=set)
    #: when ``awaited`` last had a rank
    awaited_at: float = -math.inf
    #: longest duration of each activity, of all completed ones
    longest: dict[int, float] = field(default_factory=dict)
    has_stepped: bool = False
    suspicion: Suspicion | None = None
    #: factor on all limits before the next suspicion
    patience: float = 1.0
    #: True once the hang of this round was reported
    found: bool = False

    def handle(self, event: Input, now: float) -> list[Command]:
        """Handle one input at time ``now``; return the resulting commands."""
        if not self.limits.hang_detection:
            return []
        match event:
            case WorldFormed():
                self._begin(event)
                return []
            case NodeActivities():
                self._report(event, now)
                return []
            case WorkersSampled():
                return self._sampled(event, now)
            case _:
                return self._watch(now)

    # ---- the first signal

    def limit(self, activity: int) -> float:
        """Return how long an activity may last."""
        longest = self.longest.get(activity, 0.0)
        learned = min(self.limits.hang_factor * longest, longest + MARGIN)
        return max(learned, self.limits.hang_limit(activity))

    def _begin(self, event: WorldFormed) -> None:
        self.round, self.world_size = event.round, event.world_size
        self.has_stepped = event.has_stepped
        self.workers.clear()
        self.awaited.clear()
        self.suspicion = None
        self.patience = 1.0
        self.found = False

    def _report(self, event: NodeActivities, now: float) -> None:
        if event.round != self.round:
            return
        self.reported_at = now
        for rank, worker in event.workers.items():
            before = self.workers.get(rank)
            if before is not None and is_another(before, worker):
                before = None
                self._get_on()
            elif before is not None and age(worker) < age(before):
                continue  # a later report overtook it
            self.workers[rank] = worker
            if worker.steps:
                self.has_stepped = True
            if self.awaited:
                self.awaited_at = now
            if before is not None and got_on(before, worker):
                self._learn(before, now)
                self._get_on()
            (self.awaited.add if is_awaited(worker) else self.awaited.discard)(rank)

    def _learn(self, ended: WorkerActivity, now: float) -> None:
        """Learn from a completed activity, except a step in which a rank waited for an evaluation."""
        if ended.doing == Activity.STEP and now - ended.since < self.awaited_at:
            return
        self.longest[ended.doing] = max(self.longest.get(ended.doing, 0.0), ended.since)

    def _get_on(self) -> None:
        self.suspicion = None
        self.patience = 1.0
        self.found = False

    def _nobody_gets_on(self) -> bool:
        if len(self.workers) < max(1, self.world_size):
            return False
        workers = self.workers.values()
        ended = sum(worker.ended for worker in workers)
        least = self.limit(Activity.EVAL) if ended else 0.0
        limit = functools.cache(lambda kind: max(self.limit(kind), least) * self.patience)
        return ended < len(workers) and all(
            worker.ended or worker.since > limit(worker.doing) for worker in workers
        )

    def waiting_for(self, now: float) -> str:
        """Return which ranks have not ended although others have, for how long, and the limit; empty if none."""
        living = {rank: worker for rank, worker in self.workers.items() if not worker.ended}
        awaited = living or self.workers
        waited = min((worker.since for worker in awaited.values()), default=0.0)
        waited += max(0.0, now - self.reported_at)
        if not awaited or len(living) == len(self.workers) or waited < SHORT_END:
            return ""
        if not living:
            return f"waiting for threads of programs that have ended: {waited:.0f} s"
        limit = max(
            self.limit(kind) for kind in {Activity.EVAL, *(w.doing for w in living.values())}
        )
        ended = counted(len(self.workers) - len(living), "rank")
        named = stacks.ranks_in_words(sorted(living))
        return f"waiting for {named} to end: {waited:.0f} s of {limit * self.patience:.0f} s; {ended} ended"

    def _watch(self, now: float) -> list[Command]:
        if self.found:
            return []
        if self.suspicion is None:
            if not self._nobody_gets_on():
                return []
            self.suspicion = Suspicion()
            return [SampleWorkers(self.round)]
        look_at = self.suspicion.look_at
        if look_at is not None and now >= look_at:
            self.suspicion.look_at = None
            return [SampleWorkers(self.round)]
        return []

    # ---- the second signal

    def _sampled(self, event: WorkersSampled, now: float) -> list[Command]:
        suspicion = self.suspicion
        if event.round != self.round or suspicion is None:
            return []
        seen = {one.rank: one for one in event.workers}
        activities = {rank: one.activity for rank, one in seen.items() if one.activity}
        self._report(NodeActivities(self.round, activities), now)
        if self.suspicion is None:
            return []
        if not suspicion.first:
            suspicion.first = seen
            suspicion.look_at = now + self.limits.hang_sample_gap
            return []
        return self._judge(suspicion.first, seen)

    def _judge(
        self, first: dict[int, WorkerEvidence], second: dict[int, WorkerEvidence]
    ) -> list[Command]:
        living = sorted(rank for rank, worker in self.workers.items() if not worker.ended)
        missing = tuple(rank for rank in living if rank not in second)
        found = stacks.groups(second.values())
        culprits = stacks.culprits(found, missing) or stacks.starved(second.values())
        working = [
            rank
            for rank in (tuple(second) if missing else culprits or tuple(second))
            if rank in first and rank in second and works(first[rank], second[rank])
        ]
        if any(not self._worked_too_long(rank) for rank in working):
            self.suspicion = None
            self.patience *= PATIENCE
            return []
        return [self._hang(second, missing, culprits, found)]

    def _worked_too_long(self, rank: int) -> bool:
        """Return whether a working rank has been in one step for longer than even an evaluation may take."""
        worker = self.workers[rank]
        in_step = worker.doing in (Activity.STEP, Activity.DATA)
        return in_step and worker.since > self.limit(Activity.EVAL)

    def _hang(
        self,
        evidence: dict[int, WorkerEvidence],
        missing: tuple[int, ...],
        culprits: tuple[int, ...],
        groups: Sequence[stacks.StackGroup],
    ) -> Hang:
        self.found = True
        self.suspicion = None
        seconds = min(w.since for w in self.workers.values() if not w.ended)
        hang = HangFound(
            round=self.round,
            ranks=culprits,
            place=place_of(culprits, groups),
            groups=stacks.in_words(groups, missing),
            seconds=seconds,
            thread=_ended_thread(
                [evidence[r] for r in culprits or sorted(evidence) if r in evidence]
            ),
        )
        restart = self.limits.hang_action == "restart" and self.has_stepped
        return Hang(hang, tuple(evidence.values()), missing, restart)


def age(worker: WorkerActivity) -> float:
    """Return the seconds since a worker's process has begun."""
    return sum(worker.seconds)


def is_another(before: WorkerActivity, now: WorkerActivity) -> bool:
    """Return whether a rank's process was started again between two reports, while the other ranks went on."""
    back = before.ended and not now.ended
    return age(now) < age(before) - (0.0 if back else OVERTAKEN)


def got_on(before: WorkerActivity, now: WorkerActivity) -> bool:
    """Return whether a rank has begun something else between two reports."""
    ended = now.ended and not before.ended
    changed = (now.steps, now.doing) != (before.steps, before.doing)
    return ended or changed or now.since < before.since


def is_awaited(worker: WorkerActivity) -> bool:
    """Return whether a rank is in an activity outside its steps, or waits unusually long for data."""
    beside = worker.doing not in (Activity.STEP, Activity.DATA)
    return not worker.ended and (
        beside or (worker.doing == Activity.DATA and worker.since > SHORT_WAIT)
    )


def works(first: WorkerEvidence, second: WorkerEvidence) -> bool:
    """Return whether a process works, judging by two samples.

    It works if it uses CPU and is at another place in its program, if it moves data, or if its accelerator
    computes.
    """
    if first.device_computes and second.device_computes:
        return True
    seconds = max(second.time - first.time, 1e-3)
    if (second.moved - first.moved) / seconds > MOVED_BYTES:
        return True
    busy = (second.cpu - first.cpu) / seconds > FLAT_CPU
    return busy and not stacks.same_calls(first.frames, second.frames)


def _ended_thread(evidence: Iterable[WorkerEvidence]) -> str:
    """Return the exception that ended a thread of a rank, in words; empty if none did."""
    words = (ended_thread(one.rank, one.thread_error) for one in evidence if one.thread_error)
    return next(filter(None, words), "")


def place_of(ranks: Iterable[int], groups: Sequence[stacks.StackGroup]) -> str:
    """Return the place of some ranks; of all ranks if ``ranks`` is empty."""
    wanted = set(ranks)
    places = [g.place for g in groups if g.place and (not wanted or wanted & set(g.ranks))]
    return " and ".join(places[:2])
