"""The batch file for Slurm, run for real by a stand-in of Slurm's commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.recipes import machines
from tests.recipes.playing import RECIPES, ROOT, dlrover_run, steps_in
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BATCH = RECIPES / "slurm.sbatch"
COUNT = Path(__file__).parent / "count.py"
STAND_IN = Path(__file__).parent / "slurm.py"
PROGRAM = 'examples/01_digits_ddp/train.py --out="$out"'
STEPS = 30


class Slurm:
    """A directory with ``sbatch`` and its like, and the job that was submitted last."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = dlrover_run(directory / "bin")
        self.env["SLURM_STAND_IN"] = str(directory / "nodes.json")
        self.log = directory / "slurm.log"
        for name in ("sbatch", "srun", "scontrol"):
            command = directory / "bin" / name
            command.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
            command.chmod(0o755)

    def nodes(self, described: Mapping[str, list[str]]) -> None:
        (self.directory / "nodes.json").write_text(json.dumps(described))

    @contextlib.contextmanager
    def submitted(self, text: str) -> Iterator[psutil.Popen]:
        """``sbatch`` of a batch file, which ends with the test."""
        file = self.directory / "job.sbatch"
        file.write_text(text)
        with self.log.open("wb") as output:
            process = psutil.Popen(
                ["setpriv", "--pdeathsig", "KILL", self.directory / "bin" / "sbatch", file],
                env=os.environ | self.env | {"OUT": str(self.directory / "out")},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in (*process.children(recursive=True), process):
                    child.kill()
            process.wait()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    if not shutil.which("setpriv"):
        pytest.skip("there is no setpriv on this machine")
    (tmp_path / "out").mkdir()
    return Slurm(tmp_path)


def test_the_batch_file_trains_on_two_nodes_and_a_killed_launcher_joins_again(
    slurm: Slurm, cluster: machines.Cluster
) -> None:
    nodes = [cluster.machine(f"node{number}") for number in (1, 2)]
    for node in nodes:
        cluster.publish(node.name, node.address)
    slurm.nodes({node.name: node.command([]) for node in nodes})
    out = slurm.directory / "out"
    with slurm.submitted(BATCH.read_text().replace(PROGRAM, f'{COUNT} "$out" {STEPS}')) as job:
        until(lambda: len(steps_in(out)) >= 8, 60, "step 8")
        launcher_on("node2").kill()
        assert job.wait(80) == 0, slurm.log.read_text()
    made = steps_in(out)
    assert [record["step"] for record in made] == list(range(1, STEPS + 1))
    assert made[-1]["world_size"] == 2


def launcher_on(node: str) -> psutil.Process:
    """The process of ``dlrover-run`` on a node."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            here = process.environ().get("SLURMD_NODENAME") == node
            if here and "dlrover.cli.run.run" in process.cmdline():
                return process
    raise AssertionError(f"no launcher on {node}")


@pytest.mark.parametrize(
    ("codes", "ended", "runs"), [("3 3 0", 0, 3), ("1", 1, 1), ("3 3 3 3", 3, 4), ("5", 5, 1)]
)
def test_only_what_other_nodes_may_heal_is_queued_again(
    slurm: Slurm, codes: str, ended: int, runs: int
) -> None:
    """The launchers of the first node leave with these codes, those of the second one with 0."""
    slurm.nodes({"node1": [], "node2": []})
    command = slurm.directory / "bin" / "dlrover-run"
    command.write_text(
        "#!/bin/bash\n"
        f"codes=({codes})\n"
        '[ "$SLURM_NODEID" = 0 ] || exit 0\n'
        'echo "nnodes: $1, ${DLROVER_TOKEN:+a token}"\n'
        'exit "${codes[${SLURM_RESTART_COUNT:-0}]}"\n'
    )
    with slurm.submitted(BATCH.read_text()) as job:
        assert job.wait(20) == ended, slurm.log.read_text()
    assert slurm.log.read_text() == "nnodes: --nnodes=1:2, a token\n" * runs
