"""Workers cannot tell `dlrover-run` from torchrun: the same process state, name by name."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from dlrover import config
from tests.support import certificates

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

MAY_DIFFER = {
    "MASTER_ADDR",  # torchrun names the host, we give its address
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",  # fresh for each job that nobody named
    "TORCHELASTIC_USE_AGENT_STORE",  # torchrun's agent keeps the store, ours leaves it to rank 0
    "PROCESS_TEST_RUN",  # this test's own mark
}
"""The only variables whose values may differ. Both launchers set all of them."""

OWN_MODULES = {"dlrover", *sys.stdlib_module_names}
"""What may be loaded in a worker before its program is."""

OWN_DESCRIPTORS = re.compile("memfd:dlrover-(progress|stacks)")
"""What may be open in a worker beside what torchrun leaves open."""

PRESET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "OMP_NUM_THREADS": "3",
    "CUDA_VISIBLE_DEVICES": "5, 7",
    "RANK": "of the launcher's own",
    "ONE_MORE": "x=y z",
    "PYTHONSAFEPATH": "1",
    "PYTHONWARNINGS": "ignore::ResourceWarning",
}

LAUNCHES = {
    "two workers": ("--nproc-per-node 2 facts.py", {}),
    "standalone": ("--standalone --max-restarts 3 --role trainer package/../link/link.py", {}),
    "module": ("--nnodes 1 --nproc-per-node 2 --module package.inner", {}),
    "environment": ("--virtual-local-rank --nproc-per-node 2 package", PRESET),
    "named job": ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id me packed.zip", {}),
    "command": ("--signals-to-handle SIGTERM,SIGUSR2 --no-python ./command", {}),
}


@pytest.fixture
def project(run, tmp_path: Path) -> Path:
    """A directory from which the script of facts can be started in every way."""
    facts = run.scripts / "facts.py"
    here = tmp_path / "project"
    for name in ("package", "link"):
        (here / name).mkdir(parents=True)
    for copy in ("facts.py", "package/__init__.py", "package/__main__.py", "package/inner.py"):
        shutil.copy(facts, here / copy)
    (here / "package/__init__.py").write_text("")
    (here / "link/link.py").symlink_to("../facts.py")
    with zipfile.ZipFile(here / "packed.zip", "w") as packed:
        packed.write(facts, "__main__.py")
    (here / "command").write_text(f'#!/bin/sh\nexec python3 {here}/facts.py "$@"\n')
    (here / "command").chmod(0o755)
    return here


def facts_of(start, out: Path, *args: str | Path, nodes: int = 1, **settings) -> dict[str, dict]:
    """What the workers of a launch, or of one for each node, wrote into ``out``, by rank."""
    out.mkdir()
    args = (*args, out, "--flag", "${local_rank}/$LOCAL_RANK", "a b")
    launches = [start(*args, name=f"{out.name}-{node}", **settings) for node in range(nodes)]
    for launch in launches:
        launch.succeed()
    facts = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    for worker in facts:
        assert worker["argv"][1] == str(out)
        worker["argv"][1] = "OUT"
    by_rank = {worker["environ"]["RANK"]: worker for worker in facts}
    assert len(by_rank) == len(facts)
    return by_rank


def both(run, project: Path, command: str, env: dict[str, str]) -> list[tuple[dict, dict]]:
    """For each rank the facts under torchrun and under dlrover-run."""
    settings = {"cwd": project, "env": env}
    theirs = facts_of(run.torchrun, project / "theirs", *command.split(), **settings)
    ours = facts_of(run, project / "ours", *command.split(), **settings)
    assert theirs.keys() == ours.keys()
    return [(theirs[rank], ours[rank]) for rank in theirs]


def check_environ(theirs: dict[str, str], ours: dict[str, str]) -> None:
    assert ours.keys() == theirs.keys()
    differ = {name: (theirs[name], ours[name]) for name in ours if ours[name] != theirs[name]}
    assert differ.keys() <= MAY_DIFFER, differ


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(name, marks=[pytest.mark.heavy] if name in ("module", "named job") else [])
        for name in LAUNCHES
    ],
)
def test_a_worker_is_started_as_by_torchrun(run, project: Path, launch: str) -> None:
    for theirs, ours in both(run, project, *LAUNCHES[launch]):
        check_environ(theirs.pop("environ"), ours.pop("environ"))
        loaded = {name.partition(".")[0] for name in set(ours["modules"]) - set(theirs["modules"])}
        assert loaded <= OWN_MODULES
        assert all(OWN_DESCRIPTORS.search(name) for name in ours["descriptors"].values())
        assert ours["meta_path"] <= theirs["meta_path"] + 1  # awaits the import of PyTorch
        for name in ("modules", "descriptors", "meta_path"):
            del theirs[name], ours[name]
        assert ours == theirs


def test_run_path_runs_a_program_as_torchrun_does(run, project: Path) -> None:
    for theirs, ours in both(run, project, f"--run-path {project}/facts.py", {}):
        check_environ(theirs["environ"], ours["environ"])
        same = ("argv", "cwd", "path", "name", "file", "package", "spec", "globals", "stdin")
        assert [ours[name] for name in same] == [theirs[name] for name in same]


def test_workers_of_two_nodes_are_numbered_as_by_torchrun(run, project: Path) -> None:
    def facts(start, name: str) -> dict[str, dict]:
        endpoint = f"--rdzv-endpoint=localhost:{run.free_port()}"
        meeting = ["--rdzv-backend=c10d", "--rdzv-id=pair", endpoint, "--nnodes=2"]
        options = [*meeting, "--nproc-per-node=2", "facts.py"]
        return facts_of(start, project / name, *options, nodes=2, cwd=project)

    theirs, ours = facts(run.torchrun, "theirs"), facts(run, "ours")
    assert sorted(ours) == sorted(theirs) == ["0", "1", "2", "3"]
    for rank, worker in ours.items():
        check_environ(theirs[rank]["environ"], worker["environ"])
        assert worker["argv"] == theirs[rank]["argv"]


def test_with_tls_the_workers_of_all_nodes_have_one_secret(run, project: Path) -> None:
    env = {"DLROVER_TOKEN": "guessed", **certificates.settings(certificates.made(run.directory))}
    endpoint = f"--rdzv-endpoint=localhost:{run.free_port()}"
    options = ["--rdzv-backend=c10d", "--rdzv-id=pair", endpoint, "--nnodes=2", "facts.py"]
    seen = []
    for name in ("first", "second"):
        facts = facts_of(run, project / name, *options, nodes=2, cwd=project, env=env)
        (secret,) = {worker["environ"][config.REPLICA_SECRET] for worker in facts.values()}
        assert len(bytes.fromhex(secret)) == 32
        seen.append(secret)
    assert seen[0] != seen[1], "it is made of more than the token"


def test_a_command_has_the_signal_dispositions_that_torchrun_leaves_it(run) -> None:
    """Python ignores some signals; a program that it starts must not."""
    command = ["--no-python", "grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
    assert run(*command).succeed() == run.torchrun(*command).succeed()


@pytest.mark.parametrize("how", [[], ["-m"]], ids=["script", "module"])
def test_what_a_program_holds_is_freed_at_its_end(run, tmp_path: Path, how: list[str]) -> None:
    lines = (
        "file = open('out.txt', 'w')\ndef write():\n    file.write('not yet on disk')\nwrite()\n"
    )
    (tmp_path / "program.py").write_text(lines)
    run(*how, "program" if how else "program.py", cwd=tmp_path).succeed()
    assert (tmp_path / "out.txt").read_text() == "not yet on disk"
