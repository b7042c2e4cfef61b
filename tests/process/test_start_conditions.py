"""Jobs that are started without a terminal, without standard streams, or to outlive their terminal."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dlrover.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FAILS = "raise SystemExit(f'{__name__} is a file of the user')\n"
"""Content of a module that must not be imported."""
INSTALLED = "import sys\nfrom dlrover.cli import launcher\nsys.exit(launcher())\n"
"""Content of the program ``dlrover-run`` of an installation."""
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


@pytest.fixture
def installed(run) -> tuple[str, str]:
    """The command ``dlrover-run`` of an installation, which does not search the working directory for modules."""
    (program := run.directory / "dlrover-run").write_text(INSTALLED)
    return sys.executable, str(program)


@pytest.mark.parametrize("variable", [[], ["PYTHONPATH"]], ids=["working directory", "PYTHONPATH"])
def test_files_of_a_user_are_not_taken_for_modules_of_dlrover(
    run, installed: tuple[str, str], variable: list[str]
) -> None:
    """torchrun starts there, too."""
    here = run.directory / "project"
    names = ["secrets", "hmac", "decimal", "sqlite3", "shlex", "queue", "pkgutil"]
    names += ["types", "enum", "functools", "collections/__init__", "signal"]
    if not variable:  # else Python itself does not start
        names += ["json", "runpy", "socket", "pathlib", "dlrover/__init__"]
    for name in names:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / f"{name}.py").write_text(FAILS)
    path = os.pathsep.join([str(here), *sys.path])
    env = dict.fromkeys(variable, path)
    launch = run(run.scripts / "hello.py", launcher=installed, cwd=here, env=env)
    assert launch.succeed() == "hello from rank 0 of 1\n"


@pytest.mark.parametrize("entry", ["script", "-m", "folder"])
def test_a_program_has_modules_of_its_own_with_the_names_of_the_standard_librarys(
    run, installed: tuple[str, str], entry: str
) -> None:
    here = run.directory / "project"
    (here / "json").mkdir(parents=True)
    (here / "json/__init__.py").write_text("dumps = 'of the program'")
    (here / "secrets.py").write_text("KEY = 'of the program'")
    program = "import hmac, json, secrets\nprint(json.dumps, secrets.KEY, len(hmac.__name__))\n"
    for name in ("program", "__main__"):
        (here / f"{name}.py").write_text(program)
    args = {"script": ["program.py"], "-m": ["-m", "program"], "folder": ["."]}[entry]
    assert run(*args, launcher=installed, cwd=here).succeed() == "of the program of the program 4\n"


def test_the_standard_library_by_way_of_a_symbolic_link_is_the_same(run) -> None:
    (linked := run.directory / "linked").symlink_to(Path(os.__file__).parent)
    (program := run.directory / "program.py").write_text(
        "import dataclasses\nfrom dlrover import launched\nprint(bool(dataclasses.fields(launched.given)))\n"
    )
    path = os.pathsep.join([str(linked), *sys.path])
    assert run(program, env={"PYTHONPATH": path}).succeed() == "True\n"


def test_a_loopback_that_is_down_is_named(run) -> None:
    unshare = ("unshare", "--net")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network namespace")
    launch = run(run.scripts / "hello.py", inside=unshare)
    _, errors = launch.end_with(ExitCode.USAGE, timeout=30)
    (line,) = errors.splitlines()
    assert "127.0.0.1" in line
    assert "unreachable" in line


def test_a_working_directory_that_has_been_deleted_is_named(run) -> None:
    gone = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh")
    _, errors = run("program.py", inside=gone).end_with(ExitCode.USAGE)
    assert errors.splitlines()[-1].endswith("has been deleted: change to one that exists.")


def test_what_the_encoding_of_the_terminal_lacks_is_escaped(run) -> None:
    (program := run.directory / "fails.py").write_text("raise ValueError('zu groß')")
    launch = run(program, env={"PYTHONIOENCODING": "ascii"})
    launch.wait(60)
    command = [sys.executable, "-m", "dlrover.cli.main", "events", "--job-dir", launch.job_dir]
    env = {**run.env, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert r"zu gro\xdf" in shown.stdout


def test_warnings_that_are_errors_say_nothing(run) -> None:
    launch = run(run.scripts / "hello.py", env={"PYTHONWARNINGS": "error"})
    launch.succeed()
    assert not launch.stderr


NO_THREADS = """
import ctypes, os, sys
SECCOMP, NO_NEW_PRIVILEGES, FILTER, CLONE3, EPERM = 22, 38, 2, 435, 1
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, CLONE3), (0x06, 0, 0, 0x50000 | EPERM), (0x06, 0, 0, 0x7FFF0000)]
program = Program(len(rules), (Instruction * len(rules))(*rules))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(SECCOMP, FILTER, ctypes.byref(program)):
    sys.exit(99)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Run a command as in a container of an old Docker, whose profile refuses what a newer C library starts threads with."""


def test_a_sandbox_in_which_no_thread_starts_is_named(run) -> None:
    inside = (sys.executable, "-c", NO_THREADS)
    start = "import threading; threading.Thread(target=bool).start()"
    tried = subprocess.run([*inside, sys.executable, "-c", start], capture_output=True, check=False)
    if tried.returncode != 1:
        pytest.skip("there is no seccomp here, or the C library starts threads without clone3")
    launch = run(run.scripts / "hello.py", inside=inside)
    _, errors = launch.end_with(ExitCode.INFRASTRUCTURE, timeout=30)
    (line,) = errors.splitlines()
    assert line.startswith("dlrover-run: No thread can be started here (can't start new thread): ")


SPARE = "import os\nfor name in dir(os):\n    if name.startswith(('memfd', 'MFD_', 'pidfd')):\n        delattr(os, name)\n"
"""A `sitecustomize` that makes an interpreter as those of uv and conda are, which are built for an old C library."""


def test_an_interpreter_for_an_old_c_library_runs_a_job(run) -> None:
    (here := run.directory / "site").mkdir()
    (here / "sitecustomize.py").write_text(SPARE)
    launch = run(
        run.scripts / "hello.py", env={"PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    )
    assert launch.succeed() == "hello from rank 0 of 1\n"


def test_signals_that_the_parent_has_blocked_arrive(run, installed: tuple[str, str]) -> None:
    """A program that waits for signals in a thread of its own may start a job with all of them blocked."""
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    blocking = f"import os, signal, sys; {block}; os.execv(sys.argv[1], sys.argv[1:])"
    launcher = (sys.executable, "-c", blocking, *installed)
    assert run(run.scripts / "hello.py", launcher=launcher).succeed(30)
