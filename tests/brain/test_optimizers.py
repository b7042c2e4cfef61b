"""What the built-in optimisers do with what they are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from dlrover.brain.machine.division import ClusterOptimizer
from dlrover.brain.machine.job import JobFacts, Models, Past
from dlrover.brain.machine.single import SingleJobOptimizer
from dlrover.master.scaling.brainside import shape_of
from dlrover.planning.shapes import allowed, ring_sample
from dlrover.planning.warmstart import PastJob, first_plan
from dlrover.spec import brain
from dlrover.spec.measurements import Batches, SpeedSample
from dlrover.spec.plan import Effect, NodeGroup, PlanOutcome
from tests.brain import jobs

NOTHING = brain.ClusterResources()
NO_PAST = Past((), ())


def job(name: str, measured: tuple[int, ...], current: int, **more: Any) -> JobFacts:
    description = jobs.register(name, **more).description
    samples = jobs.samples(name, *map(jobs.shape, measured)).samples if measured else ()
    return JobFacts(name, description, jobs.shape(current), samples, (), 0.0, len(measured))


def cluster(accelerators: float, **more: Any) -> brain.ClusterResources:
    capacity = {"accelerator": accelerators, "cpu": 1e6}
    free = {"accelerator": more.pop("free", accelerators), "cpu": 1e6}
    used = {"accelerator": accelerators - free["accelerator"]}
    node = brain.ClusterNode(
        name="m", capacity=capacity, used=used, by_jobs=more.pop("by_jobs", {})
    )
    return brain.ClusterResources(nodes=(node,), capacity=capacity, free=free, **more)


def workers(advice: brain.Advice) -> int:
    assert advice.plan is not None, advice.reason
    return advice.plan.groups["worker"].count


def single(of: JobFacts, where: brain.ClusterResources = NOTHING) -> brain.Advice:
    return SingleJobOptimizer().advise([of], NO_PAST, where)[of.id]


def test_a_job_grows_into_what_is_free_only() -> None:
    measured = job("one", (1, 2, 4), 4)
    assert workers(single(measured)) == 8
    assert workers(single(measured, cluster(16, free=3))) in (6, 7)
    full = single(measured, cluster(16, free=0))
    assert full.plan is None or workers(full) < 4


def test_a_plan_keeps_within_what_the_user_has_set() -> None:
    space = brain.Space(workers=brain.Range(2, 6, 2))
    assert workers(single(job("one", (2, 4), 4, space=space))) == 6
    fixed = brain.Space(workers=brain.Range(4, 4))
    assert single(job("one", (4,), 4, space=fixed)).plan is None


def followed(speeds: dict[int, float], start: int) -> list[int]:
    """The numbers of workers that a job has which follows each plan, until there is none."""
    sizes, measured = [start], []
    for _ in range(12):
        current = jobs.shape(sizes[-1])
        measured.append(brain.Sample(shape=current, throughput=speeds[sizes[-1]]))
        space = brain.Space(workers=brain.Range(1, len(speeds)))
        description = jobs.register("one", space=space).description
        advice = single(
            JobFacts("one", description, current, tuple(measured), (), 0.0, len(measured))
        )
        if advice.plan is None:
            return sizes
        sizes.append(workers(advice))
    raise AssertionError(f"no end: {sizes}")


@pytest.mark.parametrize(
    ("speeds", "start", "best"),
    [((10, 19, 27.3, 20), 1, 3), ((10, 16, 23.9, 20), 4, 3), ((10, 10, 10, 10), 4, 1)],
)
def test_a_job_finds_the_best_size_that_no_model_describes(speeds, start, best) -> None:
    sizes = followed(dict(enumerate(speeds, 1)), start)
    assert sizes[-1] == best, sizes


@pytest.mark.parametrize("total", [96, 128, 256])
def test_one_global_batch_is_measured_once_at_each_size(total) -> None:
    speeds = dict(enumerate((10, 19, 27, 34, 30, 31), 1))
    batches = Batches(least=total, most=total, pass_most=1000)
    nodes, measured = [1], []
    while len(nodes) < 12:
        speed = speeds[nodes[-1]]
        window = SpeedSample(
            nodes=nodes[-1],
            replicas=nodes[-1],
            step_seconds=total / speed,
            steps=10,
            total_batch=total,
            batches=batches,
        )
        current = shape_of(window, NodeGroup(count=1, cpu=1))  # with a rounded share of each worker
        measured.append(brain.Sample(shape=current, throughput=speed, batches=batches))
        space = brain.Space(workers=brain.Range(1, len(speeds)))
        description = jobs.register("one", space=space).description
        advice = single(
            JobFacts("one", description, current, tuple(measured), (), 0.0, len(measured))
        )
        if advice.plan is None:
            break
        nodes.append(workers(advice))
    assert nodes[-1] == 4, nodes
    assert len(nodes) < 12, nodes


def test_wrong_predictions_shorten_the_steps() -> None:
    right = PlanOutcome(effect=Effect(throughput=10, low=9, high=11), throughput=10)
    wrong = PlanOutcome(effect=Effect(throughput=10, low=9, high=11), throughput=5)
    of = job("one", (1, 2, 4), 4)
    wide, narrow = (
        single(JobFacts(of.id, of.description, of.current, of.samples, (outcome,), 0.0, 1))
        for outcome in (right, wrong)
    )
    assert workers(wide) == 16
    assert workers(narrow) == 5


def test_without_samples_nothing_is_planned() -> None:
    assert "no throughput" in single(job("one", (), 2)).reason


def test_a_first_plan_is_clamped_to_the_space_and_to_what_is_set() -> None:
    features = {"model": "bert"}
    past = Past(
        (PastJob("old", features, {"worker": NodeGroup(count=12, cpu=6, memory=5)}),), (0.0,)
    )
    description = brain.Description(
        name="new",
        features=features,
        space=brain.Space(workers=brain.Range(1, 10, 4)),
        groups={"worker": NodeGroup(count=1, cpu=2)},
    )
    assert first_plan(description, past.jobs).groups["worker"] == NodeGroup(
        count=8, cpu=2, memory=5
    )
    servers = msgspec.structs.replace(description, strategy="ps")
    assert set(first_plan(servers, past.jobs).groups) == {"worker", "ps"}


def test_parameter_servers_are_planned_too() -> None:
    def shape(w: int, p: int) -> brain.Shape:
        return jobs.shape(w, p, batch=256)

    def throughput(w: int, p: int) -> float:
        return 256 * w / (0.01 + 0.5e-3 * 256 / 4 + 0.05 * w / (p * 4) + 0.004 * w / p)

    sizes = ((1, 1), (2, 1), (2, 2), (4, 2))
    samples = tuple(brain.Sample(shape=shape(*at), throughput=throughput(*at)) for at in sizes)
    space = brain.Space(workers=brain.Range(1, 32), servers=brain.Range(1, 8))
    of = jobs.register("one", strategy="ps", space=space).description
    advice = single(JobFacts("one", of, shape(4, 2), samples, (), 0.0, 4))
    assert advice.plan is not None
    groups = advice.plan.groups
    assert 1 <= groups["worker"].count <= 8
    assert 1 <= groups["ps"].count <= 4
    divided = ClusterOptimizer().advise(
        [JobFacts("one", of, shape(4, 2), samples, (), 0.0, 4)], NO_PAST, cluster(0)
    )["one"]
    assert divided.plan is None or divided.plan.groups["worker"].count <= 8


def test_the_cluster_goes_where_it_brings_most() -> None:
    fast = job("fast", (1, 2, 4), 4, total=1e6)
    slow_samples = tuple(
        msgspec.structs.replace(sample, throughput=600.0 + index)
        for index, sample in enumerate(fast.samples)
    )
    slow = JobFacts("slow", fast.description, jobs.shape(4), slow_samples, (), 0.0, 3)
    advice = ClusterOptimizer().advise([fast, slow], NO_PAST, cluster(9))
    assert workers(advice["fast"]) == 8
    assert workers(advice["slow"]) == 1


def test_a_job_whose_samples_fit_no_model_keeps_no_other_from_its_part() -> None:
    good, bad = job("good", (1, 2, 4), 4, total=1e6), job("bad", (1, 2), 2)
    samples = tuple(msgspec.structs.replace(sample, throughput=5e-324) for sample in bad.samples)
    bad = dataclasses.replace(bad, samples=samples)
    advice = ClusterOptimizer().advise([bad, good], NO_PAST, cluster(9))
    assert workers(advice["good"]) == 8
    assert advice["bad"] == brain.Advice(
        reason="its samples fit no model: step_seconds is inf: it must be a positive number"
    )


def batching(
    variance: float, *, most: int = 1024, least: int = 128, batch: int = 64, exchange: float = 1.0
) -> JobFacts:
    """Two workers that exchange gradients for some seconds in each step."""
    found = Batches(least=least, most=most, pass_most=max(64, batch), square=1.0, variance=variance)

    def measured(share: int) -> brain.Sample:
        compute = 0.01 + 0.002 * share
        return brain.Sample(
            shape=jobs.shape(2, batch=share),
            throughput=2 * share / (compute + exchange),
            compute_seconds=compute,
            batches=found,
        )

    space = brain.Space(workers=brain.Range(2, 2))
    description = jobs.register("one", space=space).description
    samples = (measured(batch // 2), measured(batch))
    return JobFacts("one", description, jobs.shape(2, batch=batch), samples, (), 0.0, 2)


def test_noisy_gradients_get_a_larger_batch() -> None:
    advice = ClusterOptimizer().advise([batching(1e5)], NO_PAST, cluster(8))["one"]
    assert advice.plan is not None, advice.reason
    assert advice.plan.groups["worker"].count == 2
    assert advice.plan.batch == 256  # twice what was measured
    assert "2 nodes with batches of 256 samples" in advice.reason
    assert advice.plan.effect is not None
    assert advice.plan.effect.throughput > 1.2 * advice.plan.effect.before


@pytest.mark.parametrize(
    "of", [batching(1.0), batching(0.0), batching(1e5, most=128), batching(1e5, most=64, least=64)]
)
def test_the_batch_stays_without_noise_or_room(of: JobFacts) -> None:
    advice = ClusterOptimizer().advise([of], NO_PAST, cluster(8))["one"]
    assert advice.plan is None, advice.plan


def test_a_batch_that_has_become_too_large_shrinks() -> None:
    of = batching(10.0, batch=512, exchange=0.3)
    advice = ClusterOptimizer().advise([of], NO_PAST, cluster(8))["one"]
    assert advice.plan is not None, advice.reason
    assert advice.plan.batch == 512  # half of what was measured


def test_a_fixed_global_batch_is_divided_among_more_workers() -> None:
    """What a worker does beside the others gets less: the speed of more of them is no multiple."""
    one = batching(0.0, most=128)
    wide = brain.Space(workers=brain.Range(1, 4))
    of = msgspec.structs.replace(one.description, space=wide)
    advice = ClusterOptimizer().advise(
        [JobFacts("one", of, one.current, one.samples, (), 0.0, 2)], NO_PAST, cluster(8)
    )["one"]
    assert advice.plan is None or workers(advice) < 4


def test_a_job_that_runs_is_never_left_without_nodes() -> None:
    crowd = [job(f"j{n}", (1, 2), 2, total=1e6) for n in range(4)]
    advice = ClusterOptimizer().advise(crowd, NO_PAST, cluster(2))
    assert [workers(one) for one in advice.values()] == [1] * 4


def test_what_others_take_is_not_divided() -> None:
    one = job("one", (1, 2, 4), 4, total=1e6)
    where = cluster(8, free=2, by_jobs={"accelerator": 4.0})
    advice = ClusterOptimizer().advise([one], NO_PAST, where)["one"]
    assert 4 < workers(advice) <= 6


def test_priorities_count() -> None:
    low, high = (
        job(name, (1, 2, 4), 4, total=1e6, priority=p) for name, p in (("l", 0.1), ("h", 10))
    )
    advice = ClusterOptimizer().advise([low, high], NO_PAST, cluster(9))
    assert workers(advice["h"]) == 8
    assert workers(advice["l"]) == 1


def test_without_a_view_of_the_cluster_nothing_is_divided() -> None:
    advice = ClusterOptimizer().advise([job("one", (1,), 1)], NO_PAST, NOTHING)["one"]
    assert advice.plan is None
    assert "no report has named them" in advice.reason


def test_a_model_is_fitted_anew_after_each_sample() -> None:
    models = Models()
    first = job("one", (1,), 1)
    model = models.of(first)
    assert models.of(first) is model
    assert models.of(job("one", (1, 2), 1)) is not model


def test_several_passes_count_as_one_step() -> None:
    shape = jobs.shape(2, passes=3)
    known = ring_sample(brain.Sample(shape=shape, throughput=384.0, compute_seconds=0.3))
    assert known.step_seconds == pytest.approx(1.0 - 2 * 0.3)
    assert known.shape.batch == 64
    unknown = ring_sample(brain.Sample(shape=shape, throughput=384.0))
    assert (unknown.step_seconds, unknown.shape.batch) == (1.0, 192)


def test_a_range_has_multiples_of_its_unit() -> None:
    assert allowed(brain.Range(3, 9, 2)) == [4, 6, 8]


@pytest.mark.slow
def test_a_space_without_end_is_searched_in_moments() -> None:
    space = brain.Space(workers=brain.Range(1, 1_000_000), servers=brain.Range(1, 1_000_000))
    ring = job("ring", (500, 1000), 1000, space=space)
    description = jobs.register("ps", strategy="ps", space=space).description
    shapes = [jobs.shape(w, p) for w, p in ((200, 100), (400, 200))]
    samples = jobs.samples("ps", *shapes).samples
    servers = JobFacts("ps", description, shapes[1], samples, (), 0.0, 2)
    single(ring)
    advice = ClusterOptimizer().advise([ring, servers], NO_PAST, cluster(4000))
    assert set(advice) == {"ring", "ps"}
