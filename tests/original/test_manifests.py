"""Manifests: those of the examples, and those in the original's form, which apply unchanged."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrover.cli.run import arguments

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "manifests").glob("*.yaml"))
ORIGINALS = sorted(Path(__file__).with_name("manifests").glob("*.yaml"))


def submitted(path: Path) -> tuple[list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "submit", "--dry-run", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout)), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", ORIGINALS, ids=lambda path: path.stem)
def test_manifests_of_the_original_are_accepted(path: Path) -> None:
    made, said = submitted(path)
    assert {"ElasticJob", "Pod"} <= {manifest["kind"] for manifest in made}
    for line in said.splitlines():
        assert "has no effect" in line


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_manifests_of_the_examples_run_the_examples(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = submitted(path)
    assert said == ""
    monkeypatch.chdir(ROOT)
    job = yaml.safe_load(path.read_text())
    for spec in job["spec"]["replicaSpecs"].values():
        command = spec["template"]["spec"]["containers"][0]["command"]
        words = shlex.split(command[-1]) if command[0] == "/bin/bash" else command
        words = words[words.index("dlrover-run") + 1 :]
        words = [word.replace("$(NODE_NUM)", "4").replace("$WORKER_NUM", "4") for word in words]
        options = arguments.parse(words, {"PATH": os.defpath, "DLROVER_MASTER_ADDR": "master:1"})
        assert options.launch.target.startswith("examples/")
