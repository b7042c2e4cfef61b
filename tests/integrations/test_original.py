"""The original's checkpointers of other libraries' trainers: a rank is lost, and they go on."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "flash_trainer.py"


@pytest.mark.parametrize(
    ("way", "library", "said"),
    [("hf", "transformers", "resumed to 8"), ("deepspeed", "deepspeed", "resumed from 4 with")],
)
def test_a_lost_rank_goes_on_from_memory(way, library, said, tmp_path):
    pytest.importorskip(library)
    ended = subprocess.run(
        [
            sys.executable, "-m", "dlrover.trainer.torch.elastic_run", "--standalone", "--nproc_per_node=2",
            "--max_restarts=1", str(SCRIPT), way, str(tmp_path),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert said in ended.stdout
