"""Scripts in the original's manner, unmodified, under ``dlrover-run``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(180)]

SCRIPTS = Path(__file__).parent / "scripts"
APART = str(Path(__file__).parents[2] / "packages" / "original" / "src")
"""The packages atorch and tfplus, as an installation would put them on the path."""


def run(
    count: int, script: str, *args: str, module: str = "dlrover.trainer.torch.elastic_run"
) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, "--nproc_per_node", str(count), "--max_restarts", "1", str(SCRIPTS / script), *args],
        capture_output=True, text=True, timeout=150, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": APART},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def taken(out: Path) -> dict[int, list[tuple[int, set[int]]]]:
    """By step: epoch and samples of each rank; a step that was made again counts as it was made last."""
    steps: dict[int, dict[int, tuple[int, set[int]]]] = {}
    for rank in range(3):
        path = out / f"taken-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            step, epoch, *indices = map(int, line.split())
            steps.setdefault(step, {})[rank] = (epoch, set(indices))
    return {step: list(ranks.values()) for step, ranks in sorted(steps.items())}


def test_a_training_of_the_original_survives_and_takes_each_sample_once(tmp_path: Path) -> None:
    printed = run(2, "digits.py", str(tmp_path), "--die_at", "8")
    assert "starts at step 7" in printed  # from memory
    assert "after 12 steps" in printed
    steps = taken(tmp_path)
    assert list(steps) == list(range(1, 13))
    for epoch in (0, 1):
        parts = [samples for ranks in steps.values() for e, samples in ranks if e == epoch]
        assert sorted(sample for part in parts for sample in part) == list(range(96))
    kept = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "ckpt", "list", str(tmp_path / "checkpoints")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert [line.split()[0] for line in kept.splitlines()[1:]] == ["10", "5"]
    # On another number of ranks, whose batch normalization has statistics of its own.
    printed = run(1, "digits.py", str(tmp_path), "--epochs", "2", module="dlrover.cli.run.run")
    assert "rank 0 starts at step 10" in printed


@pytest.mark.heavy
def test_shards_and_fsdp_models_of_the_original(tmp_path: Path) -> None:
    import torch

    (tmp_path / "table.csv").write_text("".join(f"line {n}\n" for n in range(21)))
    run(2, "shards.py", str(tmp_path), "first")

    def read(what: str) -> list[str]:
        return sorted(
            line for path in tmp_path.glob(f"{what}-?") for line in path.read_text().splitlines()
        )

    assert sorted(map(int, read("shards"))) == sorted([*range(50), *range(50)])
    assert sorted(map(int, read("indices"))) == list(range(40))
    assert sorted(map(int, read("dataset"))) == sorted([*range(50), *range(50)])
    assert read("lines") == sorted(f"line {n}" for n in range(1, 21))  # without the header
    run(1, "shards.py", str(tmp_path), "second")
    first, second = (torch.load(tmp_path / f"fsdp-{phase}.pt") for phase in ("first", "second"))
    assert second[2] == {"step": 3}
    for saved, loaded in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(saved, loaded)


def test_a_program_of_atorch_begins_as_its_examples_do() -> None:
    printed = run(2, "atorch_auto.py")
    assert "rank 0 of 2 ends, local rank 0" in printed
    assert "rank 1 of 2 ends, local rank 1" in printed
    assert "create_parallel_group does not exist here: use the method parallel_mode" in printed
