"""Simulated training as its agents see it: what each rank does at any time, and how its process looks.

A training is a sequence of phases, each on one rank or on all; while only one rank is busy, the others
wait for it in a step. Lengths are drawn by seed. A fault is a rank that never leaves its phase, or one
whose own part of a step takes longer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from dlrover.spec.activity import Activity
from dlrover.spec.measurements import WorkerActivity
from dlrover.spec.stacks import Frame, WorkerEvidence

_WAITING = Frame("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py", 2800)
_MAIN = Frame("main", "/home/me/train.py", 9)


@dataclass
class ActivityPhase:
    """What the ranks do from ``begin`` to ``end`` (seconds since the training began)."""

    activity: Activity
    begin: float
    end: float
    #: the busy rank, while the others wait; None: all are busy
    rank: int | None = None
    #: seconds of one step, in a phase of steps
    step: float = 0.0
    #: True if a busy rank uses a CPU and moves through its program
    works: bool = True
    #: steps completed before it
    steps_before: int = 0


class SimulatedTraining:
    """The ranks of one training. Query times in ascending order."""

    def __init__(self, seed: int, ranks: int) -> None:
        self._random = random.Random(seed)
        self.ranks = ranks
        self.factors: dict[int, float] = {}
        """Slow ranks: factor on the time of their own part of a step."""
        self.data_waits: dict[int, float] = {}
        """Slow ranks: share of their own part of a step that they wait for data."""
        self._compute = dict.fromkeys(range(ranks), 0.0)
        self._data = dict.fromkeys(range(ranks), 0.0)
        self._counted = 0
        draw = self._random
        self._usual_step = draw.choice([0.2, 1.0, 5.0, 20.0])
        self._usual_eval = draw.choice([10.0, 120.0, 900.0])
        self._usual_save = draw.choice([0.5, 20.0, 300.0])
        self.phase = ActivityPhase(Activity.START, 0.0, draw.uniform(20.0, 900.0))
        self._then = [Activity.COMPILE] if draw.random() < 0.7 else []

    # ---- phases

    def advance(self, now: float) -> None:
        """Move to the phase at time ``now``."""
        while now >= self.phase.end:
            self.phase = self._next(self.phase)

    def hang(self, now: float, rank: int | None, activity: Activity) -> None:
        """Hold a rank in ``activity`` from now on, while the others wait; None: all wait for each other."""
        self.advance(now)
        self.phase = ActivityPhase(
            activity, now, float("inf"), rank, 0.0, works=False, steps_before=self._steps(now)
        )

    def _next(self, old: ActivityPhase) -> ActivityPhase:
        draw = self._random
        begin, steps = old.end, self._steps(old.end)
        if self._then:
            kind = self._then.pop()
        elif old.activity is Activity.STEP:
            kinds = (Activity.EVAL, Activity.CHECKPOINT, Activity.DATA, Activity.COMPILE)
            kind = draw.choices(kinds, (4, 6, 2, 0.3))[0]
        else:
            kind = Activity.STEP
        seconds, works = self._length(kind)
        rank = draw.randrange(self.ranks) if kind is Activity.DATA else None
        if kind in (Activity.EVAL, Activity.CHECKPOINT) and draw.random() < 0.5:
            rank = 0
            if kind is Activity.EVAL and draw.random() < 0.1:
                kind = Activity.STEP  # an evaluation that the program does not report
                seconds = min(seconds, 1500.0)
        alone = rank is not None
        step = self._usual_step * draw.uniform(0.8, 1.3) if kind is Activity.STEP else 0.0
        return ActivityPhase(
            kind, begin, begin + seconds, rank, 0.0 if alone else step, works, steps
        )

    def _length(self, kind: Activity) -> tuple[float, bool]:
        """Return the length of a phase of a kind, and True if its busy ranks visibly work."""
        draw = self._random
        if kind is Activity.STEP:
            return draw.uniform(50.0, 2000.0) + self._usual_step, True
        if kind is Activity.EVAL:
            rare = 12.0 if draw.random() < 0.01 else 1.0
            return self._usual_eval * draw.lognormvariate(0.0, 0.4) * rare, True
        if kind is Activity.CHECKPOINT:
            # A process that waits for its storage does nothing else.
            return min(1700.0, self._usual_save * draw.lognormvariate(0.0, 0.5)), False
        if kind is Activity.COMPILE:
            return draw.uniform(10.0, 1500.0), draw.random() < 0.5
        return draw.uniform(0.5, 150.0), False

    # ---- what is seen

    def _steps(self, now: float) -> int:
        phase = self.phase
        if not phase.step:
            return phase.steps_before
        return phase.steps_before + int((min(now, phase.end) - phase.begin) / phase.step)

    def workers(self, now: float) -> dict[int, WorkerActivity]:
        """Return what each rank does."""
        self.advance(now)
        phase, steps = self.phase, self._steps(now)
        self._count(steps)
        since = (now - phase.begin) % phase.step if phase.step else now - phase.begin
        found = {}
        for rank in range(self.ranks):
            busy = phase.rank is None or phase.rank == rank
            seconds = (now - self._data[rank], 0.0, self._data[rank], 0.0, 0.0, 0.0)
            doing = phase.activity if busy else Activity.STEP
            found[rank] = WorkerActivity(steps, doing, since, seconds, self._compute[rank])
        return found

    def _count(self, steps: int) -> None:
        new = steps - self._counted
        self._counted = steps
        usual = 0.6 * self._usual_step
        for rank in range(self.ranks) if new else ():
            # The mean of many steps, each a few per cent longer or shorter.
            noise = self._random.gauss(1.0, 0.1 / new**0.5)
            own = usual * noise * self.factors.get(rank, 1.0)
            self._compute[rank] += new * own
            self._data[rank] += new * own * self.data_waits.get(rank, 0.02)

    def evidence(self, now: float) -> tuple[WorkerEvidence, ...]:
        """Return how each rank's process looks."""
        activities: Mapping[int, WorkerActivity] = self.workers(now)
        phase = self.phase
        found = []
        for rank in range(self.ranks):
            busy = (phase.rank is None or phase.rank == rank) and not (
                phase.rank is None and not phase.works and phase.activity is Activity.STEP
            )
            works = busy and phase.works
            line = int(now * 10) % 1000 if works else 41
            inner = Frame(f"work{line}", "/home/me/train.py", line) if works else _stuck(phase)
            found.append(
                WorkerEvidence(
                    pid=1 + rank,
                    time=now,
                    rank=rank,
                    state="S",
                    cpu=now if works else 0.01 * now,
                    frames=(inner if busy else _WAITING, _MAIN),
                    activity=activities[rank],
                )
            )
        return tuple(found)


def _stuck(phase: ActivityPhase) -> Frame:
    return Frame(f"do_{phase.activity.name.lower()}", "/home/me/train.py", 41)
