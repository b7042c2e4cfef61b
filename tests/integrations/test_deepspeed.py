"""DeepSpeed with `FlashCheckpointEngine`, in each of its stages."""

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]  # fmt: skip

LAST = 9


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_killed_rank_continues_from_memory(training, undisturbed, stage):
    training.run("zero.py", 5, LAST, stage, 4)
    assert training.loaded == (5, "memory")
    losses = training.losses
    assert len(losses) == LAST * 2
    assert losses == undisturbed.run("zero.py", -1, LAST, stage, LAST).losses
    weights = torch.load(training.directory / "weights" / "pytorch_model.bin")
    assert {*weights} == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_without_its_memory_the_newest_stored_tag_is_the_latest(training):
    before = training.run("zero.py", -1, 6, 2, 4).losses
    latest = training.directory / "out" / "latest"
    assert latest.read_text() == "global_step6"
    training.end_saver()
    after = training.run("zero.py", -1, LAST, 2, 1).losses
    assert training.loaded == (4, "storage")
    assert {key for key in before.keys() & after.keys() if before[key] == after[key]} == {
        (step, rank) for step in (4, 5) for rank in (0, 1)
    }
    assert latest.read_text() == f"global_step{LAST}"
    assert len([*(training.directory / "out").glob("global_step*")]) == 1, "old marks are removed"


def test_a_tag_that_is_not_the_latest_can_be_continued_if_it_is_the_newest(training):
    training.run("zero.py", -1, 3, 2, 1, "best")
    losses = training.run("zero.py", -1, 5, 2, 1).losses
    assert {step for step, _ in losses} == {3, 4}


def test_a_checkpoint_of_deepspeed_itself_can_be_continued(training):
    training.run("zero.py", -1, 3, 2, 1, "plain")
    losses = training.run("zero.py", -1, 5, 2, 1).losses
    assert {step for step, _ in losses} == {3, 4}
    losses = training.run("zero.py", -1, 6, 2, 1).losses
    assert {step for step, _ in losses} == {5}, (
        "save_16bit_model has left the newest step as it was"
    )
