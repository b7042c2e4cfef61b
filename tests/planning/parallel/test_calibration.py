"""Coefficients from measured steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dlrover.accelerate import (
    Cluster,
    Observation,
    Strategy,
    Transformer,
    calibrate,
    predict,
)
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.accelerators import ACCELERATORS, TERMS

MODEL = Transformer(24, 2048, 8192, 16, 16, 51200, gated=False)
CLUSTER = Cluster("a100-80", 2)
STRATEGIES = [
    Strategy(dp_replicate=dp, tp=tp, pp=pp, micro_batch=micro, recompute=recompute)
    for dp, tp, pp in ((16, 1, 1), (8, 2, 1), (4, 4, 1), (8, 1, 2), (4, 1, 4), (2, 2, 4), (2, 8, 1))
    for micro in (1, 2, 4)
    for recompute in ("none", "full")
]


def observed(strategies, factor=1.0, cluster=CLUSTER, noise=0.0):
    draw = random.Random(1)
    return [
        Observation(
            MODEL, one, 2048, 128,
            factor * draw.uniform(1 - noise, 1 + noise)
            * predict(MODEL, one, cluster, sequence=2048, global_batch=128).step_seconds,
        )
        for one in strategies
    ]  # fmt: skip


def errors(cluster, observations):
    return [
        predict(
            each.model,
            each.strategy,
            cluster,
            sequence=each.sequence,
            global_batch=each.global_batch,
        ).step_seconds
        / each.step_seconds
        - 1
        for each in observations
    ]


def test_a_slower_cluster_is_learned_from_some_steps_and_holds_for_others():
    known = ACCELERATORS["a100-80"].coefficients
    shift = tuple(weight * (1.3, 2, 0.7)[at % 3] for at, weight in enumerate(known))
    truth = replace(CLUSTER, coefficients=shift)
    seen, others = STRATEGIES[::2], STRATEGIES[1::2]
    fitted = calibrate(CLUSTER, observed(seen, cluster=truth, noise=0.02))
    assert len(fitted.coefficients) == len(TERMS)
    assert all(coefficient >= 0 for coefficient in fitted.coefficients)
    wrong = sum(map(abs, errors(CLUSTER, observed(others, cluster=truth))))
    assert sum(map(abs, errors(fitted, observed(others, cluster=truth)))) < wrong / 3


def test_one_step_moves_all_predictions_the_same_way():
    [one] = observed(STRATEGIES[:1], 1.5)
    fitted = calibrate(CLUSTER, [one])
    assert abs(errors(fitted, [one])[0]) < 0.1


def test_exact_observations_change_nothing():
    fitted = calibrate(CLUSTER, observed(STRATEGIES))
    assert max(map(abs, errors(fitted, observed(STRATEGIES)))) < 0.01
    assert 0.05 <= fitted.spread < 0.07


def test_a_coefficient_of_zero_is_learned_again():
    known = ACCELERATORS["a100-80"].coefficients
    blank = tuple(
        0.0 if term == "collective" else each for term, each in zip(TERMS, known, strict=True)
    )
    fitted = calibrate(replace(CLUSTER, coefficients=blank), observed(STRATEGIES))
    assert max(map(abs, errors(fitted, observed(STRATEGIES)))) < 0.01


def test_tuples_and_mappings_are_observations():
    seen = observed(STRATEGIES[:3], 1.2)
    fitted = calibrate(CLUSTER, seen)
    assert calibrate(CLUSTER, [tuple(each) for each in seen]) == fitted
    assert calibrate(CLUSTER, [each._asdict() for each in seen]) == fitted


def test_an_outlier_counts_little():
    seen = observed(STRATEGIES)
    seen[3] = seen[3]._replace(step_seconds=20 * seen[3].step_seconds)
    fitted = calibrate(CLUSTER, seen)
    off = sorted(map(abs, errors(fitted, observed(STRATEGIES))))
    assert off[len(off) // 2] < 0.05


def predicted(cluster, one):
    return predict(MODEL, one, cluster, sequence=2048, global_batch=128).step_seconds


def test_what_most_runs_of_a_kind_take_longer_holds_for_this_kind_alone():
    larger = replace(CLUSTER, nodes=4)
    doubled = [replace(one, dp_replicate=2 * one.dp_replicate) for one in STRATEGIES]
    seen = observed(STRATEGIES) + observed(doubled, cluster=larger)
    # pipelines are late on four nodes, and not on two: no term knows such a time
    seen = [
        each._replace(step_seconds=5 * each.step_seconds)
        if each.strategy in doubled and each.strategy.pp > 1
        else each
        for each in seen
    ]
    fitted = calibrate(CLUSTER, seen)
    for one in STRATEGIES:
        assert predicted(fitted, one) == pytest.approx(predicted(CLUSTER, one), rel=0.1)
    one_node = [replace(one, dp_replicate=4) for one in STRATEGIES if one.tp == 2 and one.pp == 1]
    again = calibrate(fitted, observed(one_node, cluster=replace(CLUSTER, nodes=1)))
    for known in (fitted, again):
        on_four = replace(known, nodes=4)
        for one in doubled:
            late = 5 if one.pp > 1 else 1
            assert predicted(on_four, one) == pytest.approx(late * predicted(larger, one), rel=0.15)


def test_a_kind_that_is_measured_again_has_its_new_residual():
    late = calibrate(CLUSTER, observed(STRATEGIES, 3.0))
    kinds = [each[:3] for each in calibrate(CLUSTER, observed(STRATEGIES)).residuals]
    wrong = tuple((*kind, 7.0) for kind in kinds)
    again = calibrate(replace(late, residuals=wrong), observed(STRATEGIES, 3.0))
    assert [each[:3] for each in again.residuals] == kinds
    assert all(each.factor < 2 for each in again.residuals)


def test_residuals_are_those_of_the_ranks_and_the_ways_to_communicate():
    [one] = [each for each in STRATEGIES if each.pp == 4 and each.tp == 2][:1]
    slow = replace(CLUSTER, residuals=((16, False, True, 3.0),))
    assert predicted(slow, one) == pytest.approx(3 * predicted(CLUSTER, one))
    for other, cluster in (
        (replace(one, tp=8, pp=1), slow),
        (replace(one, dp_replicate=4), replace(slow, nodes=4)),
        (replace(one, tp=16, dp_replicate=1, pp=2), replace(slow, nodes=4)),
    ):
        alone = replace(cluster, residuals=())
        assert predicted(cluster, other) == predicted(alone, other)


def test_one_late_run_of_a_kind_moves_its_kind_by_little():
    seen = observed(STRATEGIES)
    seen[3] = seen[3]._replace(step_seconds=20 * seen[3].step_seconds)
    assert all(0.95 < each.factor < 1.05 for each in calibrate(CLUSTER, seen).residuals)


@pytest.mark.parametrize(
    ("observations", "sentence"),
    [
        ([], "there are no observations"),
        ([(MODEL, Strategy())], "has not the fields model, strategy, sequence"),
        ([(MODEL, Strategy(), 128, 16, 0.0)], "step_seconds is 0.0"),
        (
            [(MODEL, Strategy(), 128, 16, float("inf"))],
            "step_seconds is inf, not a positive number",
        ),
        ([(MODEL, Strategy(), 128, 16, "5")], "step_seconds is '5', not a positive number"),
        ([(None, Strategy(), 128, 16, 1.0)], "model is None, not a Transformer"),
        ([(MODEL, 4, 128, 16, 1.0)], "strategy is 4, not a Strategy"),
    ],
)
def test_wrong_observations_are_refused(observations, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        calibrate(CLUSTER, observations)
