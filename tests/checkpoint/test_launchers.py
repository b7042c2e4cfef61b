"""The same script under every launcher: killed at a step, it goes on with the losses of a whole run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store
from tests.support.directories import Directory
from tests.support.forks import Forks

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


def environment(directory: Path) -> dict[str, str]:
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DLROVER_", "TORCHELASTIC_"))
    }
    return given | {
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's restarts fail without
        "DLROVER_STATE_DIR": str(directory.parent / "state"),
        "DLROVER_CACHE_DIR": os.environ["DLROVER_CACHE_DIR"],
    }


def launch(
    launcher: str, directory: Path, deadly: int, storage_every: int = 0, option: str = ""
) -> str:
    ended = subprocess.run(
        [*LAUNCHERS[launcher], *option.split(), TRAIN, str(directory), str(deadly), str(storage_every)],
        env=environment(directory), capture_output=True, text=True, timeout=90, check=False, cwd=directory.parent,
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


def whole_run(
    forks: Forks, directory: Directory, ranks: int = 2, storage_every: int = 0
) -> dict[int, str]:
    """The losses when nothing happens, without a launcher."""
    words = (TRAIN, directory, -1, storage_every)
    found = losses(forks.ranks(ranks, *words, env=environment(directory)))
    directory.stop_saver()
    return found


@pytest.mark.parametrize(
    "launcher",
    [
        "dlrover-run",
        *(pytest.param(name, marks=pytest.mark.heavy) for name in ("python", "torchrun")),
    ],
)
def test_a_killed_rank_continues_from_memory(launcher, directory, forks):
    ours = launcher == "dlrover-run"
    whole = whole_run(
        forks, Directory(directory.parent / "whole"), 1 if launcher == "python" else 2
    )
    output = launch(launcher, directory, DEADLY, option="--save-at-breakpoint" if ours else "")
    if launcher == "python":
        output += launch(launcher, directory, DEADLY)
    assert losses(output) == whole
    found = re.search(r"loaded (\d+) from memory", output)
    assert found is not None, output
    assert int(found[1]) in (DEADLY, DEADLY + 1)
    if ours:
        assert not directory.savers(), "the agent ends the saver"
        stored = storage.steps(open_store(directory))
        assert stored[-1] in (DEADLY, DEADLY + 1), "the launcher asked for it"
    directory.stop_saver()


def test_a_new_job_continues_from_storage(directory, forks):
    whole = whole_run(forks, directory, storage_every=5)
    output = launch("torchrun", directory, -1, storage_every=5)
    assert "loaded 10 from storage" in output
    assert losses(output) == {step: whole[step] for step in (10, 11)}
    directory.stop_saver()
