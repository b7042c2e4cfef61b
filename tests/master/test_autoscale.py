"""The auto-scaler's memory: stages, outcomes, what is taken back."""

import pytest

from dlrover.master.machine.scaling.autoscale import DRIFT_WINDOWS, MOST_CHANGES, AutoScaling
from dlrover.master.machine.scaling.changes import gain_without
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.measurements import Batches, ModelProfile, SpeedSample
from dlrover.spec.node import Size
from dlrover.spec.plan import Effect, NodeGroup, ResourcePlan, ScaleDecision, ScaleKind, ScaleStage

LIMITS = Limits(autoscale_interval=300.0, autoscale_patience=900.0)


def scaling(
    least: int = 1, most: int = 8, *, auto: bool = True, unit: int = 1, servers: int = 0
) -> AutoScaling:
    job = JobSpec(
        name="job",
        min_nodes=least,
        max_nodes=most,
        node_unit=unit,
        auto_scale=auto,
        limits=LIMITS,
        servers=min(1, servers),
        min_servers=min(1, servers),
        max_servers=servers,
    )
    return AutoScaling(job)


class Story:
    """One job, told from outside."""

    def __init__(self, **options) -> None:
        self.machine = scaling(**options)
        self.now = 0.0
        self.told: list[events.EventBody] = []

    def measure(self, nodes: int, throughput: float, round_: int = 1) -> ScaleDecision | None:
        self.now += 30
        sample = SpeedSample(nodes=nodes, replicas=nodes, step_seconds=nodes / throughput, steps=9)
        told, back = self.machine.measured(round_, sample, ModelProfile(), self.now)
        self.told += told
        self.machine.validate()
        return back

    def measure_held_up(self, nodes: int, throughput: float) -> None:
        self.now += 30
        sample = SpeedSample(nodes=nodes, replicas=nodes, step_seconds=nodes / throughput, steps=9)
        found = self.machine.measured(1, sample, ModelProfile(), self.now, held_up=True)
        assert found == ([], None)
        self.machine.validate()

    def plan(self, nodes: int | None, throughput: float = 20.0, kind=ScaleKind.GROW) -> None:
        decision = None
        if nodes is not None:
            effect = Effect(throughput=throughput, low=throughput / 1.5, high=throughput * 1.5)
            plan = ResourcePlan(
                groups={"worker": NodeGroup(count=nodes)}, reason="why", effect=effect
            )
            decision = ScaleDecision(kind=kind, nodes=nodes, plan=plan)
        assert self.machine.due(self.now)
        self.told += self.machine.planned(decision, self.now)
        self.machine.validate()


def test_nothing_is_planned_before_the_first_size_is_measured():
    story = Story()
    assert story.machine.stage is ScaleStage.START
    assert not story.machine.due(0.0)
    story.measure(1, 10.0)
    assert story.machine.due(story.now)


@pytest.mark.parametrize("options", [{"auto": False}, {"least": 4, "most": 4}])
def test_a_job_with_nothing_to_choose_is_left_alone(options):
    story = Story(**options)
    assert story.measure(4, 10.0) is None
    assert not story.machine.due(story.now)


def test_a_plan_that_pays_is_kept_beside_its_prediction():
    story = Story()
    story.measure(1, 10.0)
    story.plan(2, throughput=20.0)
    assert story.machine.stage is ScaleStage.ADJUST
    assert not story.machine.due(story.now)
    assert story.measure(2, 18.0, round_=2) is None
    made, measured = story.told
    assert (made.before, made.nodes, made.kind) == (1, 2, ScaleKind.GROW)
    assert measured.error == pytest.approx(-0.1)
    assert measured.within
    assert not measured.short
    assert [outcome.throughput for outcome in story.machine.outcomes] == [pytest.approx(18.0)]


