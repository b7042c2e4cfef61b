"""The auto-scaler's memory of one job: what was measured, what is tried, and what came of it.

Three stages. *Start*: the first size is measured. *Initial adjustment*: one size after the other is tried, as
long as the model expects a gain or does not know. *Running*: the size stays, and is looked at now and then.

One change at a time: a plan is applied, its world is measured, and the outcome is kept beside the prediction.
A size that is worth less than the one before is taken back. What to try next is not decided here: that needs a
fitted model (`dlrover.master.planner`), and its answer comes as an input, so that a journal replays to the same
state on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dlrover.master.machine.changes import (
    SAME_SIZE,
    Change,
    Question,
    decided,
    gain_without,
    told_change,
)
from dlrover.master.machine.sizes import Sizes
from dlrover.planning.throughput import TrustRegion
from dlrover.spec import events
from dlrover.spec.job import JobSpec
from dlrover.spec.plan import Effect, PlanOutcome
from dlrover.spec.roles import Size
from dlrover.spec.speed import ModelProfile, ScaleDecision, ScaleKind, ScaleStage, SpeedSample

KEPT_SAMPLES = 5
"""Of each size, the latest ones."""
SLACK = 0.02
"""Share of its worth by which a size may fall behind the one before without being taken back."""
DRIFT = 0.25
"""Relative change of a size's speed, at once or little by little since the search ended, after which everything
that was measured before is out of date."""
DRIFT_WINDOWS = 3
"""Windows in a row that show it."""
MAX_TRIES = 12
"""Changes in the initial adjustment after which no size is tried only to learn of it."""
MOST_DOUBLED = 8
"""Times that the pause before a new search is doubled, at most."""
MOST_CHANGES = 24
"""Changes of one search, and of what follows it, after which only measured sizes are taken."""
MAX_REPLACED = 3
"""Slow nodes of a job that are replaced."""
REPLACE_GAIN = 0.05
"""Share of its speed that a job must win by it."""


@dataclass
class AutoScaling:
    """One job's auto-scaling. Change it only through its methods."""

    job: JobSpec
    active: bool = False
    stage: ScaleStage = ScaleStage.START
    #: what was measured, by size
    samples: dict[Size, list[SpeedSample]] = field(default_factory=dict)
    region: TrustRegion = field(default_factory=TrustRegion)
    change: Change | None = None
    #: plans made so far
    made: int = 0
    #: plans made since the search began
    tries: int = 0
    #: the outcomes of plans with a prediction, the latest last
    outcomes: list[PlanOutcome] = field(default_factory=list)
    #: the latest sample of the running world; None until there is one
    latest: SpeedSample | None = None
    #: the world that was measured last, and its round
    size: Size = field(default_factory=lambda: Size(0))
    round: int = 0
    #: windows in a row that drifted from what their size had
    drifted: int = 0
    #: speeds by size when the search ended: what they may drift from
    settled: dict[Size, float] = field(default_factory=dict)
    #: where the last search ended, how many in a row have ended there, and when drift may begin the next one
    ended: Size | None = None
    same_end: int = 0
    search_at: float = 0.0
    #: when the next plan may be made
    next_at: float = 0.0
    #: what the job may have
    sizes: Sizes = field(init=False)
    #: the global batch that was chosen for the job; 0: the program's own
    batch: int = 0
    #: the largest one that it may have, as the program failed with a larger one; 0: there is no such bound
    most_batch: int = 0
    #: changes of each kind that left the numbers of nodes as they were
    done: dict[ScaleKind, int] = field(default_factory=dict)
    #: of what was measured
    unit: str = ""
    profile: ModelProfile = field(default_factory=ModelProfile)

    def __post_init__(self) -> None:
        self.sizes = Sizes(self.job)
        self.active = self.job.auto_scale and self.sizes.open

    # ---- queries

    def due(self, now: float) -> bool:
        """Whether the planner is to be asked."""
        ready = self.active and self.latest is not None and self.change is None
        return ready and now >= self.next_at

    def question(self) -> Question:
        """What the planner is asked, once it is `due`."""
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
        """When a change is given up; None without one."""
        return (
            None if self.change is None else self.change.since + self.job.limits.autoscale_patience
        )

    def worth(self, throughput: float, size: Size) -> float:
        """What is to be as large as it can be."""
        return float(throughput / self.cost(size) ** self.job.limits.autoscale_cost)

    def cost(self, size: Size) -> float:
        """Of a size, in worker nodes."""
        return self.latest.cost(size) if self.latest is not None else float(size.nodes)

    def speed(self, size: Size) -> float:
        """Throughput of a size: the mean of its samples; 0 if it was not measured."""
        known = self.samples.get(size, ())
        return sum(sample.throughput for sample in known) / len(known) if known else 0.0

    def free(self, kind: ScaleKind, most: int = MAX_REPLACED) -> bool:
        """Whether a change that leaves the numbers of nodes as they are may begin."""
        idle = self.active and self.change is None and self.latest is not None
        return idle and self.done.get(kind, 0) < most

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
        """The planner has answered: a change begins, or the size is found."""
        if decision is None:
            return self._settle(now)
        if self.stage is ScaleStage.START:
            self.stage = ScaleStage.ADJUST
        self.tries += 1
        told = self._begin(decision, self.size, now)
        self.batch = decision.batch or self.batch
        return [told]

    def slow(self, found: events.SlowRank, now: float) -> events.PlanMade | None:
        """A rank holds up the others; the plan to replace its node, if that is worth it."""
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
        """Begin a change that leaves the numbers of nodes as they are, if one may begin.

        Args:
            kind: What is changed.
            gain: The share of its speed that the job is expected to win.
            reason: Why, as part of a sentence.
            now: Seconds since the epoch.
        """
        latest = self.latest
        if latest is None or not self.free(kind):
            return None
        before = latest.throughput
        effect = Effect(
            throughput=before * (1 + gain),
            low=before * (1 + gain / 2),
            high=before * (1 + gain * 1.5),
            before=before,
            cost=self.cost(latest.size),
        )
        self.done[kind] = self.done.get(kind, 0) + 1
        return self._begin(decided(kind, latest.size, reason, effect), latest.size, now)

    def one_more_server(self) -> Size | None:
        """The size with one more server, if it may be tried now and was not measured yet."""
        latest = self.latest
        if latest is None or self.change is not None or not self.active:
            return None
        size = Size(latest.nodes, latest.servers + 1)
        open_ = size.servers in self.sizes.servers() and size not in self.samples
        return size if open_ else None

    def more_servers(
        self, gain: float, reason: str, now: float
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """All servers are hot: one more is tried, unless that was measured or may not be."""
        latest, size = self.latest, self.one_more_server()
        if latest is None or size is None:
            return [], None
        before = latest.throughput
        effect = Effect(
            throughput=before * (1 + gain),
            low=before,
            high=before * (1 + 2 * gain),
            before=before,
            cost=self.cost(size),
        )
        decision = decided(ScaleKind.GROW, size, reason, effect)
        return [self._begin(decision, latest.size, now)], decision

    def expired(self, now: float) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """A change has taken too long: the size to go back to."""
        change, deadline = self.change, self.deadline()
        if change is None or deadline is None or now < deadline:
            return [], None
        waited = self.job.limits.autoscale_patience
        reason = f"its effect could not be measured within {waited:g} s (autoscale_patience)"
        told: list[events.EventBody] = [events.PlanDropped(change.number, reason, change.plan_id)]
        self.change = None
        if change.kind in (ScaleKind.RETURN, ScaleKind.BATCH, *SAME_SIZE):
            return told, None
        self.sizes.missed(change.size, change.origin)
        back = self._back_to(
            change.origin, f"{events.told_size(*change.size)} could not be measured in time"
        )
        told.append(self._begin(back, change.size, now))
        return told, back

    def failed(
        self, size: Size, round_: int, title: str, now: float
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """The program has failed in a world of ``size``: if a change has formed it, the size to go back to.

        While a change is carried out, its world may first have a part of the nodes. What is told is empty where
        the failure has nothing to do with a change.
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
            other_batch or (size != change.origin and _between(change.origin, size, change.size))
        ):
            return [], None
        what = events.told_size(*size) + (f" and batches of {batch} samples" if other_batch else "")
        reason = f"the program failed with {what} before its effect was measured: {title}"
        told: list[events.EventBody] = [events.PlanDropped(change.number, reason, change.plan_id)]
        if other_batch:
            self.batch, self.most_batch = change.batch_before, max(batch - 1, 1)
        if change.size == change.origin:
            self.change = None
            return told, None
        self.sizes.missed(size, change.origin)
        back = self._back_to(change.origin, f"the program failed with {events.told_size(*size)}")
        told.append(self._begin(back, change.size, now))
        return told, back

    def returning(self, size: Size) -> bool:
        """Whether a world of ``size`` is only on the way back to another size."""
        change = self.change
        return change is not None and change.kind is ScaleKind.RETURN and change.size != size

    def bounded(self, sample: SpeedSample) -> SpeedSample:
        """A sample without the batches with which the program has failed."""
        batches = sample.batches
        if batches is None or not 0 < self.most_batch < batches.most:
            return sample
        most = max(self.most_batch, batches.least)
        return msgspec.structs.replace(sample, batches=msgspec.structs.replace(batches, most=most))

    def overruled(self, reason: str, role: str, nodes: int) -> list[events.EventBody]:
        """Somebody has set the number of nodes of a role: that wins from now on."""
        if not self.active:
            return []
        change, self.change = self.change, None
        self.sizes.fix(role, nodes)
        self._search_anew()
        if not self.sizes.open:
            self.active = False
            return [events.AutoScalingEnded(reason)]
        return [] if change is None else [events.PlanDropped(change.number, reason, change.plan_id)]

    def world_formed(self) -> None:
        """A new round: what the last world's speed was says nothing of this one."""
        self.latest = None

    # ---- steps

    def _note(self, sample: SpeedSample, now: float) -> None:
        """Keep a sample, unless it is an outlier; if they go on, the job has become another one."""
        if any(known[-1].total_batch != sample.total_batch for known in self.samples.values()):
            self.samples.clear()  # of another batch
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
        """What is known of other sizes may not hold any more, nor how far the model could be trusted.

        A search that would begin during the pause after earlier ones with the same end waits until that is over.
        """
        self.stage, self.tries, self.next_at = ScaleStage.ADJUST, 0, self.search_at
        self.sizes.open_all()
        self.region = TrustRegion()
        self.settled.clear()

    def _conclude(
        self, change: Change, sample: SpeedSample, now: float
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """The effect of a change of the size is known."""
        self.change = None
        before, after = self.speed(change.origin), sample.throughput
        returned = change.kind is ScaleKind.RETURN or bool(change.plan_id)
        worth = self.worth(after, change.size)
        short = not returned and worth < (1 - SLACK) * self.worth(before, change.origin)
        told, within = self._outcome(change, sample, short)
        if not returned and change.effect is not None:
            self.region = self.region.after(within=within)
        if not short:
            return told, None
        gain = after / before - 1
        back = self._back_to(
            change.origin,
            f"{told_change(change.origin, change.size)} brought {gain:+.0%} throughput "
            f"for {self.cost(change.size) / self.cost(change.origin) - 1:+.0%} nodes",
        )
        return [*told, self._begin(back, change.size, now)], back

    def _replacement(
        self, change: Change, sample: SpeedSample
    ) -> tuple[list[events.EventBody], ScaleDecision | None]:
        """The nodes are others, or do other things; what was measured before is out of date if that has helped."""
        self.change = None
        assert change.effect is not None, "a change for nothing"
        short = sample.throughput < (1 + SLACK) * change.effect.before
        if short or sample.throughput < change.effect.low:
            self.done[change.kind] = MAX_REPLACED  # it is not that
        if not short:
            self.samples = {sample.size: [sample]}
            self._search_anew()
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
            change.size.workers,
            sample.throughput,
            outcome.error,
            outcome.within,
            short,
            sample.unit,
            change.plan_id,
            change.size.servers,
        )
        return [told], outcome.within

    def _back_to(self, size: Size, reason: str) -> ScaleDecision:
        known = self.speed(size)
        effect = Effect(
            throughput=known,
            low=known * (1 - DRIFT),
            high=known * (1 + DRIFT),
            before=self.latest.throughput if self.latest is not None else 0.0,
            cost=self.cost(size),
        )
        return decided(ScaleKind.RETURN, size, reason, effect if known else None)

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
        return events.PlanMade(
            self.made,
            decision.kind,
            decision.nodes,
            origin.workers,
            plan.reason,
            plan.effect,
            self.unit,
            decision.plan_id,
            decision.servers,
            origin.servers,
            decision.batch,
        )

    def _settle(self, now: float) -> list[events.EventBody]:
        self.next_at = now + self.job.limits.autoscale_interval
        self.settled = {size: self.speed(size) for size in self.samples} | self.settled
        if self.stage is ScaleStage.RUNNING or self.latest is None:
            return []
        self.stage = ScaleStage.RUNNING
        size = self.latest.size
        self.same_end = self.same_end + 1 if self.ended == size else 0
        self.ended = size
        if self.same_end:  # a load that comes and goes, rather than another law
            doubled = 2.0 ** min(self.same_end - 1, MOST_DOUBLED)
            self.search_at = now + self.job.limits.autoscale_interval * doubled
        speed, tried = self.speed(size), len(self.samples)
        return [events.SizeSettled(size.workers, speed, tried, self.unit, size.servers)]

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first that is broken."""
        change = self.change
        assert change is None or self.active, "a change without auto-scaling"
        assert change is None or change.size.workers > 0
        assert all(0 < len(known) <= KEPT_SAMPLES for known in self.samples.values())
        assert not self.active or self.sizes.open
        self.sizes.validate()


def _between(one: Size, size: Size, other: Size) -> bool:
    """Whether a size lies between two others, in each role."""
    bounds = zip(one, size, other, strict=True)
    return all(min(a, b) <= n <= max(a, b) for a, n, b in bounds)
