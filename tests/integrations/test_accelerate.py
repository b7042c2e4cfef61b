"""Accelerate with `FlashAccelerator`: dropout, shuffled data, a registered object."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate"),
]  # fmt: skip

LAST = 10


def test_a_killed_rank_continues_from_memory_in_the_middle_of_an_epoch(training, undisturbed):
    training.run("acc.py", 6, LAST, 4, 1)
    assert training.loaded == (6, "memory")
    losses = training.losses
    assert len(losses) == LAST * 2
    assert losses == undisturbed.run("acc.py", -1, LAST, LAST, 1).losses


def test_storage_brings_back_the_seeds(training):
    before = training.run("acc.py", -1, 6, 3, 1, ranks=1).losses
    training.end_saver()
    (training.flash / "step-6").rename(training.flash / "away")
    after = training.run("acc.py", -1, LAST, LAST, 2, ranks=1).losses
    assert training.loaded == (3, "storage")
    assert {key: after[key] for key in before.keys() & after.keys()} == {
        (step, 0): before[step, 0] for step in (3, 4, 5)
    }


def test_a_training_continues_before_the_gradients_that_it_has_lost(training, undisturbed):
    losses = training.run("acc.py", 7, LAST, 5, 1, "accumulated").losses
    assert training.loaded == (6, "memory")
    assert losses == undisturbed.run("acc.py", -1, LAST, LAST, 1, "accumulated").losses
    assert {path.name for path in training.flash.glob("step-*")} == {"step-6", "step-10"}, "not 5"


@pytest.mark.parametrize("skipped", ["rest", "whole"])
def test_each_epoch_has_its_own_order_if_the_program_does_not_set_it(
    training, undisturbed, skipped: str
):
    losses = {}
    for last in (3, 8, 18):  # within an epoch, at its end
        losses |= training.run("acc.py", -1, last, 1, 1, "uncounted", skipped, ranks=1).losses
    assert losses == undisturbed.run("acc.py", -1, 18, 1, 1, "uncounted", ranks=1).losses


def test_what_cannot_be_restored_is_named(training):
    output = training.run("acc.py", -1, 1, 1, 1, "unseeded", "hooked", ranks=1).output
    assert "use_seedable_sampler=True" in output
    assert "register_save_state_pre_hook are not called" in output