def test_a_slow_rank_does_not_make_a_size_a_worse_one():
    story = Story()
    story.measure(2, 20.0)
    for _ in range(DRIFT_WINDOWS + 1):
        story.measure_held_up(2, 10.0)
    assert story.machine.speed(Size(2)) == pytest.approx(20.0)
    assert story.machine.latest.throughput == pytest.approx(10.0)


def test_a_job_that_is_slow_from_its_beginning_is_measured_as_it_is():
    story = Story()
    story.measure_held_up(2, 10.0)
    assert story.machine.speed(Size(2)) == pytest.approx(10.0)
    assert story.machine.due(story.now)


def test_samples_of_the_old_size_do_not_conclude_a_plan():
    story = Story()
    story.measure(1, 10.0)
    story.plan(2)
    story.measure(1, 10.0)
    assert story.machine.change is not None


def test_what_falls_short_is_taken_back_at_once():
    """Twice the nodes must bring 41 % more; they bring 20 %."""
    story = Story()
    story.measure(1, 10.0)
    story.plan(2)
    back = story.measure(2, 12.0, round_=2)
    assert (back.kind, back.nodes) == (ScaleKind.RETURN, 1)
    assert back.plan.reason == "1 -> 2 nodes brought +20% throughput for +100% nodes"
    assert story.told[-2].short
    assert isinstance(story.told[-1], events.PlanMade)
    assert story.measure(1, 10.0, round_=3) is None
    assert story.machine.change is None
    assert story.told[-1].error == pytest.approx(0.0)


def test_a_way_back_is_not_taken_back_though_the_job_has_become_slower():
    story = Story()
    story.measure(1, 10.0)
    story.plan(2)
    assert story.measure(2, 12.0, round_=2) is not None
    assert story.measure(1, 5.0, round_=3) is None


def test_a_wrong_prediction_narrows_the_region_and_a_right_one_widens_it():
    story = Story()
    story.measure(1, 10.0)
    before = story.machine.region.factor
    story.plan(2, throughput=20.0)
    story.measure(2, 19.0, round_=2)
    wide = story.machine.region.factor
    assert wide > before
    story.plan(4, throughput=100.0)
    story.measure(4, 30.0, round_=3)
    assert story.machine.region.factor < wide


def test_once_the_size_is_found_it_is_looked_at_now_and_then():
    story = Story()
    story.measure(1, 10.0)
    story.plan(None)
    assert story.machine.stage is ScaleStage.RUNNING
    assert isinstance(story.told[-1], events.SizeSettled)
    assert not story.machine.due(story.now + LIMITS.autoscale_interval - 1)
    story.now += LIMITS.autoscale_interval
    story.plan(None)
    assert len(story.told) == 1


def test_a_change_that_takes_too_long_is_taken_back_and_not_tried_again():
    story = Story()
    story.measure(1, 10.0)
    story.plan(4)
    machine = story.machine
    assert machine.expired(machine.deadline() - 1) == ([], None)
    told, back = machine.expired(machine.deadline())
    assert isinstance(told[0], events.PlanDropped)
    assert (back.kind, back.nodes) == (ScaleKind.RETURN, 1)
    assert machine.sizes.workers() == [1, 2, 3]
    assert story.measure(1, 10.0) is None
    assert machine.change is None


def test_a_way_back_that_takes_too_long_is_forgotten():
    story = Story()
    story.measure(1, 10.0)
    story.plan(4)
    machine = story.machine
    machine.expired(machine.deadline())
    told, back = machine.expired(machine.deadline() + 2 * LIMITS.autoscale_patience)
    assert [type(body) for body in told] == [events.PlanDropped]
    assert (back, machine.change) == (None, None)


def test_a_job_whose_speed_has_changed_is_measured_anew():
    story = Story()
    story.measure(1, 10.0)
    story.plan(2)
    story.measure(2, 20.0, round_=2)
    story.plan(None)
    for _ in range(DRIFT_WINDOWS - 1):
        story.measure(2, 13.0, round_=2)
    assert set(story.machine.samples) == {Size(1), Size(2)}
    story.measure(2, 8.0, round_=2)
    assert set(story.machine.samples) == {Size(2)}
    assert story.machine.stage is ScaleStage.ADJUST


