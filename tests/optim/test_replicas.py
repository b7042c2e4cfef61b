"""Local SGD on four real ranks, in one launch: `scripts/replicas.py` trains, the tests look at what it found."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.directories import Directory

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).parent / "scripts" / "replicas.py"
RANKS = 4


@pytest.fixture(scope="module")
def found(forks, tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found."""
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("replicas")
    directory = Directory(out / "checkpoints")
    env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_")}
    try:
        forks.ranks(RANKS, SCRIPT, out, env=env | {"OMP_NUM_THREADS": "1"})
    finally:
        directory.kill_savers()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(RANKS)]


def case(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [each[name] for each in found]


@pytest.mark.parametrize("penalty", ["off", "equal weights"])
def test_with_a_sync_in_each_step_it_is_synchronous_training(found, penalty) -> None:
    for one in case(found, "every_step_is_synchronous_training"):
        replica, alone = one[penalty]
        assert replica == pytest.approx(alone, rel=1e-12, abs=1e-14)


def test_a_warm_up_is_synchronous_training(found) -> None:
    for replica, alone, syncs in case(found, "a_warm_up_is_synchronous_training"):
        assert replica == pytest.approx(alone, rel=1e-9, abs=1e-12)
        assert syncs == 0


def test_in_a_warm_up_replicas_may_use_other_parameters_and_overflow(found) -> None:
    first, *others = case(found, "a_warm_up_with_unused_parameters_and_overflows")
    for other in others:  # the fourth step is one of each replica's own
        assert other["places"][:3] == first["places"][:3]
        assert other["places"][4] == first["places"][4]
    # the mean of the gradients 1 to 4 but that of the replica that does not use the parameter; no step by the second
    assert first["places"][0] == [-2.25, -2.0, -1.75, 0.0]
    assert first["places"][1] == first["places"][0]
    assert first["places"][2] == [-4.5, -4.0, -3.5, 0.0]
    assert (first["syncs"], first["unused"]) == (1, True)


def test_four_replicas_are_what_one_process_simulates(found) -> None:
    for replica, simulated in case(found, "several_replicas_are_simulated"):
        assert replica == pytest.approx(simulated, rel=1e-12, abs=1e-14)


def test_eight_bits_come_to_the_same_and_to_all_replicas(found) -> None:
    first, *others = case(found, "eight_bits")
    assert all(other == first for other in others)
    small = [index for index in range(3000) if index % 100]
    size = sum(abs(first["32"][index]) for index in small)
    error = {
        name: sum(abs(first["32"][index] - first[name][index]) for index in small) / size
        for name in first
    }
    assert error["8"] < 0.1
    assert error["8 without feedback"] == 1.0  # all of it is below half a unit in each step


def test_what_eight_bits_cut_off_is_not_added_to_other_parts(found) -> None:
    """That of a part of the size 1000 would be 1e4 times the change of one of the size 1e-4."""
    _, *errors = case(found, "eight_bits_of_other_parts")
    assert max(errors[:2]) < 0.05


@pytest.mark.parametrize("factor", ["nan", "inf", "1000"])
def test_a_replica_that_goes_wrong_is_left_out_and_counts_again(found, factor) -> None:
    first, *others = (each[f"EDiT {factor}"] for each in case(found, "one_replica_goes_wrong"))
    assert all(other == first for other in others)  # nothing of it has reached any of them
    usual = found[0]["one_replica_goes_wrong"]["EDiT 1"]["losses"]
    assert max(first["losses"]) < 1.1 * max(usual)
    out = [index for index, reasons in enumerate(first["reasons"]) if any(reasons)]
    assert out == [6]  # of the steps 30 to 34
    weights = first["weights"]
    assert weights[6][2] == 0
    assert math.fsum(weights[6]) == pytest.approx(1.0)
    assert min(weights[7]) > 0.2


def test_without_a_penalty_what_is_not_finite_is_left_out_and_what_is_large_is_not(found) -> None:
    cases = found[0]["one_replica_goes_wrong"]
    for factor in ("nan", "inf"):
        assert cases[f"DiLoCo {factor}"]["weights"][6] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
        assert max(cases[f"DiLoCo {factor}"]["losses"]) < 1.1 * max(cases["DiLoCo 1"]["losses"])
    assert max(cases["DiLoCo 1000"]["losses"]) > 1e6


def test_if_all_go_wrong_all_return_to_the_last_sync(found) -> None:
    for one in case(found, "all_replicas_go_wrong"):
        before, after, later = one["parameters"]
        assert after == before
        assert one["momentum"][0] == one["momentum"][1] != one["momentum"][2]
        assert all(map(math.isfinite, later))
        assert later != before


def test_replicas_come_and_go(found) -> None:
    ranks = [{sync: rest for sync, *rest in each} for each in case(found, "replicas_come_and_go")]
    assert [sorted(each) for each in ranks] == [[*range(1, 10)], [1, 2, 3, 4, 5], [*range(4, 10)], [*range(4, 10)]]  # fmt: skip
    for sync in range(1, 10):
        reports = [each[sync] for each in ranks if sync in each]
        assert all(report == reports[0] for report in reports)
    weights = {sync: rest[1] for sync, rest in ranks[0].items()}
    assert [len(weights[sync]) for sync in range(1, 10)] == [2, 2, 4, 4, 4, 3, 3, 3, 3]
    assert weights[3][2:] == [0, 0]  # they join
    assert min(weights[4]) > 0.2


def test_replicas_with_fragments_end_with_equal_parameters(found) -> None:
    befores, ends = zip(*case(found, "fragments_end_together"), strict=True)
    assert befores[0] != befores[1]
    assert all(end == ends[0] for end in ends)


def test_a_replica_five_times_as_slow_makes_fewer_steps_and_stops_nobody(found) -> None:
    ranks = case(found, "a_slow_replica_and_its_own_clock")
    assert [each["steps"] for each in ranks] == [51, 51, 51, 11]
    assert all(each["total"] == 164 and len(each["syncs"]) == 5 for each in ranks)
    assert all(each["end"] == ranks[0]["end"] for each in ranks)


@pytest.mark.parametrize("inner", ["AdamW", "AGD"])
def test_sharded_replicas_are_what_whole_ones_are(found, inner) -> None:
    for each in case(found, "two_sharded_replicas"):
        (sharded, its_weights), (whole, weights) = each[inner]
        assert sharded == pytest.approx(whole, rel=1e-12, abs=1e-14)
        assert [*map(pytest.approx, weights)] == its_weights
        assert len(weights) == 6


def test_the_ranks_of_a_replica_decide_and_begin_anew_together(found) -> None:
    ranks = case(found, "clocks_of_one_replica_differ")
    assert all(each["syncs"] == ranks[0]["syncs"] for each in ranks)
    steps = [step for step, _ in ranks[0]["syncs"]]
    assert steps == [*range(4, 40, 4)], "every 4 steps, by the fast clock, from the first step on"
    assert [weights for step, weights in ranks[0]["syncs"] if 20 <= step < 24] == [[1, 0]]
    assert all(map(math.isfinite, ranks[0]["end"]))
    assert ranks[2]["own steps"] == ranks[3]["own steps"]
    assert min(ranks[2]["own steps"]) < 40 == min(ranks[0]["own steps"])


@pytest.mark.parametrize("kind", ["WSAM", "adaptive", "GroupAdam"])
def test_norms_are_those_over_all_shards(found, kind) -> None:
    for each in case(found, "sharded_parameters"):
        whole, rows, columns = each[kind]
        assert rows == pytest.approx(whole, rel=1e-9, abs=1e-12)
        assert columns == pytest.approx(whole, rel=1e-9, abs=1e-12)


def test_a_sharded_training_continues_from_its_state_dict(found) -> None:
    for each in case(found, "states_of_sharded_replicas"):
        assert each["dcp"] == each["end"]
        assert each["flash"] == each["end"]
        assert each["source"] == "memory"
        assert each["syncs"] == [4, 4]
        assert each["keys"] == [
            "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale",
            "local_sgd.outer.momentum_buffer", "local_sgd.progress", "local_sgd.shared", "step",
        ]  # fmt: skip


def test_when_a_replica_dies_the_next_step_tries_again_without_it(found) -> None:
    ranks = case(found[:3], "a_replica_dies")
    for each in ranks:
        assert each["errors"] == 1
        assert each["message"] == "Sync 2 failed, and the parameters are those before it"
        assert each["syncs"] == 2
        assert each["end"] == ranks[0]["end"]
        assert each["end"][0] == 5  # after the steps 4, 8, 13, 17 and 21
        assert len(each["end"][2]) == 3
