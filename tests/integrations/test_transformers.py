"""The Trainer of Transformers with `FlashCallback`: dropout, shuffled data, accumulated gradients."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers"
    ),
]  # fmt: skip

LAST = 10


def test_a_killed_rank_continues_from_memory(training, undisturbed):
    training.run("trainer.py", 6, LAST)
    assert training.loaded == (6, "memory")
    losses = training.losses
    assert len(losses) == LAST * 2 * 2, "two ranks, two batches in a step"
    assert losses == undisturbed.run("trainer.py", -1, LAST).losses


def test_a_stopped_training_continues_from_storage(training):
    assert len(training.run("trainer.py", -1, 5, ranks=1).losses) == 5 * 2
    training.end_saver()
    first = training.losses
    losses = training.run("trainer.py", -1, LAST, ranks=1).losses
    assert training.loaded == (5, "storage")
    assert sorted(first | losses) == [(number, 0) for number in range(2 * LAST)]
    assert not first.keys() & losses.keys()
    assert {path.name for path in training.flash.glob("step-*")} == {"step-5", "step-8", "step-10"}
    training.end_saver()
    error = training.run("trainer.py", -1, LAST, "forgetful", ranks=1, fails=True).output
    assert "holds step 10, but the Trainer begins at step 0" in error


def test_the_last_step_of_a_training_that_is_stopped_early_is_stored(training):
    training.run("trainer.py", -1, LAST, "early")
    assert {path.name for path in training.flash.glob("step-*")} == {"step-8"}
