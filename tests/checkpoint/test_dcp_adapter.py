"""``torch.distributed.checkpoint`` with our reader and writer, on FSDP1."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).parent / "scripts" / "by_dcp.py")


def run(verb: str, directory: Path, where: str, ranks: int) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = subprocess.run(
        [sys.executable, *launcher, SCRIPT, verb, str(directory), where],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("where", ["storage", pytest.param("memory", marks=pytest.mark.heavy)])
def test_two_ranks_save_and_others_load(directory, where):
    run("save", directory, where, 2)
    if where == "storage":
        directory.stop_saver()
    for ranks in (3, 1):
        assert f"equal on {ranks} ranks" in run("load", directory, where, ranks)
