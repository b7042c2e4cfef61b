"""Real training scripts under torchrun, one of whose ranks is killed on the way."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]  # they need the extra "torch"

SCRIPTS = Path(__file__).parent / "scripts"


class Training:
    """Runs of one script with one directory, in which the checkpoints are under ``flash``."""

    def __init__(self, directory, scratch: Path):
        self.directory, self.scratch = directory, scratch
        self.flash = type(directory)(directory / "flash")
        self.output = ""
        """Of the last run."""

    def run(self, script: str, *args: object, ranks: int = 2, fails: bool = False) -> "Training":
        """Run the script to its end, through one restart if it needs one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        ended = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={ranks}", "--max-restarts=1",
                str(SCRIPTS / script), str(self.directory), *map(str, args),
            ],
            env=environment(self.scratch), capture_output=True, text=True, timeout=200, check=False,
            cwd=self.directory,
        )  # fmt: skip
        self.output = ended.stdout + ended.stderr
        assert bool(ended.returncode) == fails, self.output
        return self

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        """By step and rank; a step that was repeated must have given the same."""
        found: dict[tuple[int, int], str] = {}
        for step, rank, loss in re.findall(r"loss (\d+) (\d+) (\S+)", self.output):
            known = found.setdefault((int(step), int(rank)), loss)
            assert known == loss, f"step {step} was not repeated exactly"
        return found

    @property
    def loaded(self) -> tuple[int, str]:
        """The step that was continued from, and where it came from."""
        found = re.findall(r"Step (\d+) was loaded from (\w+)", self.output)
        assert found, self.output
        return int(found[-1][0]), found[-1][1]

    def end_saver(self) -> None:
        """End the saver, and the memory with it."""
        self.flash.stop_saver()


def environment(scratch: Path) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DLROVER_", "TORCHELASTIC_"))
    }
    return env | {
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "TMPDIR": str(scratch),
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's restarts fail without
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def scratch(tmp_path_factory) -> Path:
    """For temporary files, and for what DeepSpeed builds once."""
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture
def training(directory, scratch) -> Training:
    return Training(directory, scratch)


@pytest.fixture
def undisturbed(directory, scratch) -> Training:
    """The same in another directory, to compare with."""
    return Training(type(directory)(directory / "undisturbed"), scratch)
