"""A stand-in for ``sbatch``, ``srun`` and ``scontrol``: whichever name it is called by.

It runs a batch file for real, on the nodes that the file named by ``SLURM_STAND_IN`` describes: for each node
the words that start a command there. It knows the options that the recipe uses and refuses all others.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

JOB_ID = "4711"
KNOWN = {"job-name", "nodes", "ntasks-per-node", "no-kill", "requeue", "open-mode", "time"}
STATE = Path(os.environ["SLURM_STAND_IN"])


def sbatch(file: str) -> int:
    """Run a batch file, again each time that it is requeued; its exit code."""
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", Path(file).read_text(), re.MULTILINE)
    options = dict(lines)
    assert set(options) <= KNOWN, set(options) - KNOWN
    assert options["ntasks-per-node"] == "1"
    nodes = int(options["nodes"])
    env = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NAME": options["job-name"],
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
    }
    restarts = 0
    while True:
        again = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        code = subprocess.run(["bash", file], env=os.environ | env | again, check=False).returncode
        if not requeued().exists():
            return code
        assert "requeue" in options
        requeued().unlink()
        restarts += 1


def srun(*words: str) -> int:
    """Run a command on each node of the job; the highest exit code, as srun's own."""
    assert words[0] == "--kill-on-bad-exit=0", "then the others go on after one has failed"
    described = json.loads(STATE.read_text())
    running = []
    for index, name in enumerate(hostnames(os.environ["SLURM_JOB_NODELIST"])):
        env = {
            "SLURM_NODEID": str(index),
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": "0",
            "SLURMD_NODENAME": name,
            "DLROVER_STATE_DIR": str(STATE.parent / f"state-{name}"),
        }
        command = [*described[name], *words[1:]]
        running.append(subprocess.Popen(command, env=os.environ | env))
    return max(process.wait() for process in running)


def scontrol(*words: str) -> int:
    """``show hostnames LIST`` and ``requeue JOB``."""
    if words[:2] == ("show", "hostnames"):
        sys.stdout.write("".join(f"{name}\n" for name in hostnames(words[2])))
    else:
        assert words == ("requeue", JOB_ID), words
        requeued().touch()
    return 0


def hostnames(text: str) -> list[str]:
    """The names of ``node[1-3]``."""
    found = re.fullmatch(r"(\w+)\[(\d+)-(\d+)\]", text)
    assert found is not None, text
    return [f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)]


def requeued() -> Path:
    return STATE.parent / "requeued"


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}
    sys.exit(commands[Path(sys.argv[0]).name](*sys.argv[1:]))
