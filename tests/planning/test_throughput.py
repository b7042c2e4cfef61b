"""How far a plan may go, and how it is compared with what happened."""

import pytest

from dlrover.errors import ConfigurationError
from dlrover.planning.allreduce import RingShape
from dlrover.planning.throughput import SpeedPrediction, TrustRegion
from dlrover.spec.plan import PlanOutcome


def test_a_shape_is_near_when_all_its_axes_are():
    region, measured = TrustRegion(2.0), [RingShape(1, 4, 32), RingShape(2, 8, 32)]
    assert region.contains(RingShape(4, 16, 32), measured)
    assert region.contains(RingShape(1, 2, 32), measured)
    assert not region.contains(RingShape(5, 20, 32), measured)
    assert not region.contains(RingShape(4, 16, 128), measured)
    assert not region.contains(RingShape(1, 1, 32), [])


def test_one_more_is_always_near():
    assert TrustRegion(1.25).contains(RingShape(2, 2, 8), [RingShape(1, 1, 8)])


def test_right_predictions_widen_the_region_and_wrong_ones_narrow_it():
    region = TrustRegion()
    assert region.after(within=True).factor == 4.0
    assert region.after(within=True).after(within=True).factor == 4.0
    narrow = region.after(within=False)
    assert narrow.factor == pytest.approx(2**0.5)
    assert narrow.after(within=False).after(within=False).factor == 1.25


@pytest.mark.parametrize(("factor", "least"), [(1.1, 1.25), (5.0, 1.25), (2.0, 1.0)])
def test_a_region_without_bounds_is_refused(factor, least):
    with pytest.raises(ConfigurationError, match=f"factor is {factor}"):
        TrustRegion(factor, least)


def test_the_outcome_of_a_plan():
    effect = SpeedPrediction(100.0, 80.0, 125.0, 0.9, 0.1).effect(before=90.0, cost=3.0)
    good, bad = (PlanOutcome(effect=effect, throughput=t) for t in (110.0, 70.0))
    assert good.error == pytest.approx(0.1)
    assert good.within
    assert bad.error == pytest.approx(-0.3)
    assert not bad.within
