"""What the planner says to what was measured."""

import asyncio
import math

import pytest

pytest.importorskip("scipy")

from dlrover.master.machine.scaling.autoscale import Question
from dlrover.master.machine.scaling.planner import decide
from dlrover.master.scaling.autoscale import AutoScaler
from dlrover.planning.throughput import TrustRegion
from dlrover.spec.measurements import SpeedSample
from dlrover.spec.plan import ScaleKind
from tests.support.drivers import JobDriver


def sample(nodes: int, step: float, *, per_node: int = 1, total: int = 0) -> SpeedSample:
    return SpeedSample(
        nodes=nodes, replicas=nodes * per_node, step_seconds=step, steps=20, total_batch=total
    )


def ask(
    *samples: SpeedSample, most: int = 8, explore: bool = True, cost: float = 0.5, unit: int = 1
):
    """With the last sample as the running world."""
    sizes = [nodes for nodes in range(1, most + 1) if nodes % unit == 0]
    return decide(Question(samples[-1], samples, sizes, TrustRegion(), cost, explore))


def test_after_one_node_two_are_tried_although_nobody_knows():
    found = ask(sample(1, 0.1))
    assert (found.kind, found.nodes) == (ScaleKind.MEASURE, 2)
    assert found.plan.reason.startswith("1 -> 2 nodes: to be measured")
    assert found.plan.effect.low < found.plan.effect.throughput < found.plan.effect.high


def test_once_the_size_is_found_nothing_is_tried_to_learn():
    assert ask(sample(1, 0.1), explore=False) is None


def test_two_good_sizes_lead_to_a_larger_one():
    found = ask(sample(1, 0.1), sample(2, 0.105))
    assert found.kind is ScaleKind.GROW
    assert found.nodes == 4
    assert found.plan.reason.startswith("2 -> 4 nodes: +")


def test_no_plan_goes_beyond_the_region():
    assert ask(sample(1, 0.1), sample(2, 0.1), most=64).nodes <= 4


def test_a_measured_size_that_is_better_is_taken_again():
    found = ask(sample(2, 0.1), sample(8, 0.8))
    assert (found.kind, found.nodes) == (ScaleKind.SHRINK, 2)
    assert "as it was measured before" in found.plan.reason
    assert found.plan.effect.throughput == pytest.approx(20)


def test_a_size_that_did_not_pay_is_not_tried_again():
    samples = [sample(nodes, 0.1 * nodes) for nodes in (2, 3, 4)]
    found = ask(*samples, sample(1, 0.1), most=4)
    assert found is None


def test_between_a_size_and_a_far_larger_one_that_does_not_pay_the_middle_is_tried():
    found = ask(sample(1, 0.1), sample(8, 0.4), sample(2, 0.1), sample(2, 0.1))
    assert found.nodes in (3, 4, 5)


def test_units_are_kept():
    found = ask(sample(2, 0.1), sample(4, 0.1), unit=2)
    assert found.nodes == 8


def test_with_a_cost_of_one_only_free_speed_is_bought():
    assert ask(sample(1, 0.1), sample(2, 0.115), cost=1.0).nodes == 1


def test_a_fixed_batch_is_divided_among_the_workers():
    """Twice the nodes halve each worker's batch, and its time with it."""
    found = ask(sample(1, 0.8, total=64), sample(2, 0.41, total=64))
    assert found.nodes == 4
    assert found.plan.effect.throughput == pytest.approx(64 / 0.21, rel=0.3)


def test_nodes_with_several_workers():
    found = ask(sample(1, 0.1, per_node=4), sample(2, 0.11, per_node=4))
    assert found.nodes == 4
    assert found.plan.effect.cost == 16


def test_a_planner_that_fails_does_not_end_the_auto_scaler(caplog):
    """It measures and asks again later, and says so once in the log."""
    endless = sample(1, math.inf)
    question = Question(endless, (endless,), [1, 2], TrustRegion(), 0.5, True)
    scaler = AutoScaler(JobDriver.running(1).machine, lambda _event: None)
    assert asyncio.run(scaler._decide(question)) is None
    assert "The planner failed: the job keeps its size" in caplog.text
