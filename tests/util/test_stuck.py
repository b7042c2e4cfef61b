"""A test process that stands still ends the run for no other: its test is named, and the others are run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = """
import threading

import pytest


@pytest.fixture
def waits():
    yield
    threading.Event().wait()


def test_a_fixture_waits(waits):
    raise ValueError


@pytest.mark.parametrize("number", range(8))
def test_of_others(number):
    pass
"""


@pytest.mark.slow
def test_a_fixture_that_waits_for_ever_after_a_failure_does_not_hold_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import tests.conftest\nfrom tests.conftest import *\ntests.conftest.SLACK = 1.0\n"
    )
    (tmp_path / "test_suite.py").write_text(SUITE)
    options = ["-n", "2", "--dist", "worksteal", "-o", "timeout=1", "--rootdir", tmp_path]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, tmp_path],
        check=False, capture_output=True, text=True, timeout=50, env={"PYTHONPATH": f"{ROOT}:{ROOT}/src"},
    )  # fmt: skip
    assert "Timeout (0:00:02)!" in run.stderr, run.stdout
    assert "crashed while running 'test_suite.py::test_a_fixture_waits'" in run.stdout
    assert "2 failed, 8 passed" in run.stdout