def test_one_slow_window_is_no_change():
    story = Story()
    for throughput in (10.0, 10.0, 5.0, 10.0, 5.0, 10.0):
        story.measure(1, throughput)
    assert {s.throughput for s in story.machine.samples[Size(1)]} == {10.0}


def test_what_the_brain_has_ordered_is_measured_and_not_taken_back():
    """It may have given the nodes to a job that needs them more."""
    story = Story()
    story.measure(4, 40.0)
    plan = ResourcePlan(
        groups={}, reason="others gain more", effect=Effect(throughput=20.0, low=15.0, high=25.0)
    )
    decision = ScaleDecision(kind=ScaleKind.SHRINK, nodes=2, plan=plan, plan_id="the-brains")
    story.told += story.machine.planned(decision, story.now)
    assert story.measure(2, 18.0, round_=2) is None
    made, measured = story.told
    assert made.sentence().startswith("Plan 1 of the Brain, fewer nodes: others gain more")
    assert (made.plan_id, measured.plan_id, measured.short) == ("the-brains", "the-brains", False)


def test_a_user_ends_it():
    story = Story()
    story.measure(1, 10.0)
    story.plan(2)
    ended = story.machine.overruled("a user requested 3 nodes", "worker", 3)
    assert [body.reason for body in ended] == ["a user requested 3 nodes"]
    story.machine.validate()
    assert story.machine.overruled("again", "worker", 3) == []
    assert story.measure(2, 11.0, round_=2) is None
    assert not story.machine.due(story.now)


def test_sizes_are_multiples_of_the_unit():
    assert scaling(least=2, most=9, unit=4).sizes.workers() == [4, 8]


class ServerStory(Story):
    """A job with one to four servers."""

    def __init__(self) -> None:
        super().__init__(servers=4)

    def measure(self, workers: int, servers: int, throughput: float, round_: int = 1):
        self.now += 30
        sample = SpeedSample(
            nodes=workers,
            replicas=workers,
            step_seconds=workers / throughput,
            steps=9,
            servers=servers,
        )
        told, back = self.machine.measured(round_, sample, ModelProfile(), self.now)
        self.told += told
        self.machine.validate()
        return back

    def plan(self, workers: int, servers: int, throughput: float = 20.0) -> None:
        effect = Effect(throughput=throughput, low=throughput / 1.5, high=throughput * 1.5)
        plan = ResourcePlan(groups={}, reason="why", effect=effect)
        decision = ScaleDecision(kind=ScaleKind.GROW, nodes=workers, servers=servers, plan=plan)
        self.told += self.machine.planned(decision, self.now)
        self.machine.validate()


def test_a_plan_for_servers_that_falls_short_is_taken_back():
    story = ServerStory()
    story.measure(2, 1, 20.0)
    story.plan(2, 3)
    assert story.measure(2, 1, 20.0) is None
    assert story.machine.change is not None
    back = story.measure(2, 3, 21.0, round_=2)
    assert (back.kind, back.nodes, back.servers) == (ScaleKind.RETURN, 2, 1)
    assert back.plan.reason == "1 -> 3 servers brought +5% throughput for +67% nodes"
    assert "on 2 workers and 3 servers" in story.told[-2].sentence()


def test_servers_that_do_not_come_are_not_asked_for_again():
    story = ServerStory()
    story.measure(2, 1, 20.0)
    story.plan(4, 3)
    machine = story.machine
    _, back = machine.expired(machine.deadline())
    assert (back.nodes, back.servers) == (2, 1)
    assert (machine.sizes.workers(), machine.sizes.servers()) == ([1, 2, 3], [1, 2])


