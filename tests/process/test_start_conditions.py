"""Jobs that are started without a terminal, without standard streams, or to outlive their terminal."""

import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from dlrover.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CLOSED = {"output": ">&-", "errors": "2>&-", "all": "<&- >&- 2>&-"}
"""What a shell does to a command's standard streams."""


@pytest.mark.parametrize("closed", CLOSED)
def test_a_job_needs_no_standard_streams(run, closed: str) -> None:
    inside = ("sh", "-c", f'exec "$@" {CLOSED[closed]}', "sh")
    launch = run(run.scripts / "hello.py", inside=inside)
    assert launch.wait(30) == 0
    (log,) = launch.job_dir.glob("logs/*/attempt_0/0/stdout.log")
    assert log.read_text() == "hello from rank 0 of 1\n"


@pytest.fixture
def waiting(run, tmp_path: Path):
    """A job that was started by nohup, and waits for a file."""
    launch = run(run.scripts / "wait_for_file.py", tmp_path / "go", inside=("nohup",))
    launch.wait_for("worker")
    return launch


def test_nohup_is_honoured(tmp_path: Path, waiting) -> None:
    for kind in ("launcher", "agent", "worker"):
        for process in waiting.of_kind(kind):
            process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    waiting.succeed()


def test_nohup_hides_no_other_signal(waiting) -> None:
    waiting.process.send_signal(signal.SIGTERM)
    waiting.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)


ADDRESSES = [a for addresses in psutil.net_if_addrs().values() for a in addresses]
OWN = [a.address for a in ADDRESSES if a.family == socket.AF_INET and a.address[:4] != "127."][:1]
"""An address that is none of the loopback's, as the machine's name mostly has."""


@pytest.mark.parametrize("host", ["0.0.0.0", "[::1]", *OWN])
def test_nodes_meet_at_any_address_of_their_machine_without_a_token(run, host: str) -> None:
    options = [f"--rdzv-endpoint={host}:{run.free_port()}", "--rdzv-id=here", "--nnodes=2"]
    script = run.scripts / "hello.py"
    nodes = [run("--rdzv-backend=c10d", *options, script, name=name) for name in ("a", "b")]
    for node in nodes:
        node.succeed()
        said = f"DLROVER_TOKEN is not set: only nodes of this machine can meet at {host}."
        assert (said in node.stderr) is (host in OWN)


SPARE = "import os\nfor name in dir(os):\n    if name.startswith(('memfd', 'MFD_', 'pidfd')):\n        delattr(os, name)\n"
"""A `sitecustomize` that makes an interpreter as those of uv and conda are, which are built for an old C library."""


def test_an_interpreter_for_an_old_c_library_runs_a_job(run) -> None:
    (here := run.directory / "site").mkdir()
    (here / "sitecustomize.py").write_text(SPARE)
    launch = run(
        run.scripts / "hello.py", env={"PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    )
    assert launch.succeed() == "hello from rank 0 of 1\n"
