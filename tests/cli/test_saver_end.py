"""A checkpoint saver whose agent was killed ends in order with the job."""

import subprocess
import sys
from pathlib import Path

import pytest

SAVER = """
import signal, sys, time
from pathlib import Path
def store(*_):
    time.sleep(0.3)
    Path(sys.argv[1]).write_text("stored")
    sys.exit()
signal.signal(signal.SIGTERM, store)
Path(sys.argv[1]).write_text("begun")
time.sleep(60)
"""
JOB = """
import subprocess, sys, time
from pathlib import Path
from dlrover._util import procs
from dlrover.cli.run.supervisor import Supervisor
procs.become_subreaper()
said = Path(sys.argv[1])
command = [sys.executable, "-m", "dlrover.checkpoint.saver.saver", str(said)]
agent = [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"]
subprocess.run([*agent, *command], check=True, env={"PYTHONPATH": sys.argv[2]})
until = time.monotonic() + 20
while not said.exists() and time.monotonic() < until:
    time.sleep(0.02)
job = Supervisor.__new__(Supervisor)
job.master = job.agent = job._showing = None
job._end()
assert not procs.children()
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_saver_whose_agent_was_killed_stores_what_it_was_asked_for(tmp_path: Path) -> None:
    package = tmp_path / "dlrover" / "checkpoint"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "saver.py").write_text(SAVER)
    said = tmp_path / "said"
    subprocess.run([sys.executable, "-c", JOB, str(said), str(tmp_path)], check=True, cwd="/")
    assert said.read_text() == "stored"
