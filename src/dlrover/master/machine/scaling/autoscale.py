"""The auto-scaler's state for one job: measurements, trials and their outcomes.

There are three stages. *Start*: the first size is measured. *Initial adjustment*: sizes are tried one after
the other while the model expects a gain or is uncertain. *Running*: the size stays, with reviews from time to
time.

There is one change at a time: a plan is applied, its world is measured, and the outcome is kept with the
prediction. A size that is worth less than the one before is rolled back. The choice of the next size needs a
fitted model (`dlrover.master.machine.scaling.planner`). It arrives as an input, so that replays of a journal agree on all
machines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover.master.machine.scaling.changes import (
    SAME_SIZE,
    Change,
    Question,
    between,
    decided,
    gain_without,
    gaining,
)
from dlrover.master.machine.scaling.sizes import Sizes
from dlrover.planning.throughput import TrustRegion
from dlrover.spec import events
from dlrover.spec.job import JobSpec
from dlrover.spec.measurements import ModelProfile, SpeedSample
from dlrover.spec.node import Size
from dlrover.spec.plan import Effect, PlanOutcome, ScaleDecision, ScaleKind, ScaleStage

KEPT_SAMPLES = 5
"""Number of latest samples kept of each size."""
SLACK = 0.02
"""Share of its worth that a size may lose against the one before without being rolled back."""
DRIFT = 0.25
"""Relative change of a size's speed, sudden or gradual since the search ended, that makes all earlier
measurements obsolete."""
DRIFT_WINDOWS = 3
"""Consecutive windows that must show the drift."""
MAX_TRIES = 12
"""Changes in the initial adjustment after which no size is tried only for its measurement."""
MOST_DOUBLED = 8
"""Maximum number of times that the pause before a new search doubles."""
MOST_CHANGES = 24
"""Changes of one search, and of what follows it, after which only measured sizes are considered."""
MAX_REPLACED = 3
"""Maximum number of changes of one kind that keeps the node count, such as replacing a slow node."""
REPLACE_GAIN = 0.05
"""Minimum expected gain, as a share of the job's speed, for replacing a slow node."""

Reaction: TypeAlias = tuple[list[events.EventBody], ScaleDecision | None]
"""Events, and the size to go to, if any."""


