"""Processes: orphans are ended and reaped, lifelines notice a death."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from dlrover._util import procs
from dlrover.agent.workers import evidence
from dlrover.agent.workers.membership import is_stopped
from tests import waiting

# A script that becomes a subreaper, leaves an orphan in a session of its own, and ends it.
ORPHAN = textwrap.dedent(
    """
    import subprocess, sys, time
    from dlrover._util import procs

    procs.become_subreaper()
    parent = subprocess.Popen(
        [sys.executable, "-c",
         "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], start_new_session=True);"
         "print(p.pid, flush=True)"],
        stdout=subprocess.PIPE, text=True)
    orphan = int(parent.stdout.readline())
    parent.wait()
    assert procs.children() == [orphan], procs.children()
    assert procs.end_orphans({orphan}, 5.0) == []
    assert procs.start_time(orphan) > 0, "an own child must be left alone"
    assert procs.end_orphans((), 5.0) == []
    assert procs.start_time(orphan) == 0, "the orphan must be gone"
    print("done")
    """
)


@pytest.mark.slow
def test_orphans_are_killed_and_reaped():
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN], check=False, capture_output=True, text=True
    )
    assert result.stdout.strip() == "done", result.stderr


def test_start_time_tells_processes_apart():
    assert procs.start_time(os.getpid()) > 0
    assert procs.start_time(2**22 + 1) == 0


# A script that becomes a subreaper, and kills a process with shared memory and one that has left its group.
TRACKED = textwrap.dedent(
    """
    import os, subprocess, sys
    from dlrover._util import procs

    procs.become_subreaper()
    program = subprocess.Popen(
        [sys.executable, "-c",
         "import os, subprocess, time; from multiprocessing import shared_memory;"
         "memory = shared_memory.SharedMemory(create=True, size=64);"
         "subprocess.Popen(['sleep', '60']); subprocess.Popen(['sleep', '60'], start_new_session=True);"
         "print(memory.name, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE, text=True, start_new_session=True)
    memory = os.path.join("/dev/shm", program.stdout.readline().strip())
    assert os.path.exists(memory)
    procs.kill_group(program.pid)
    program.wait()
    assert procs.end_orphans((), 5.0) == []
    assert procs.wait_for_cleaners(5.0) == []
    assert procs.children() == []
    assert not os.path.exists(memory)
    print("done")
    """
)


@pytest.mark.slow
def test_what_cleans_up_after_a_killed_group_may_do_so():
    result = subprocess.run(
        [sys.executable, "-c", TRACKED], check=False, capture_output=True, text=True
    )
    assert result.stdout.strip() == "done", result.stderr


# A program with a tracker and a torch_shm_manager, and two processes that only look like these.
GROUP = """
import os, signal, subprocess, sys
fd = os.dup(0)
tracker = f"from multiprocessing.resource_tracker import main; main({fd})"  # as joblib's
subprocess.Popen([sys.executable, "-c", tracker], pass_fds=[fd])
subprocess.Popen(["/torch/bin/torch_shm_manager", "60"], executable="/bin/sleep")
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *sys.argv[1:]])
print("started", flush=True)
signal.pause()
"""
LIKE_A_TRACKER = ["torch_shm_manager_repro/train.py", "from a.resource_tracker import main;"]


class Group:
    """The processes of a program in a group of its own."""

    def __init__(self, code: str) -> None:
        command = [sys.executable, "-c", code, *LIKE_A_TRACKER]
        self.program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.program.stdout is not None
        assert self.program.stdout.readline() == b"started\n"

    def states(self) -> dict[int, str]:
        fields = {pid: procs.stat(pid) for pid in procs.pids()}
        leader = str(self.program.pid)
        return {pid: them[0] for pid, them in fields.items() if them and them[2] == leader}

    def run(self) -> set[int]:
        """Return the pids of those that have not ended."""
        return {pid for pid, state in self.states().items() if state not in "ZX"}


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(request.param)
    yield made
    os.killpg(made.program.pid, signal.SIGKILL)
    made.program.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("group", [GROUP], indirect=True)
def test_what_only_looks_as_if_it_cleans_up_is_killed(group: Group) -> None:
    procs.kill_group(group.program.pid)
    waiting.until(lambda: len(group.run()) == 2, 10)
    commands = [" ".join(procs.command(pid)) for pid in sorted(group.run())]
    assert "import main; main(" in commands[0]
    assert "torch_shm_manager 60" in commands[1]


class Killed(BaseException):
    """The end of the process that kills a group."""


def _killed(*_: object) -> None:
    raise Killed


ALONE = "import signal; print('started', flush=True); signal.pause()"


@pytest.mark.slow
@pytest.mark.parametrize("group", [ALONE, GROUP], indirect=True)
def test_a_killer_that_dies_while_it_looks_leaves_no_stopped_process(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stat", "pids", "command"):
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(procs, name, _killed)
            procs.kill_group(group.program.pid)
        assert "T" not in group.states().values()


@pytest.mark.slow
@pytest.mark.parametrize("kills", range(5))
@pytest.mark.parametrize("group", [GROUP], indirect=True)
def test_a_group_whose_killer_dies_has_its_leader(
    group: Group, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Whoever waits for the leader then kills the group again."""
    kill, sent = os.kill, []

    def send(*signal_to: int) -> None:
        if len(sent) == kills:
            raise Killed
        sent.append(kill(*signal_to))

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", send)
        with pytest.raises(Killed):
            procs.kill_group(group.program.pid)
    assert group.program.poll() is None
    procs.kill_group(group.program.pid)
    waiting.until(lambda: len(group.run()) == 2, 10)
    assert "T" not in group.states().values()


NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"caf\\xe9) R 1 (", 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_process_may_have_any_bytes_as_its_name():
    with subprocess.Popen(
        [sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "named\n"
        assert procs.parent(process.pid) == os.getpid()
        assert process.pid in procs.children()
        assert procs.runs(process.pid, procs.start_time(process.pid))
        assert not is_stopped(process.pid)
        (found,) = asyncio.run(evidence.collect([process.pid]))
        assert found.state == "S"
        process.stdin.close()


def test_kill_skips_what_is_gone():
    process = subprocess.Popen(["true"])
    process.wait()
    procs.kill([process.pid])
    procs.kill_group(process.pid)


def test_lifeline_closes_with_its_holder():
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from dlrover._util.procs import Lifeline\nimport sys\n"
            "line = Lifeline()\nprint(line.read_fd, flush=True)\nsys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    read_fd = os.open(f"/proc/{holder.pid}/fd/{int(holder.stdout.readline())}", os.O_RDONLY)

    async def wait() -> None:
        gone = asyncio.Event()
        procs.Lifeline.watch(read_fd, gone.set)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(gone.wait(), 0.05)
        holder.send_signal(signal.SIGKILL)
        await asyncio.wait_for(gone.wait(), 5.0)

    asyncio.run(wait())
    holder.communicate()
    os.close(read_fd)


@pytest.mark.parametrize(
    ("status", "words"),
    [(3 << 8, "it left with exit code 3"), (9, "it was killed by SIGKILL")],
)
def test_exit_reason(status: int, words: str):
    assert procs.exit_reason(status) == words


def test_children_that_run_a_module_are_found_and_ended():
    child = subprocess.Popen([sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"])
    until_it_runs = time.monotonic() + 10
    while child.pid not in procs.running("http.server"):
        assert time.monotonic() < until_it_runs
    assert child.pid not in procs.running("http")
    asyncio.run(procs.end([child.pid], 5.0))
    assert procs.start_time(child.pid) == 0
    child.wait()


def test_a_process_that_was_not_reaped_does_not_run():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = procs.start_time(child.pid)
    try:
        assert procs.runs(child.pid, started)
        assert not procs.runs(child.pid, started + 1)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert procs.start_time(child.pid) == started
        assert not procs.runs(child.pid, started)
    finally:
        child.kill()
        child.communicate()
    assert not procs.runs(child.pid, started)
