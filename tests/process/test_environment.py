"""Workers cannot tell `dlrover-run` from torchrun: the same process state, name by name."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]

MAY_DIFFER = {
    "MASTER_ADDR",  # torchrun names the host, we give its address
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",  # fresh for each job that nobody named
    "TORCHELASTIC_USE_AGENT_STORE",  # torchrun's agent keeps the store, ours leaves it to rank 0
    "PROCESS_TEST_RUN",  # this test's own mark
}
"""The only variables whose values may differ. Both launchers set all of them."""

OWN_MODULES = {"dlrover", "faulthandler", "runpy"}
"""Beside modules of the standard library, these are loaded in a worker and not in plain Python."""

LAUNCHES = {
    "plain": [],
    "two": ["--nproc-per-node", "2"],
    "standalone": ["--standalone", "--nproc-per-node", "2"],
    "options": ["--nnodes", "1", "--role", "trainer", "--max-restarts", "3", "--nproc-per-node=2"],
    "named": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=me"],
    "virtual local rank": ["--virtual-local-rank", "--nproc-per-node", "2"],
    "signals": ["--signals-to-handle", "SIGTERM,SIGUSR2"],
}

PRESET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "OMP_NUM_THREADS": "3",
    "CUDA_VISIBLE_DEVICES": "5, 7",
    "RANK": "of the launcher's own",
    "ONE_MORE": "x=y z",
    "PYTHONSAFEPATH": "1",
    "PYTHONWARNINGS": "ignore::ResourceWarning",
}

PROGRAMS = {
    "script": ["facts.py"],
    "dotted": ["./facts.py"],
    "absolute": ["{here}/facts.py"],
    "elsewhere": ["package/../link/link.py"],
    "package": ["package"],
    "zip": ["packed.zip"],
    "module": ["-m", "package.inner"],
    "module of a package": ["-m", "package"],
    "no python": ["--no-python", "{here}/command"],
    "run path": ["--run-path", "{here}/facts.py"],
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


def facts_of(start, out: Path, *args: str | Path, **settings) -> dict[str, dict]:
    """What the workers of a launch wrote into ``out``, by rank."""
    out.mkdir()
    start(*args, out, "--flag", "${local_rank}/$LOCAL_RANK", "a b", **settings).succeed(40)
    facts = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    for worker in facts:
        assert worker["argv"][1] == str(out)
        worker["argv"][1] = "OUT"
    by_rank = {worker["environ"]["RANK"]: worker for worker in facts}
    assert len(by_rank) == len(facts)
    return by_rank


def both(run, project: Path, *args: str, env: dict[str, str] | None = None):
    """For each rank the facts under torchrun and under dlrover-run."""
    settings = {"cwd": project, "env": env}
    theirs = facts_of(run.torchrun, project / "theirs", *args, **settings)
    ours = facts_of(run, project / "ours", *args, **settings)
    assert theirs.keys() == ours.keys()
    return [(theirs[rank], ours[rank]) for rank in theirs]


def check_environ(theirs: dict[str, str], ours: dict[str, str]) -> None:
    assert ours.keys() == theirs.keys()
    differ = {name for name in ours if ours[name] != theirs[name]}
    assert differ <= MAY_DIFFER, {name: (theirs[name], ours[name]) for name in differ}


def check_same(theirs: dict, ours: dict, *left_out: str) -> None:
    """Everything that a worker can know of its start is equal, but for what is named."""
    check_environ(theirs.pop("environ"), ours.pop("environ"))
    loaded = {name.partition(".")[0] for name in set(ours["modules"]) - set(theirs["modules"])}
    assert loaded <= OWN_MODULES | STDLIB
    assert all("dlrover-progress" in text for text in ours["descriptors"].values())
    assert ours["meta_path"] <= theirs["meta_path"] + 1
    for name in ("modules", "descriptors", "meta_path", *left_out):
        del theirs[name], ours[name]
    assert ours == theirs