def test_a_user_ends_it_role_by_role():
    story = ServerStory()
    story.measure(2, 1, 20.0)
    story.plan(2, 2)
    (dropped,) = story.machine.overruled("a user requested 3 servers", "ps", 3)
    assert isinstance(dropped, events.PlanDropped)
    story.machine.validate()
    assert story.machine.sizes.servers() == [3]
    assert story.machine.sizes.workers() == list(range(1, 9))
    story.measure(2, 3, 30.0, round_=2)
    assert story.machine.question().servers == [3]
    (ended,) = story.machine.overruled("a user requested 4 nodes", "worker", 4)
    assert isinstance(ended, events.AutoScalingEnded)
    assert not story.machine.due(story.now)


def test_one_more_server_is_tried_once_when_all_are_hot():
    story = ServerStory()
    story.measure(2, 1, 20.0)
    told, decision = story.machine.more_servers(0.5, "all 1 servers are hot", story.now)
    assert (decision.nodes, decision.servers) == (2, 2)
    assert told[0].reason == "all 1 servers are hot"
    assert story.machine.more_servers(0.5, "again", story.now) == ([], None)
    assert story.measure(2, 2, 20.0, round_=2).servers == 1
    story.measure(2, 1, 20.0, round_=3)
    assert story.machine.more_servers(0.5, "again", story.now) == ([], None)


@pytest.mark.parametrize("after", [20.0, 30.0])
def test_parameters_that_are_divided_anew_are_measured_and_not_divided_again_for_nothing(after):
    story = ServerStory()
    story.measure(2, 2, 20.0)
    made = story.machine.same_size(ScaleKind.REBALANCE, 0.4, "uneven", story.now)
    assert made.kind is ScaleKind.REBALANCE
    assert story.measure(2, 2, 20.0) is None
    assert story.machine.change is not None
    assert story.measure(2, 2, after, round_=2) is None
    assert story.told[-1].short == (after == 20.0)
    assert story.machine.free(ScaleKind.REBALANCE) == (after > 20.0)


def test_a_slow_worker_costs_its_own_share_where_nobody_waits_for_it():
    slow = events.SlowRank(3, 3, 2.0, "compute")
    story = ServerStory()
    story.measure(4, 1, 40.0)
    made = story.machine.slow(slow, story.now)
    assert "without it the job is 14% faster" in made.reason  # 4 / 3.5
    story = ServerStory()
    story.measure(12, 1, 40.0)
    assert story.machine.slow(slow, story.now) is None  # 12 / 11.5


@pytest.mark.parametrize("step", [0.105, 0.205])
def test_a_rank_that_became_slow_after_the_latest_sample_costs_as_much_as_before_it(step):
    latest = SpeedSample(nodes=2, replicas=2, step_seconds=step, steps=9, compute_seconds=0.1)
    slow = events.SlowRank(1, 1, 2.0, "compute")
    assert gain_without(slow, latest) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("nodes", [2, 6])
def test_a_size_that_could_not_be_measured_is_closed_until_a_new_search(nodes):
    story = Story()
    story.measure(4, 10.0)
    story.plan(nodes)
    machine = story.machine
    machine.expired(machine.deadline())
    story.measure(4, 10.0, round_=2)
    assert machine.sizes.workers() == ([3, 4, 5, 6, 7, 8] if nodes == 2 else [1, 2, 3, 4, 5])
    for _ in range(DRIFT_WINDOWS):
        story.measure(4, 20.0, round_=2)
    assert machine.sizes.workers() == list(range(1, 9))


def test_after_many_changes_of_one_search_only_measured_sizes_are_taken():
    story = Story()
    story.measure(4, 10.0)
    for number in range(MOST_CHANGES):
        assert story.machine.question().sizes == list(range(1, 9))
        round_ = 2 * number + 2
        story.plan(2 + number % 2)
        assert story.measure(2 + number % 2, 5.0, round_=round_) is not None
        story.measure(4, 10.0, round_=round_ + 1)
    assert story.machine.question().sizes == [2, 3, 4]


