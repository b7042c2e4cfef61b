"""What the last screen tells of a failure, next to what torchrun tells of the same one."""

import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

USER, INFRASTRUCTURE, UNKNOWN = "user code", "infrastructure", "undetermined"
UNEXPLAINED = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
"""What torchrun says instead of a traceback, for programs without its decorator."""


class Expected(NamedTuple):
    """Regular expressions; the last screen's, unless it says torchrun."""

    title: str
    fault: str
    code: ExitCode
    torchrun: str = ""
    """What torchrun says of the first failure; empty: it is not asked, for it says the same of each of a kind."""
    evidence: str = ""
    detail: str = ""
    """A line of the traceback or of standard error."""
    next: str = ""
    restarts: int = 0


EXPECTED = {
    "exception": Expected(
        title="rank 1 raised ValueError on node 0 .*: the batch is empty",
        fault=USER,
        code=ExitCode.USER_CODE,
        torchrun=UNEXPLAINED,
        evidence=r'fails.py:\d+: in exception: raise ValueError\("the batch is empty"\)',
        detail="^ValueError: the batch is empty",
        next=r"Correct the program at fails.py:\d+",
    ),
    "leave": Expected(
        title="rank 1 left with exit code 3",
        fault=USER,
        code=ExitCode.USER_CODE,
        evidence=r"fails.py:\d+: in leave: os._exit\(3\)",
        detail="^leaving without a word",
        next="Look in the program for what leaves with this code",
    ),
    "killed": Expected(
        title=r"rank 1 was killed by SIGKILL \(signal 9\)",
        fault=INFRASTRUCTURE,
        code=ExitCode.NO_PROGRESS,
        torchrun="Signal 9 .SIGKILL. received by PID",
        evidence="who sent it is not known",
        next="who sent it",
        restarts=3,
    ),
    "segfault": Expected(
        title=r"rank 1 crashed with SIGSEGV \(signal 11\).*native code touched memory",
        fault=UNKNOWN,
        code=ExitCode.NO_PROGRESS,
        evidence=r"in string_at, called at .*fails.py:\d+: in segfault",
        detail="^Fatal Python error: Segmentation fault",
        restarts=3,
    ),
    "bus_error": Expected(
        title=r"rank 1 crashed with SIGBUS \(signal 7\).*memory backed by a file",
        fault=INFRASTRUCTURE,
        code=ExitCode.NO_PROGRESS,
        evidence=r"fails.py:\d+: in bus_error",
        detail="^Fatal Python error: Bus error",
        next="/dev/shm",
        restarts=3,
    ),
    "no_memory": Expected(
        title=r"rank 1 ran out of memory \(MemoryError\)",
        fault=USER,
        code=ExitCode.USER_CODE,
        evidence=r"fails.py:\d+: in no_memory",
        detail="^MemoryError",
        next="smaller batch",
    ),
    "missing_module": Expected(
        title="rank 1 raised ModuleNotFoundError .*: No module named 'no_such_module_anywhere'",
        fault=USER,
        code=ExitCode.USER_CODE,
        detail="^ModuleNotFoundError: No module named",
        next="Install the module",
    ),
}


