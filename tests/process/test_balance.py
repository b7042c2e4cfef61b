"""A slow rank takes a smaller share of the global batch; the parameters do not show it."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

RANKS, SIZE, SAMPLES, EPOCHS, WINDOW = 3, 42, 42 * 20 - 5, 2, 8


def test_steps_get_shorter_as_the_shares_follow_the_speed(run) -> None:
    ranks = train(run, readers=0, seconds=0.006)
    share = shares(ranks)[-2]
    assert share[2] in range(4, 10)  # 6, by its speed
    first, last = (max(one, other, 3 * slow) for one, other, slow in (shares(ranks)[0], share))
    assert last / first < 0.75  # 18 / 42, by the speeds


def test_loaders_that_are_ahead_still_read_each_sample_once(run) -> None:
    """The ranks' processes that read have asked for other batches when the shares change."""
    ranks = train(run, readers=1, seconds=0.002)
    assert min(share[2] for share in shares(ranks)[:-1]) < 14


def train(run, readers: int, seconds: float) -> list[list[dict]]:
    """What each rank did, step by step; the parameters are compared with those of plain PyTorch."""
    out = run.directory / "out"
    out.mkdir()
    script = run.scripts / "balanced.py"
    launch = run(f"--nproc-per-node={RANKS}", script, out, str(readers), str(seconds))
    launch.succeed(100)
    ranks = [json.loads((out / f"rank-{rank}").read_text()) for rank in range(RANKS)]
    for epoch in range(EPOCHS):
        taken = [n for steps in ranks for s in steps if s["epoch"] == epoch for n in s["taken"]]
        assert sorted(taken) == list(range(SAMPLES))
    assert {sum(share) for share in shares(ranks)} == {SIZE, SAMPLES % SIZE}
    assert shares(ranks)[:WINDOW] == [[14, 14, 14]] * WINDOW
    assert "The shares of the batch change: rank 2 is the slowest" in launch.stderr
    return ranks


def shares(ranks: list[list[dict]]) -> list[list[int]]:
    """The samples of each rank, step by step."""
    return [[len(step["taken"]) for step in steps] for steps in zip(*ranks, strict=True)]