def test_a_search_that_ends_where_the_last_one_did_doubles_the_pause_before_the_next():
    """Another job's load comes and goes, and the best size stays what it is."""
    story = Story()
    story.measure(1, 10.0)
    story.plan(None)
    pauses, speed = [], 10.0
    for _ in range(5):
        began, speed = story.now, 30.0 - speed
        while story.machine.stage is ScaleStage.RUNNING:
            story.measure(1, speed)
        pauses.append(story.now - began)
        story.plan(None)
    assert pauses[0] == DRIFT_WINDOWS * 30.0
    assert pauses[1:] == [LIMITS.autoscale_interval * times for times in (1, 2, 4, 8)]


def batch_story(**options) -> Story:
    """Two nodes, for which the Brain has chosen a batch of 64 instead of 32."""
    story = Story(least=2, **options)
    told, _ = story.machine.measured(1, of_batch(32), ModelProfile(), 0.0)
    assert not told
    plan = ResourcePlan(groups={"worker": NodeGroup(count=2)}, reason="noisy", batch=64)
    decision = ScaleDecision(kind=ScaleKind.BATCH, nodes=2, plan=plan, plan_id="p", batch=64)
    story.told += story.machine.planned(decision, 0.0)
    return story


def of_batch(batch: int, step: float = 1.0) -> SpeedSample:
    batches = Batches(least=32, most=256, pass_most=32)
    return SpeedSample(
        nodes=2, replicas=2, step_seconds=step, steps=9, total_batch=batch, batches=batches
    )


def test_a_batch_is_measured_in_its_own_round():
    story = batch_story()
    assert story.machine.batch == 64
    story.machine.measured(1, of_batch(32), ModelProfile(), 10.0)
    assert story.machine.change is not None
    _, back = story.machine.measured(2, of_batch(64, 1.2), ModelProfile(), 20.0)
    assert (story.machine.change, back) == (None, None)
    assert {s.total_batch for known in story.machine.samples.values() for s in known} == {64}


def test_a_batch_with_which_the_program_fails_is_taken_back_for_good():
    story = batch_story()
    assert story.machine.failed(Size(2), 1, "out of memory", 10.0) == ([], None)
    (dropped,), back = story.machine.failed(Size(2), 2, "out of memory", 10.0)
    assert "batches of 64 samples" in dropped.reason
    assert (back, story.machine.change, story.machine.batch) == (None, None, 0)
    story.machine.measured(3, of_batch(32), ModelProfile(), 20.0)
    assert story.machine.question().current.batches.most == 63
    story.machine.validate()


@pytest.mark.parametrize(("size", "trial"), [(2, True), (3, True), (1, False), (4, False)])
def test_a_program_that_fails_with_a_part_of_the_new_nodes_has_failed_by_the_trial(size, trial):
    story = Story()
    story.measure(1, 10.0)
    story.plan(3, throughput=20.0)
    told, back = story.machine.failed(Size(size), 2, "it cannot", story.now)
    assert bool(told) is trial
    if trial:
        assert back.size == Size(1)
        assert max(story.machine.sizes.workers()) < size
    story.machine.validate()


@pytest.mark.parametrize("by", ["a user", "another node"])
def test_a_search_with_the_same_end_pauses_before_the_next_whatever_begins_it(by):
    story = Story(servers=3)
    machine = story.machine
    for _ in range(2):  # two searches with the same end
        story.measure(2, 10.0)
        story.plan(None)
        machine._search_anew()
        machine.next_at = 0.0
    story.measure(2, 10.0)
    assert machine.search_at > story.now
    if by == "a user":
        machine.overruled("a user requested 2 nodes", "worker", 2)
    else:
        machine.same_size(ScaleKind.MIGRATE, 0.5, "it is hot", story.now)
        story.measure(2, 20.0, round_=2)
    assert machine.change is None
    assert not machine.due(story.now)
    assert machine.due(machine.search_at)
