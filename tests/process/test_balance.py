"""A slow rank takes a smaller share of the global batch; the parameters do not show it."""

from __future__ import annotations

import json
from statistics import median

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]

RANKS, SIZE, SAMPLES = 3, 42, 42 * 20 - 5


@pytest.mark.parametrize("readers", [0, 1])
def test_steps_get_shorter_and_every_sample_is_learned_from_once(run, readers) -> None:
    """With a process that reads, the ranks' loaders are ahead when the shares change."""
    out = run.directory / "out"
    out.mkdir()
    launch = run(f"--nproc-per-node={RANKS}", run.scripts / "balanced.py", out, str(readers))
    launch.succeed(80)  # it compares the parameters with those of plain PyTorch
    ranks = [json.loads((out / f"rank-{rank}").read_text()) for rank in range(RANKS)]
    for steps in zip(*ranks, strict=True):
        taken = [number for step in steps for number in step["taken"]]
        assert len(taken) == len(set(taken)) in (SIZE, SAMPLES % SIZE)
    for epoch in range(3):
        taken = [n for steps in ranks for s in steps if s["epoch"] == epoch for n in s["taken"]]
        assert sorted(taken) == list(range(SAMPLES))
    assert shares(ranks, 0) == [[14, 14, 14]]
    first, *_, last = shares(ranks, 1)
    assert first == [14, 14, 14]
    assert last[2] in (5, 6, 7)
    assert launch.stderr.count("The shares of the batch change: rank 2 is the slowest") >= 1
    slow = median(step["seconds"] for step in ranks[0][21:25])
    balanced = median(step["seconds"] for step in ranks[0][-15:-1])
    assert balanced / slow == pytest.approx(18 * 1 / (14 * 3), rel=0.35)


def shares(ranks: list, epoch: int) -> list[list[int]]:
    """The different shares of whole global batches of an epoch, in order."""
    found: list[list[int]] = []
    for steps in zip(*ranks, strict=True):
        share = [len(step["taken"]) for step in steps]
        if steps[0]["epoch"] == epoch and sum(share) == SIZE and share not in found[-1:]:
            found.append(share)
    return found
