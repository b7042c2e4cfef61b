"""`accumulation_steps` with the Trainers of Transformers and Lightning: 3, then 2 workers train what one does."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
]  # fmt: skip


def needs(library: str):
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"needs {library}")


def train(script: str, out: Path, last: int, workers: int) -> None:
    """Run a script to its last step or epoch, from where it was."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DLROVER_", "TORCHELASTIC_"))}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
    ]  # fmt: skip
    command = [*(launcher if workers > 1 else [sys.executable]), SCRIPTS / script, out, str(last)]
    out.mkdir(exist_ok=True)
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=180, check=False, cwd=out
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "change", "last"),
    [
        pytest.param("transformers_batch.py", 5, 10, marks=needs("transformers")),
        pytest.param("lightning_batch.py", 1, 2, marks=needs("lightning")),
    ],
)
def test_three_then_two_workers_train_what_one_does(tmp_path, script, change, last) -> None:
    import torch

    train(script, tmp_path / "one", last, 1)
    train(script, tmp_path / "many", change, 3)
    train(script, tmp_path / "many", last, 2)
    one, many = (torch.load(tmp_path / name / "end.pt") for name in ("one", "many"))
    assert one.keys() == many.keys()
    for key, parameter in one.items():
        torch.testing.assert_close(parameter, many[key], rtol=0, atol=1e-6)
