"""The auto-scaler's memory of one job: what was measured, what is tried, and what came of it.

Three stages. *Start*: the first size is measured. *Initial adjustment*: one size after the other is tried, as
long as the model expects a gain or does not know. *Running*: the size stays, and is looked at now and then.

One change at a time: a plan is applied, its world is measured, and the outcome is kept beside the prediction.
A size that is worth less than the one before is taken back. What to try next is not decided here: that needs a
fitted model (`dlrover.master.planner`), and its answer comes as an input, so that a journal replays to the same
state on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover.planning.throughput import TrustRegion
from dlrover.spec import events
from dlrover.spec.job import JobSpec
from dlrover.spec.plan import Effect, Group, Plan, PlanOutcome
from dlrover.spec.speed import ModelProfile, ScaleDecision, ScaleKind, ScaleStage, SpeedSample

KEPT_SAMPLES = 5
"""Of each size, the latest ones."""
SLACK = 0.02
"""Share of its worth by which a size may fall behind the one before without being taken back."""
DRIFT = 0.25
"""Relative change of a size's speed after which everything that was measured before is out of date."""
DRIFT_WINDOWS = 3
"""Windows in a row that show it."""
MAX_TRIES = 12
"""Changes in the initial adjustment after which no size is tried only to learn of it."""
MAX_REPLACED = 3
"""Slow nodes of a job that are replaced."""
REPLACE_GAIN = 0.05
"""Share of its speed that a job must win by it."""
GROUP = "worker"
"""The kind of node that plans are about."""


@dataclass(frozen=True)
class Question:
    """What is known of a job when its size is looked at."""

    current: SpeedSample
    """The running world."""
    samples: Sequence[SpeedSample]
    """Of all sizes that were measured, this one included."""
    sizes: Sequence[int]
    """Numbers of nodes that the job may have."""
    region: TrustRegion
    cost: float
    """How much nodes cost, 0 to 1."""
    explore: bool
    """Whether a size may be tried only to learn of it."""


@dataclass
class Change:
    """A plan that is carried out."""

    number: int
    kind: ScaleKind
    nodes: int
    origin: int
    """The number of nodes before it."""
    effect: Effect | None
    since: float
    round: int
    """The round that it began in."""
    plan_id: str = ""
    """The Brain's name for it, if it is the Brain's."""


