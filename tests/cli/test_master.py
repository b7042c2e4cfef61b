"""``dlrover master`` by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover.errors import ExitCode
from dlrover.spec.jobdir import JobDir


@pytest.mark.slow
def test_a_master_that_is_asked_to_stop_ends_in_order(tmp_path: Path) -> None:
    job_dir = JobDir(tmp_path / "job")
    command = ["master", "--port=0", f"--job-dir={job_dir.path}"]
    with subprocess.Popen([sys.executable, "-m", "dlrover.cli.main", *command]) as process:
        try:
            late = time.monotonic() + 20
            while not job_dir.master.exists():
                assert process.poll() is None
                assert time.monotonic() < late
                time.sleep(0.05)
            process.terminate()
            # Not by the signal itself, which the first process of a container would not hear.
            assert process.wait(20) == ExitCode.SIGNAL_BASE + signal.SIGTERM
        finally:
            process.kill()
