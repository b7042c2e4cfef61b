"""The same script under every launcher: killed at a step, it goes on with the losses of a whole run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(180)]

TRAIN = str(Path(__file__).parent / "scripts" / "train.py")
DEADLY = 7
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "--max-restarts=2",
    ],
    "dlrover-run": [
        sys.executable, "-m", "dlrover.cli.run.run", "--standalone", "--nproc-per-node=2",
        "--max-restarts=2",
    ],
}  # fmt: skip


def launch(
    launcher: str, directory: Path, deadly: int, storage_every: int = 0, option: str = ""
) -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DLROVER_", "TORCHELASTIC_"))
    }
    env |= {
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's restarts fail without
        "DLROVER_STATE_DIR": str(directory.parent / "state"),
        "DLROVER_CACHE_DIR": os.environ["DLROVER_CACHE_DIR"],
    }
    ended = subprocess.run(
        [*LAUNCHERS[launcher], *option.split(), TRAIN, str(directory), str(deadly), str(storage_every)],
        env=env, capture_output=True, text=True, timeout=90, check=False, cwd=directory.parent,
    )  # fmt: skip
    if launcher == "python" and deadly >= 0 and ended.returncode:
        assert ended.returncode == -9, ended.stderr
    else:
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def losses(output: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for step, loss in re.findall(r"loss (\d+) (\S+)", output):
        assert found.setdefault(int(step), loss) == loss, f"step {step} was not repeated exactly"
    return found


@pytest.mark.parametrize(
    "launcher",
    [
        "dlrover-run",
        *(pytest.param(name, marks=pytest.mark.heavy) for name in ("python", "torchrun")),
    ],
)
def test_a_killed_rank_continues_from_memory(launcher, directory):
    whole_run = directory.parent / "whole"
    whole = losses(launch(launcher, whole_run, -1))
    output = launch(launcher, directory, DEADLY)
    if launcher == "python":
        output += launch(launcher, directory, DEADLY)
    assert losses(output) == whole
    found = re.search(r"loaded (\d+) from memory", output)
    assert found is not None, output
    assert int(found[1]) in (DEADLY, DEADLY + 1)
    if launcher == "dlrover-run":
        assert not directory.savers(), "the agent ends the saver"
    directory.stop_saver()
    whole_run.stop_saver()


def test_a_new_job_continues_from_storage(directory):
    whole = losses(launch("torchrun", directory, -1, storage_every=5))
    directory.stop_saver()
    output = launch("torchrun", directory, -1, storage_every=5)
    assert "loaded 10 from storage" in output
    assert losses(output) == {step: whole[step] for step in (10, 11)}
    directory.stop_saver()


def test_the_launcher_may_ask_for_a_save_at_breakpoint(directory):
    launch("dlrover-run", directory, DEADLY, option="--save-at-breakpoint")
    directory.until_no_saver()
    assert storage.steps(open_store(directory))[-1] in (DEADLY, DEADLY + 1)
