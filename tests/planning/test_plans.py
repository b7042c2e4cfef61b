"""The next size of a job: near what was measured, worth its price, with its reason and effect."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError
from dlrover.planning import search as searching
from dlrover.planning.allreduce import RingSample, RingShape, fit_ring
from dlrover.planning.parameter_server import ServerSample, ServerShape, fit_servers
from dlrover.planning.plans import (
    RingSpace,
    ServerSpace,
    Terms,
    plan_ring,
    plan_servers,
    sample_ring,
    sample_servers,
)
from dlrover.planning.search import Preferences, best, pareto
from dlrover.planning.throughput import TrustRegion
from dlrover.spec.plan import PlanOutcome

BATCH = 256


def server_throughput(shape):
    seconds = (
        0.01
        + 0.5e-3 * shape.batch / shape.worker_cpu
        + 0.05 * shape.workers / (shape.servers * shape.server_cpu)
        + 0.004 * shape.workers / shape.servers
    )
    return shape.batch * shape.workers / seconds


def servers(*sizes):
    return [ServerShape(*size, BATCH) for size in sizes]


def server_model(*sizes):
    return fit_servers([ServerSample(s, server_throughput(s)) for s in servers(*sizes)])


SPACE = ServerSpace(range(1, 61), range(1, 16), (2, 4, 8, 16), (2, 4, 8, 16))
TRIED = ((1, 1, 4, 4), (2, 1, 4, 4), (2, 2, 8, 4), (2, 2, 4, 8), (1, 1, 8, 8), (1, 2, 2, 8))


def test_a_plan_goes_no_further_than_the_trust_region():
    current = servers((2, 2, 8, 4))[0]
    plan = plan_servers(server_model(*TRIED), SPACE, current, Terms(choice=Preferences(weight=0.0)))
    assert plan is not None
    worker, server = plan.groups["worker"], plan.groups["ps"]
    assert 2 < worker.count <= 4
    assert server.count <= 4
    assert worker.cpu <= 16


def test_a_plan_is_near_one_measurement_and_not_a_bit_of_several():
    tried = ((1, 8, 4, 4), (8, 1, 4, 4))
    plan = plan_servers(
        server_model(*tried),
        SPACE,
        servers(tried[1])[0],
        Terms(choice=Preferences(0.0, caution=0.0)),
    )
    assert plan is not None
    worker, server = plan.groups["worker"], plan.groups["ps"]
    shape = ServerShape(worker.count, server.count, worker.cpu, server.cpu, BATCH)
    assert TrustRegion().contains(shape, servers(*tried))


def test_a_plan_that_gains_too_little_is_not_made():
    current, model = servers((2, 2, 8, 4))[0], server_model(*TRIED)
    assert plan_servers(model, SPACE, current) is not None
    assert plan_servers(model, SPACE, current, Terms(choice=Preferences(gain=2.0))) is None


def test_a_plan_says_why_and_what_it_will_bring():
    current = servers((2, 2, 8, 4))[0]
    plan = plan_servers(server_model(*TRIED), SPACE, current)
    assert plan is not None
    assert plan.effect is not None
    assert " workers" in plan.reason
    assert "% throughput for" in plan.reason
    worker, server = plan.groups["worker"], plan.groups["ps"]
    truth = server_throughput(
        ServerShape(worker.count, server.count, worker.cpu, server.cpu, BATCH)
    )
    outcome = PlanOutcome(effect=plan.effect, throughput=truth)
    assert outcome.within
    assert outcome.throughput > plan.effect.before
    assert abs(outcome.error) < 0.05
    assert plan.effect.before == pytest.approx(server_throughput(current), rel=0.05)


def test_what_the_user_has_set_stays():
    space = ServerSpace([2], range(1, 16), [8], (2, 4, 8, 16))
    plan = plan_servers(
        server_model(*TRIED), space, servers((2, 2, 8, 4))[0], Terms(choice=Preferences(0.0))
    )
    assert plan is None or (plan.groups["worker"].count, plan.groups["worker"].cpu) == (2, 8)


@pytest.mark.slow
def test_growing_step_by_step_reaches_the_best_size_and_stays_there():
    terms = Terms(choice=Preferences(weight=0.7))
    current, model = servers((1, 1, 4, 4))[0], server_model((1, 1, 4, 4))
    for _ in range(20):
        plan = plan_servers(model, SPACE, current, terms)
        if plan is None and len(model.samples) < 8:
            plan = sample_servers(model, SPACE, current, terms)
        if plan is None:
            break
        worker, server = plan.groups["worker"], plan.groups["ps"]
        current = ServerShape(worker.count, server.count, worker.cpu, server.cpu, BATCH)
        model = model.refit(ServerSample(current, server_throughput(current)))
    else:
        pytest.fail("the plans never settle")

    def worth(shape):
        cores = shape.workers * shape.worker_cpu + shape.servers * shape.server_cpu
        return server_throughput(shape) / cores**terms.choice.weight

    shapes = [
        ServerShape(w, p, cw, cp, BATCH)
        for w in SPACE.workers
        for p in SPACE.servers
        for cw in SPACE.worker_cpu
        for cp in SPACE.server_cpu
    ]
    assert worth(current) > 0.85 * max(worth(shape) for shape in shapes)


def test_a_sample_is_asked_for_until_the_model_knows_what_is_near():
    current = servers((2, 1, 4, 4))[0]
    model = server_model((1, 1, 4, 4), (2, 1, 4, 4))
    plan = sample_servers(model, SPACE, current)
    assert plan is not None
    assert plan.reason.endswith("because the samples so far do not show what it gains")
    for _ in range(30):
        plan = sample_servers(model, ServerSpace([1, 2], [1, 2], [4, 8], [4, 8]), current)
        if plan is None:
            break
        worker, server = plan.groups["worker"], plan.groups["ps"]
        shape = ServerShape(worker.count, server.count, worker.cpu, server.cpu, BATCH)
        model = model.refit(ServerSample(shape, server_throughput(shape)))
    assert plan is None
    assert len(model.samples) <= 8


def test_a_space_far_from_what_was_measured_has_no_plan():
    model, current = server_model(*TRIED), servers((2, 2, 8, 4))[0]
    far = ServerSpace([50], [15], [16], [16])
    assert plan_servers(model, far, current) is None
    assert sample_servers(model, far, current) is None
    ring = RingSpace([16], 4)
    assert plan_ring(ring_model(), ring, RingShape(2, 8, 32)) is None
    assert sample_ring(ring_model(), ring, RingShape(2, 8, 32)) is None


def test_servers_that_do_not_pay_are_given_back():
    wasteful = (4, 12, 16, 16)
    model = server_model(*TRIED, (4, 6, 8, 8), wasteful)
    plan = plan_servers(model, SPACE, servers(wasteful)[0], Terms(choice=Preferences(weight=1.0)))
    assert plan is not None
    assert plan.groups["ps"].count < 12
    assert plan.effect is not None
    assert "cost" in plan.reason


def ring_model():
    def step(n, k):
        return 0.2 + (0.02 if n > 1 else 0.0) + 0.001 * k

    sizes = [(1, 1), (1, 2), (1, 4), (2, 8)]
    return fit_ring([RingSample(RingShape(n, k, 32), step(n, k), 0.2) for n, k in sizes])


def test_an_all_reduce_job_that_scales_well_grows_in_whole_nodes():
    plan = plan_ring(ring_model(), RingSpace(range(1, 17), 4), RingShape(2, 8, 32))
    assert plan is not None
    assert plan.groups["worker"].count == 4
    assert plan.groups["worker"].accelerators == 4
    assert plan.reason.startswith("2 -> 4 nodes, 8 -> 16 replicas:")


def test_several_nodes_are_measured_before_they_are_relied_on():
    model = fit_ring(
        [RingSample(RingShape(1, k, 32), 0.2 + 0.01 * (k > 1), 0.2) for k in (1, 2, 4)]
    )
    plan = sample_ring(model, RingSpace(range(1, 17), 4), RingShape(1, 4, 32))
    assert plan is not None
    assert plan.groups["worker"].count == 2
    assert "because the samples so far do not show" in plan.reason
    assert sample_ring(ring_model(), RingSpace([1], 4), RingShape(1, 4, 32)) is None


def test_a_job_at_its_largest_size_stays():
    assert plan_ring(ring_model(), RingSpace(range(1, 3), 4), RingShape(2, 8, 32)) is None


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=40))
def test_nothing_beats_the_front_and_the_front_beats_the_rest(points):
    throughput, cost = (np.array(values) for values in zip(*points, strict=True))
    front = list(pareto(throughput, cost))
    for index in range(len(points)):
        beaten = [
            i
            for i in front
            if throughput[i] >= throughput[index]
            and cost[i] <= cost[index]
            and (throughput[i], cost[i]) != (throughput[index], cost[index])
        ]
        equal = any((throughput[i], cost[i]) == (throughput[index], cost[index]) for i in front)
        assert equal != bool(beaten)


def test_the_weight_of_the_price():
    throughput, cost = np.array([10.0, 20.0, 18.0, 20.0]), np.array([1.0, 9.0, 2.0, 8.0])
    assert [best(throughput, cost, Preferences(weight=w)) for w in (0.0, 0.5, 1.0)] == [3, 2, 0]
    with pytest.raises(ConfigurationError, match="weight is 2"):
        Preferences(weight=2.0)


def test_a_space_too_large_to_rate_in_full_is_thinned(monkeypatch):
    current, wish = servers((4, 2, 8, 8))[0], Terms(region=TrustRegion(factor=4.0))
    space = ServerSpace(range(1, 61), range(1, 16), range(1, 33), range(1, 33))
    exact = plan_servers(server_model(*TRIED), space, current, wish)
    monkeypatch.setattr(searching, "EXACT", 10_000)
    rows = searching.candidates([range(1, 1001), range(1, 16), (8,)])
    assert len(rows) <= 10_000
    assert rows.max(axis=0).tolist() == [1000, 15, 8]
    assert rows.min(axis=0).tolist() == [1, 1, 8]
    thinned = plan_servers(server_model(*TRIED), space, current, wish)
    worth = [plan.effect.throughput / plan.effect.cost**0.5 for plan in (thinned, exact)]
    assert worth[0] > 0.97 * worth[1]