@dataclass
class AutoScaling:
    """Auto-scaling of one job. Change it only through its methods."""

    job: JobSpec
    active: bool = False
    stage: ScaleStage = ScaleStage.START
    #: measurements by size
    samples: dict[Size, list[SpeedSample]] = field(default_factory=dict)
    region: TrustRegion = field(default_factory=TrustRegion)
    change: Change | None = None
    #: number of plans made so far
    made: int = 0
    #: number of plans made since the search began
    tries: int = 0
    #: outcomes of plans with a prediction, the latest last
    outcomes: list[PlanOutcome] = field(default_factory=list)
    #: latest sample of the running world; None until there is one
    latest: SpeedSample | None = None
    #: size of the world that was measured last, and its round
    size: Size = field(default_factory=lambda: Size(0))
    round: int = 0
    #: consecutive windows that drifted from their size's speed
    drifted: int = 0
    #: speeds by size at the end of the search, from which drift is measured
    settled: dict[Size, float] = field(default_factory=dict)
    #: end of the last search, number of repetitions of that end in a row, and when drift may start the next
    #: search
    ended: Size | None = None
    same_end: int = 0
    search_at: float = 0.0
    #: when the next plan may be made
    next_at: float = 0.0
    #: sizes that the job may have
    sizes: Sizes = field(init=False)
    #: global batch chosen for the job; 0: the program's own
    batch: int = 0
    #: largest allowed global batch, as the program failed with a larger one; 0: no such bound
    most_batch: int = 0
    #: number of changes of each kind that keeps the node count; `MAX_REPLACED` once a kind did not help
    done: dict[ScaleKind, int] = field(default_factory=dict)
    #: unit of the measured throughput
    unit: str = ""
    profile: ModelProfile = field(default_factory=ModelProfile)

    def __post_init__(self) -> None:
        self.sizes = Sizes(self.job)
        self.active = self.job.auto_scale and self.sizes.open

    # ---- queries

    def due(self, now: float) -> bool:
        """Return whether the planner should be asked."""
        ready = self.active and self.latest is not None and self.change is None
        return ready and now >= self.next_at

    def question(self) -> Question:
        """Return the question for the planner, once it is `due`."""
        assert self.latest is not None, "nothing was measured yet"
        workers, servers = self.sizes.workers(), self.sizes.servers()
        if self.tries >= MOST_CHANGES:
            workers = [n for n in workers if any(size.workers == n for size in self.samples)]
            servers = [n for n in servers if any(size.servers == n for size in self.samples)]
        return Question(
            current=self.bounded(self.latest),
            samples=tuple(sample for known in self.samples.values() for sample in known),
            sizes=workers,
            servers=servers,
            region=self.region,
            cost=self.job.limits.autoscale_cost,
            explore=self.stage is not ScaleStage.RUNNING and self.tries < MAX_TRIES,
        )

    def deadline(self) -> float | None:
        """Return when the current change is given up; None without one."""
        return (
            None if self.change is None else self.change.since + self.job.limits.autoscale_patience
        )

    def worth(self, throughput: float, size: Size) -> float:
        """Return the worth of a size with this throughput, which the search maximizes."""
        return float(throughput / self.cost(size) ** self.job.limits.autoscale_cost)

    def cost(self, size: Size) -> float:
        """Return the cost of a size, in worker nodes."""
        return self.latest.cost(size) if self.latest is not None else float(size.nodes)

    def speed(self, size: Size) -> float:
        """Return a size's throughput: the mean of its samples; 0 if it was not measured."""
        known = self.samples.get(size, ())
        return sum(sample.throughput for sample in known) / len(known) if known else 0.0

    def free(self, kind: ScaleKind) -> bool:
        """Return whether a change of this kind, which keeps the numbers of nodes, may begin."""
        idle = self.active and self.change is None and self.latest is not None
        return idle and self.done.get(kind, 0) < MAX_REPLACED

    # ---- inputs

    def measured(
        self,
        round_: int,
        sample: SpeedSample,
        profile: ModelProfile,
        now: float,
        *,
        held_up: bool = False,
    ) -> Reaction:
        """Record a window of the running world; return events and the size to go back to, if any.

        A world that a slow rank may have ``held_up`` adds no sample to a size that was measured before.
        """
        if not self.active:
            return [], None
        self.round, self.profile = round_, profile
        if not (held_up and sample.size in self.samples):
            self._note(sample, now)
        self.latest, self.size, self.unit = sample, sample.size, sample.unit
        change = self.change
        if change is None or sample.size != change.size:
            return [], None
        if change.kind in (ScaleKind.BATCH, *SAME_SIZE) and round_ == change.round:
            return [], None
        if change.kind in SAME_SIZE:
            return self._replacement(change, sample)
        return self._conclude(change, sample, now)

    def planned(self, decision: ScaleDecision | None, now: float) -> list[events.EventBody]:
        """Apply the planner's answer: begin a change or settle on the size; return events."""
        if decision is None:
            return self._settle(now)
        if self.stage is ScaleStage.START:
            self.stage = ScaleStage.ADJUST
        self.tries += 1
        begun = self._begin(decision, self.size, now)
        self.batch = decision.batch or self.batch
        return [begun]

    def slow(self, found: events.SlowRank, now: float) -> events.PlanMade | None:
        """Plan the replacement of a slow rank's node; None if it is not worth it or not allowed now."""
        latest = self.latest
        if latest is None or not self.free(ScaleKind.REPLACE) or found.cause != "compute":
            return None
        gain = gain_without(found, latest)
        if gain < REPLACE_GAIN:
            return None
        reason = (
            f"rank {found.rank} on node {found.node} takes {found.factor:.2f} times as long as the median rank, "
            f"without it the job is {gain:.0%} faster"
        )
        return self.same_size(ScaleKind.REPLACE, gain, reason, now)

    def same_size(
        self, kind: ScaleKind, gain: float, reason: str, now: float
    ) -> events.PlanMade | None:
        """Begin a change that keeps the numbers of nodes, if one may begin.

        Args:
            kind: Kind of the change.
            gain: Expected gain as a share of the job's speed.
            reason: Reason as part of a sentence.
            now: Seconds since the epoch.
        """
        latest = self.latest
        if latest is None or not self.free(kind):
            return None
        effect = gaining(gain, 0.5, latest.throughput, self.cost(latest.size))
        self.done[kind] = self.done.get(kind, 0) + 1
        return self._begin(decided(kind, latest.size, reason, effect), latest.size, now)

    def one_more_server(self) -> Size | None:
        """Return the size with one more server if it may be tried now and was not measured yet."""
        latest = self.latest
        if latest is None or self.change is not None or not self.active:
            return None
        size = Size(latest.nodes, latest.servers + 1)
        open_ = size.servers in self.sizes.servers() and size not in self.samples
        return size if open_ else None

    def more_servers(self, gain: float, reason: str, now: float) -> Reaction:
        """Try one more server because all are hot, unless that size was measured or is not allowed."""
        latest, size = self.latest, self.one_more_server()
        if latest is None or size is None:
            return [], None
        effect = gaining(gain, 1.0, latest.throughput, self.cost(size))
        decision = decided(ScaleKind.GROW, size, reason, effect)
        return [self._begin(decision, latest.size, now)], decision

    def expired(self, now: float) -> Reaction:
        """Drop a change that takes too long; return events and the size to go back to."""
        change, deadline = self.change, self.deadline()
        if change is None or deadline is None or now < deadline:
            return [], None
        waited = self.job.limits.autoscale_patience
        reason = f"its effect could not be measured within {waited:g} s (autoscale_patience)"
        self.change = None
        if change.kind in (ScaleKind.RETURN, ScaleKind.BATCH, *SAME_SIZE):
            return [change.dropped(reason)], None
        self.sizes.missed(change.size, change.origin)
        why = f"{change.size.in_words()} could not be measured in time"
        return self._roll_back(change, why, now, change.dropped(reason))

    def failed(self, size: Size, round_: int, title: str, now: float) -> Reaction:
        """Roll back a change if the program failed in its world of ``size``; return events and the old size.

        While a change is carried out, its world may first have only some of the nodes. There are no events if
        the failure is unrelated to a change.
        """
        change = self.change
        if (
            change is None
            or change.kind in (ScaleKind.RETURN, *SAME_SIZE)
            or round_ <= change.round
        ):
            return [], None
        batch, other_batch = self.batch, self.batch != change.batch_before
        if not (
            other_batch or (size != change.origin and between(change.origin, size, change.size))
        ):
            return [], None
        what = size.in_words() + (f" and batches of {batch} samples" if other_batch else "")
        reason = f"the program failed with {what} before its effect was measured: {title}"
        if other_batch:
            self.batch, self.most_batch = change.batch_before, max(batch - 1, 1)
        if change.size == change.origin:
            self.change = None
            return [change.dropped(reason)], None
        self.sizes.missed(size, change.origin)
        why = f"the program failed with {size.in_words()}"
        return self._roll_back(change, why, now, change.dropped(reason))

    def returning(self, size: Size) -> bool:
        """Return whether a world of ``size`` is only an intermediate state on the way back."""
        change = self.change
        return change is not None and change.kind is ScaleKind.RETURN and change.size != size

    def bounded(self, sample: SpeedSample) -> SpeedSample:
        """Return a sample without the batches with which the program has failed."""
        batches = sample.batches
        if batches is None or not 0 < self.most_batch < batches.most:
            return sample
        most = max(self.most_batch, batches.least)
        return msgspec.structs.replace(sample, batches=msgspec.structs.replace(batches, most=most))

    def overruled(self, reason: str, role: str, nodes: int) -> list[events.EventBody]:
        """Accept a user's number of nodes for a role, which overrules the auto-scaler; return events."""
        if not self.active:
            return []
        change, self.change = self.change, None
        self.sizes.fix(role, nodes)
        self._search_anew()
        if not self.sizes.open:
            self.active = False
            return [events.AutoScalingEnded(reason)]
        return [] if change is None else [change.dropped(reason)]

    def world_formed(self) -> None:
        """Forget the latest sample, since the last world's speed says nothing about a new one."""
        self.latest = None

    # ---- steps

    def _note(self, sample: SpeedSample, now: float) -> None:
        """Keep a sample unless it is an outlier; repeated outliers start a new search."""
        if any(known[-1].total_batch != sample.total_batch for known in self.samples.values()):
            self.samples.clear()  # they are of another batch
            self.settled.clear()
        usual = self.settled.get(sample.size) or self.speed(sample.size)
        if usual and abs(sample.throughput / usual - 1) > DRIFT:
            self.drifted += 1
            if self.drifted < DRIFT_WINDOWS or self.change is not None or now < self.search_at:
                return
            self.samples.clear()
            self._search_anew()
        self.drifted = 0
        known = self.samples.setdefault(sample.size, [])
        known.append(sample)
        del known[:-KEPT_SAMPLES]

    def _search_anew(self) -> None:
        """Start a new search, since what is known of other sizes and of the model may no longer hold.

        A search that would begin during the pause after earlier ones with the same end waits for the pause's
        end.
        """
        self.stage, self.tries, self.next_at = ScaleStage.ADJUST, 0, self.search_at
        self.sizes.open_all()
        self.region = TrustRegion()
        self.settled.clear()

    def _conclude(self, change: Change, sample: SpeedSample, now: float) -> Reaction:
        """Evaluate the measured effect of a change of size."""
        self.change = None
        before, after = self.speed(change.origin), sample.throughput
        returned = change.kind is ScaleKind.RETURN or bool(change.plan_id)
        worth = self.worth(after, change.size)
        short = not returned and worth < (1 - SLACK) * self.worth(before, change.origin)
        outcome = self._outcome(change, sample, short)
        if not returned and outcome is not None:
            self.region = self.region.after(within=outcome.within)
        happened = [] if outcome is None else [outcome]
        if not short:
            return [*happened], None
        gain = after / before - 1
        why = (
            f"{change.origin.change_to(change.size)} brought {gain:+.0%} throughput "
            f"for {self.cost(change.size) / self.cost(change.origin) - 1:+.0%} nodes"
        )
        return self._roll_back(change, why, now, *happened)

    def _replacement(self, change: Change, sample: SpeedSample) -> Reaction:
        """Evaluate a change that kept the numbers of nodes; discard older measurements if it helped."""
        self.change = None
        assert change.effect is not None, "a change for nothing"
        short = sample.throughput < (1 + SLACK) * change.effect.before
        if short or sample.throughput < change.effect.low:
            self.done[change.kind] = MAX_REPLACED  # this was not the cause
        if not short:
            self.samples = {sample.size: [sample]}
            self._search_anew()
        outcome = self._outcome(change, sample, short)
        return [] if outcome is None else [outcome], None

    def _outcome(
        self, change: Change, sample: SpeedSample, short: bool
    ) -> events.PlanMeasured | None:
        """Record the outcome of a plan with a prediction."""
        if change.effect is None:
            return None
        outcome = PlanOutcome(effect=change.effect, throughput=sample.throughput)
        self.outcomes.append(outcome)
        return change.measured(sample, outcome, short=short)

    def _roll_back(
        self, change: Change, reason: str, now: float, *happened: events.EventBody
    ) -> Reaction:
        """Begin the way back to the size before a change, after the events that caused it."""
        size = change.origin
        known = self.speed(size)
        effect = Effect(
            throughput=known,
            low=known * (1 - DRIFT),
            high=known * (1 + DRIFT),
            before=self.latest.throughput if self.latest is not None else 0.0,
            cost=self.cost(size),
        )
        back = decided(ScaleKind.RETURN, size, reason, effect if known else None)
        return [*happened, self._begin(back, change.size, now)], back

    def _begin(self, decision: ScaleDecision, origin: Size, now: float) -> events.PlanMade:
        self.made += 1
        plan = decision.plan
        self.change = Change(
            number=self.made,
            kind=decision.kind,
            size=decision.size,
            origin=origin,
            effect=plan.effect,
            since=now,
            round=self.round,
            plan_id=decision.plan_id,
            batch_before=self.batch,
        )
        return self.change.begun(decision, self.unit)

    def _settle(self, now: float) -> list[events.EventBody]:
        self.next_at = now + self.job.limits.autoscale_interval
        self.settled = {size: self.speed(size) for size in self.samples} | self.settled
        if self.stage is ScaleStage.RUNNING or self.latest is None:
            return []
        self.stage = ScaleStage.RUNNING
        size = self.latest.size
        self.same_end = self.same_end + 1 if self.ended == size else 0
        self.ended = size
        if self.same_end:  # the load comes and goes; the scaling law has not changed
            doubled = 2.0 ** min(self.same_end - 1, MOST_DOUBLED)
            self.search_at = now + self.job.limits.autoscale_interval * doubled
        speed, tried = self.speed(size), len(self.samples)
        return [events.SizeSettled(size.workers, speed, tried, self.unit, size.servers)]

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        change = self.change
        assert change is None or self.active, "a change without auto-scaling"
        assert change is None or change.size.workers > 0
        assert all(0 < len(known) <= KEPT_SAMPLES for known in self.samples.values())
        assert not self.active or self.sizes.open
        self.sizes.validate()
