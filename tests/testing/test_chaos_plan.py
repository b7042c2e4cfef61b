"""Which fault comes when, and whom it strikes."""

from __future__ import annotations

import pytest

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.testing.chaos import verbs
from dlrover.testing.chaos.targets import choose
from dlrover.testing.chaos.verbs import (
    DEFAULT,
    VERBS,
    VerbSettings,
    at_random,
    in_order,
    newest_step,
)

KINDS = ["kill-rank", "kill-node", "kill-master"]


def test_faults_in_order_wait_for_nothing_but_the_training() -> None:
    plan = in_order(KINDS, seed=1)
    assert [planned.verb for planned in plan] == KINDS
    assert {planned.at for planned in plan} == {0.0}


def test_random_faults_come_at_equal_distances() -> None:
    plan = at_random(KINDS, every=20, duration=1800, seed=7)
    assert [planned.at for planned in plan] == [20.0 * n for n in range(1, 91)]
    assert {planned.verb for planned in plan} == set(KINDS)


def test_an_equal_seed_gives_an_equal_plan_and_another_one_another() -> None:
    plans = [at_random(KINDS, 5, 100, seed) for seed in (3, 3, 4)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


@pytest.mark.parametrize(("draw", "chosen"), [(0.0, "a"), (0.34, "b"), (0.99, "c"), (1.0, "c")])
def test_a_draw_falls_on_one_of_the_candidates(draw: float, chosen: str) -> None:
    assert choose(draw, "abc") == chosen


def test_without_candidates_nobody_is_struck() -> None:
    with pytest.raises(InfrastructureError, match="no process"):
        choose(0.5, [])


def test_the_default_faults_need_nothing() -> None:
    for name in DEFAULT:
        VERBS[name](VerbSettings()).check()


@pytest.mark.parametrize("name", ["corrupt-checkpoint", "fill-disk"])
def test_faults_of_checkpoints_need_a_directory(name: str) -> None:
    with pytest.raises(ConfigurationError, match="--checkpoint-dir"):
        VERBS[name](VerbSettings()).check()


def test_a_large_file_system_is_not_filled(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(verbs, "LARGEST", 1)
    with pytest.raises(ConfigurationError, match="at most"):
        VERBS["fill-disk"](VerbSettings(checkpoint_dir=tmp_path)).check()
    monkeypatch.setattr(verbs, "LARGEST", 1 << 60)
    VERBS["fill-disk"](VerbSettings(checkpoint_dir=tmp_path)).check()


def test_a_directory_that_is_not_there_is_not_filled(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        verbs.check_small(tmp_path / "none")


def test_the_newest_step_is_the_one_with_the_largest_number(tmp_path) -> None:
    for name in ("step-9", "step-10", "step-11.bad", ".step-12.x", "latest"):
        (tmp_path / name).mkdir()
    assert newest_step(tmp_path).name == "step-10"


def test_without_two_steps_no_step_is_corrupted(tmp_path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(InfrastructureError, match="two steps"):
        newest_step(tmp_path)
