"""All that a release consists of has one version, and its scripts refuse what they cannot do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import dlrover

ROOT = Path(__file__).parents[2]
HELM = re.sub(r"(a|b|rc)(\d+)$", r"-\1.\2", dlrover.__version__)
"""The version as Helm writes it, which takes SemVer only."""


@pytest.mark.parametrize(
    ("file", "pattern", "version"),
    [
        ("CITATION.cff", r"^version: (\S+)$", dlrover.__version__),
        ("packages/original/pyproject.toml", r'^version = "(.+)"$', dlrover.__version__),
        (
            "packages/original/pyproject.toml",
            r'"dlrover\[torch,planning\]==(.+)"',
            dlrover.__version__,
        ),
        ("pyproject.toml", r'^original = \["dlrover-original==(.+)"\]$', dlrover.__version__),
        ("deploy/chart/Chart.yaml", r"^appVersion: (\S+)$", dlrover.__version__),
        ("deploy/chart/Chart.yaml", r"^version: (\S+)$", HELM),
        ("CHANGELOG.md", r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", dlrover.__version__),
    ],
)
def test_each_file_names_the_version(file: str, pattern: str, version: str) -> None:
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == version


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["smoke", "--pyton", "3.11", "."], "smoke: --pyton is no option"),
        (["smoke", "no-such.whl"], "smoke: names no wheel"),
        (["test-matrix", "--tensorflow", "2", "."], "test-matrix: --tensorflow is no option"),
    ],
)
def test_the_scripts_refuse_wrong_arguments(command: list[str], said: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / command[0], *command[1:]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(said)