@dataclass
class AutoScaling:
    """One job's auto-scaling. Change it only through its methods."""

    job: JobSpec
    active: bool = False
    stage: ScaleStage = ScaleStage.START
    #: what was measured, by number of nodes
    samples: dict[int, list[SpeedSample]] = field(default_factory=dict)
    region: TrustRegion = field(default_factory=TrustRegion)
    change: Change | None = None
    #: plans made so far
    made: int = 0
    #: plans made in this stage
    tries: int = 0
    #: the outcomes of plans with a prediction, the latest last
    outcomes: list[PlanOutcome] = field(default_factory=list)
    #: the latest sample of the running world; None until there is one
    latest: SpeedSample | None = None
    #: nodes of the world that was measured last, and its round
    size: int = 0
    round: int = 0
    #: windows in a row that drifted from what their size had
    drifted: int = 0
    #: when the next plan may be made
    next_at: float = 0.0
    #: more nodes than this could not be had
    most: int = 0
    #: slow nodes that were replaced
    replaced: int = 0
    #: of what was measured
    unit: str = ""
    profile: ModelProfile = field(default_factory=ModelProfile)

    def __post_init__(self) -> None:
        job = self.job
        self.active = job.auto_scale and job.min_nodes < job.max_nodes
        self.most = job.max_nodes

    # ---- queries

    def due(self, now: float) -> bool:
        """Whether the planner is to be asked."""
        ready = self.active and self.latest is not None and self.change is None
        return ready and now >= self.next_at

    def sizes(self) -> list[int]:
        """The numbers of nodes that the job may have."""
        unit = self.job.node_unit
        return [n for n in range(self.job.min_nodes, self.most + 1) if n % unit == 0]

    def question(self) -> Question:
        """What the planner is asked, once it is `due`."""
        assert self.latest is not None, "nothing was measured yet"
        return Question(
            current=self.latest,
            samples=tuple(sample for known in self.samples.values() for sample in known),
            sizes=self.sizes(),
            region=self.region,
            cost=self.job.limits.autoscale_cost,
            explore=self.stage is not ScaleStage.RUNNING and self.tries < MAX_TRIES,
        )

    def deadline(self) -> float | None:
        """When a change is given up; None without one."""
        return (
            None if self.change is None else self.change.since + self.job.limits.autoscale_patience
        )

    def worth(self, throughput: float, nodes: int) -> float:
        """What is to be as large as it can be."""
        return float(throughput / nodes**self.job.limits.autoscale_cost)

    def speed(self, nodes: int) -> float:
        """Samples per second of a size: the mean of its samples; 0 if it was not measured."""
        known = self.samples.get(nodes, ())
        return sum(sample.throughput for sample in known) / len(known) if known else 0.0

    # ---- inputs

    def measured(
        self,
        round_: int,
        sample: SpeedSample,
        profile: ModelProfile,
        now: float,
        *,
        held_up: bool = False,
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """A window of the running world was measured; what to tell, and the size to go back to, if any.

        A world that may have been ``held_up`` by a slow rank says nothing new of a size that was measured.
        """
        if not self.active:
            return [], None
        self.round, self.profile = round_, profile
        if not (held_up and sample.nodes in self.samples):
            self._note(sample)
        self.latest, self.size, self.unit = sample, sample.nodes, sample.unit
        change = self.change
        if change is None or sample.nodes != change.nodes:
            return [], None
        if change.kind is ScaleKind.REPLACE:
            return ([], None) if round_ == change.round else self._replacement(change, sample)
        return self._conclude(change, sample, now)

    def planned(self, decision: ScaleDecision | None, now: float) -> list[events.EventBody]:
        """The planner has answered: a change begins, or the size is found."""
        if decision is None:
            return self._settle(now)
        if self.stage is ScaleStage.START:
            self.stage = ScaleStage.ADJUST
        self.tries += 1
        return [self._begin(decision, self.size, now)]

    def slow(self, found: events.SlowRank, now: float) -> events.PlanMade | None:
        """A rank holds up the others; the plan to replace its node, if that is worth it."""
        latest = self.latest
        free = self.active and self.change is None and latest is not None
        if not free or latest is None or found.cause != "compute" or self.replaced >= MAX_REPLACED:
            return None
        usual = latest.compute_seconds or latest.step_seconds / found.factor
        waited = (found.factor - 1) * usual
        gain = latest.step_seconds / max(latest.step_seconds - waited, usual) - 1
        if gain < REPLACE_GAIN:
            return None
        before = latest.throughput
        effect = Effect(
            throughput=before * (1 + gain),
            low=before * (1 + gain / 2),
            high=before * (1 + gain * 1.5),
            before=before,
            cost=float(latest.replicas),
        )
        reason = (
            f"rank {found.rank} on node {found.node} takes {found.factor:.2f} times as long as the median rank, "
            f"without it the job is {gain:.0%} faster"
        )
        plan = Plan(groups={GROUP: Group(count=latest.nodes)}, reason=reason, effect=effect)
        self.replaced += 1
        decision = ScaleDecision(kind=ScaleKind.REPLACE, nodes=latest.nodes, plan=plan)
        return self._begin(decision, latest.nodes, now)

    def expired(self, now: float) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """A change has taken too long: the size to go back to."""
        change, deadline = self.change, self.deadline()
        if change is None or deadline is None or now < deadline:
            return [], None
        waited = self.job.limits.autoscale_patience
        reason = f"its effect could not be measured within {waited:g} s (autoscale_patience)"
        told: list[events.EventBody] = [events.PlanDropped(change.number, reason, change.plan_id)]
        self.change = None
        if change.kind in (ScaleKind.RETURN, ScaleKind.REPLACE):
            return told, None
        if change.nodes > change.origin:
            self.most = max(change.origin, change.nodes - self.job.node_unit)
        back = self._back_to(change.origin, f"{change.nodes} nodes could not be measured in time")
        told.append(self._begin(back, change.nodes, now))
        return told, back

    def overruled(self, reason: str) -> list[events.EventBody]:
        """Somebody has set the number of nodes: that wins from now on."""
        if not self.active:
            return []
        self.active, self.change = False, None
        return [events.AutoScalingEnded(reason)]

    def world_formed(self) -> None:
        """A new round: what the last world's speed was says nothing of this one."""
        self.latest = None

    # ---- steps

    def _note(self, sample: SpeedSample) -> None:
        """Keep a sample, unless it is an outlier; if they go on, the job has become another one."""
        usual = self.speed(sample.nodes)
        if usual and abs(sample.throughput / usual - 1) > DRIFT:
            self.drifted += 1
            if self.drifted < DRIFT_WINDOWS or self.change is not None:
                return
            self.samples.clear()
            self.stage, self.tries, self.next_at = ScaleStage.ADJUST, 0, 0.0
        self.drifted = 0
        known = self.samples.setdefault(sample.nodes, [])
        known.append(sample)
        del known[:-KEPT_SAMPLES]

    def _conclude(
        self, change: Change, sample: SpeedSample, now: float
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """The effect of a change of the size is known."""
        self.change = None
        before, after = self.speed(change.origin), sample.throughput
        returned = change.kind is ScaleKind.RETURN or bool(change.plan_id)
        worth = self.worth(after, change.nodes)
        short = not returned and worth < (1 - SLACK) * self.worth(before, change.origin)
        told, within = self._outcome(change, sample, short)
        if not returned and change.effect is not None:
            self.region = self.region.after(within=within)
        if not short:
            return told, None
        gain = after / before - 1
        back = self._back_to(
            change.origin,
            f"{change.origin} -> {change.nodes} nodes brought {gain:+.0%} throughput "
            f"for {change.nodes / change.origin - 1:+.0%} nodes",
        )
        return [*told, self._begin(back, change.nodes, now)], back

    def _replacement(
        self, change: Change, sample: SpeedSample
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """A slow node was replaced; what was measured with it is out of date if that has helped."""
        self.change = None
        assert change.effect is not None, "a slow node was replaced for nothing"
        short = sample.throughput < (1 + SLACK) * change.effect.before
        if short:
            self.replaced = MAX_REPLACED  # it is not the nodes
        else:
            self.samples = {sample.nodes: [sample]}
            self.stage, self.tries, self.next_at = ScaleStage.ADJUST, 0, 0.0
        return self._outcome(change, sample, short)[0], None

    def _outcome(
        self, change: Change, sample: SpeedSample, short: bool
    ) -> tuple[list[events.EventBody], bool]:
        """Keep what a plan has brought beside what it promised; whether that was within its interval."""
        if change.effect is None:
            return [], False
        outcome = PlanOutcome(effect=change.effect, throughput=sample.throughput)
        self.outcomes.append(outcome)
        told = events.PlanMeasured(
            change.number,
            change.nodes,
            sample.throughput,
            outcome.error,
            outcome.within,
            short,
            sample.unit,
            change.plan_id,
        )
        return [told], outcome.within

    def _back_to(self, nodes: int, reason: str) -> ScaleDecision:
        known = self.speed(nodes)
        effect = Effect(
            throughput=known,
            low=known * (1 - DRIFT),
            high=known * (1 + DRIFT),
            before=self.latest.throughput if self.latest is not None else 0.0,
            cost=float(nodes),
        )
        plan = Plan(
            groups={GROUP: Group(count=nodes)}, reason=reason, effect=effect if known else None
        )
        return ScaleDecision(kind=ScaleKind.RETURN, nodes=nodes, plan=plan)

    def _begin(self, decision: ScaleDecision, origin: int, now: float) -> events.PlanMade:
        self.made += 1
        plan = decision.plan
        self.change = Change(
            number=self.made,
            kind=decision.kind,
            nodes=decision.nodes,
            origin=origin,
            effect=plan.effect,
            since=now,
            round=self.round,
            plan_id=decision.plan_id,
        )
        return events.PlanMade(
            self.made,
            decision.kind,
            decision.nodes,
            origin,
            plan.reason,
            plan.effect,
            self.unit,
            decision.plan_id,
        )

    def _settle(self, now: float) -> list[events.EventBody]:
        self.next_at = now + self.job.limits.autoscale_interval
        if self.stage is ScaleStage.RUNNING or self.latest is None:
            return []
        self.stage, self.tries = ScaleStage.RUNNING, 0
        nodes = self.latest.nodes
        return [events.SizeSettled(nodes, self.speed(nodes), len(self.samples), self.unit)]

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        change = self.change
        assert change is None or self.active, "a change without auto-scaling"
        assert change is None or change.nodes in range(1, self.job.max_nodes + 1)
        assert all(0 < len(known) <= KEPT_SAMPLES for known in self.samples.values())
        assert not self.active or self.job.min_nodes <= self.most <= self.job.max_nodes