class Screen:
    """The last screen, taken apart."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        self.title = next(line for line in reversed(lines) if line.startswith("rank "))
        self.lines = lines[lines.index(self.title) + 1 :]

    def field(self, name: str) -> str:
        found = [line for line in self.lines if line.startswith(f"{name}:")]
        return found[0].partition(":")[2].strip() if found else ""

    def has_line(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)


def check_screen(stderr: str, expected: Expected) -> Screen:
    screen = Screen(stderr)
    assert re.match(expected.title, screen.title)
    assert screen.field("Fault") == expected.fault
    assert re.search(expected.evidence, screen.field("Evidence"))
    assert re.search(expected.next, screen.field("Next"))
    assert not expected.detail or screen.has_line(expected.detail)
    restarts = f"{expected.restarts} restart{'' if expected.restarts == 1 else 's'}"
    assert screen.field("Ended").endswith(restarts)
    return screen


@pytest.mark.torch
@pytest.mark.parametrize("kind", EXPECTED)
def test_the_first_failing_rank_is_explained(run, kind: str) -> None:
    expected = EXPECTED[kind]
    command = ["--nproc-per-node", "2", run.scripts / "fails.py", kind]
    torchrun = run.torchrun(*command) if expected.torchrun else None
    ours = run(*command)
    _, stderr = ours.end_with(expected.code, timeout=30)
    screen = check_screen(stderr, expected)
    log = Path(screen.field("Log").partition(" on node ")[0])
    assert log.exists()
    # The launcher's own lines may come between those of a worker.
    assert set(log.read_text().splitlines()) <= set(stderr.splitlines())
    assert screen.field("Job") == str(ours.job_dir)
    recovered = [event.sentence() for event in ours.events_of(events.RestartDecided)]
    assert len(recovered) == expected.restarts

    if torchrun is not None:
        _, stderr = torchrun.end_with(1, timeout=30)
        root_cause = stderr.partition("Root Cause (first observed failure)")[2]
        assert "error_file: <N/A>" in root_cause
        assert re.search(expected.torchrun, root_cause)


@pytest.mark.torch
def test_a_rank_that_leaves_before_the_others_is_why_they_fail(run) -> None:
    launch = run("--nproc-per-node=2", run.scripts / "leaves_early.py")
    _, stderr = launch.end_with(ExitCode.USER_CODE)
    expected = Expected(
        title="rank 1 lost its peers, which had ended without an error",
        fault=USER,
        code=ExitCode.USER_CODE,
        evidence="^rank 0 ended without an error$",
        next="Let all ranks call equal collectives",
    )
    check_screen(stderr, expected)


def test_a_program_that_fails_while_a_thread_of_it_goes_on_is_explained(run) -> None:
    program = """
        import threading, time
        threading.Thread(target=time.sleep, args=(3600,)).start()
        {}["x"]
    """
    script = run.directory / "lingers.py"
    script.write_text(textwrap.dedent(program))
    launch = run("--shutdown-timeout=1", script)
    _, stderr = launch.end_with(ExitCode.USER_CODE, timeout=20)
    expected = Expected(
        title="rank 0 raised KeyError",
        fault=USER,
        code=ExitCode.USER_CODE,
        evidence=r"lingers.py:\d+: in <module>",
        next=r"Correct the program at lingers.py:\d+",
    )
    check_screen(stderr, expected)


def test_a_rank_that_gives_up_on_a_collective_says_where_the_one_was_that_did_not_join_it(
    run,
) -> None:
    program = """
        import os, pathlib, time
        here = pathlib.Path(__file__).parent / "here"
        if os.environ["RANK"] == "1":
            here.touch()
            time.sleep(3600)
        while not here.exists():
            time.sleep(0.02)
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")
    """
    script = run.directory / "waits.py"
    script.write_text(textwrap.dedent(program))
    launch = run("--output=json", "--nproc-per-node=2", script)
    stdout, _ = launch.end_with(ExitCode.USER_CODE)  # its own words, not those of PyTorch
    (fact,) = json.loads(stdout)["failure"]["node_facts"]
    assert re.fullmatch(r"did not join the collective: rank 1 in <module> \(waits.py:6\)", fact)


def test_the_last_screen_is_there_as_json(run) -> None:
    launch = run("--output=json", "--nproc-per-node=2", run.scripts / "fails.py", "odd_name")
    stdout, _ = launch.end_with(ExitCode.USER_CODE)
    outcome = json.loads(stdout)
    assert outcome["exit_code"] == ExitCode.USER_CODE
    assert outcome["failure"]["rank"] == 1
    assert outcome["failure"]["exception"] == "ValueError"
    # The name in it is no UTF-8, which is no reason to report nothing.
    assert outcome["failure"]["traceback"].endswith("ValueError: caf? is damaged\n")
    assert outcome["verdict"]["origin"] == USER


def test_a_program_of_another_language_is_explained(run) -> None:
    script = 'if [ "$RANK" = 1 ]; then echo "no data" >&2; exit 9; fi; exec sleep 60'
    launch = run("--nproc-per-node=2", "--no-python", "sh", "-c", script)
    code = ExitCode.NO_PROGRESS  # on one host nothing tells the program from the machine
    _, stderr = launch.end_with(code)
    expected = Expected("rank 1 left with exit code 9", UNKNOWN, code, restarts=3)
    assert check_screen(stderr, expected).has_line("^no data")


@pytest.fixture
def memory_group(tmp_path: Path):
    """A control group with little memory; skips where this process may not make one."""
    group = Path("/sys/fs/cgroup/memory", f"dlrover-test-{os.getpid()}")
    limit = group / "memory.limit_in_bytes"
    try:
        group.mkdir()
        limit.write_text(str(400 << 20))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    yield group
    group.rmdir()


def test_a_kill_for_lack_of_memory_is_told_from_other_kills(run, memory_group: Path) -> None:
    inside = ["sh", "-c", f'echo $$ > {memory_group}/cgroup.procs; exec "$@"', "sh"]
    launch = run("--nproc-per-node=2", run.scripts / "fails.py", "out_of_memory", inside=inside)
    _, stderr = launch.end_with(ExitCode.NO_PROGRESS, timeout=40)
    expected = Expected(
        title="rank 1 was killed by the kernel's out-of-memory killer",
        fault=INFRASTRUCTURE,
        code=ExitCode.NO_PROGRESS,
        restarts=3,
    )
    check_screen(stderr, expected)


def test_what_workers_print_goes_where_standard_output_goes(run) -> None:
    """Only the status line and the faults are for the terminal, if that is standard error alone."""
    launch = run("--nproc-per-node=2", run.scripts / "hello.py", terminal=True)
    stdout, stderr = launch.end_with(ExitCode.SUCCESS)
    assert sorted(stdout.splitlines()) == [f"hello from rank {rank} of 2" for rank in range(2)]
    assert "hello" not in stderr
    assert "The job succeeded" in stderr


def test_a_restart_is_shown_even_if_the_job_ends_before_its_master_is_reached(run) -> None:
    """The console asks for progress; a job of a second can be over before the first answer."""
    late = (
        sys.executable,
        "-c",
        "import sys\n"
        "from dlrover.cli.run import progress, run\n"
        "progress.RETRY_DELAY = 3600.0\n"
        "sys.exit(run.main())",
    )
    launch = run(
        "--job-dir", run.directory / "run" / "job", "--nproc-per-node=2", "--max-restarts=1",
        run.scripts / "fails.py", "exception", launcher=late,
    )  # fmt: skip
    _, stderr = launch.end_with(ExitCode.USER_CODE)
    assert stderr.count("dlrover: Restart 1: rank 1 raised ValueError") == 1
