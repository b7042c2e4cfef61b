"""``dlrover diagnose``: the verdict on a log, and on the rounds of a job."""

import io
import os

import msgspec
import pytest
from typer.testing import CliRunner

from dlrover.cli import diagnose, main
from dlrover.cli.run import report
from dlrover.errors import ConfigurationError
from dlrover.spec.events import Event, HangFound, JobEnded, WorkerFailed
from dlrover.spec.failure import Failure, FailureKind, Origin, Rule, Verdict
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import JobDir, MasterConfig
from dlrover.spec.outcome import Outcome

OUT_OF_MEMORY = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ann/train.py", line 42, in step
[rank0]:     loss.backward()
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
OWN = Rule(
    cause="license_server",
    types=("LicenseError",),
    origin=Origin.INFRASTRUCTURE,
    title="got no license",
    advice="Ask for more.",
)


BEFORE = {
    "lines of a worker": "step 1\nFault:    user code\nstep 2\n",
    "the output of dlrover diagnose": "rank 0 was killed\nFault:    infrastructure\nLog:      a.log\n",
    "a screen that was cut off": "rank 0 was killed\nFault:    infrastructure\nEvidence: none\n\nstep",
}


@pytest.mark.parametrize("before", ["", *BEFORE.values()], ids=["nothing", *BEFORE])
@pytest.mark.parametrize("colour", [False, True])
def test_the_output_of_dlrover_run_has_its_verdict_in_the_last_screen(tmp_path, colour, before):
    """It knows more than the lines above it, in which only the peer of the rank that left has a traceback."""
    verdict = Verdict(
        title="rank 1 left with exit code 3 (the program called exit)",
        origin=Origin.USER,
        evidence="/home/ann/train.py:4: in <module>: sys.exit(3)",
        advice="Look in the program.",
    )
    outcome = Outcome(
        exit_code=1,
        reason="--max-restarts is 0",
        verdict=verdict,
        seconds=3.0,
        job_dir=str(tmp_path),
    )
    screen = report.render(outcome, width=80, colour=colour)
    log = tmp_path / "a.log"
    log.write_text(
        f"{before}dlrover: rank 0 lost a peer: RuntimeError: Connection closed by peer\n{screen}\n"
    )
    assert diagnose.of_log(str(log), ()).verdict == verdict
    assert "Action:" not in diagnose.render(diagnose.of_log(str(log), ()))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OUT_OF_MEMORY, "device_oom"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "device_oom"),
        ("Out of memory: Killed process 7 (python) total-vm:1kB\n", "host_oom"),
        ("step 1\nKilled\n", "killed"),
        ("slurmstepd: error: *** JOB 1 ON a CANCELLED AT x DUE TO PREEMPTION ***", "preempted"),
        (
            "  exitcode  : -11 (pid: 7)\n  traceback : Signal 11 (SIGSEGV) received by PID 7",
            "segfault",
        ),
        ("./run.sh: line 1: 7 Illegal instruction (core dumped)", "illegal_instruction"),
        ("Illegal instruction (core dumped)", "illegal_instruction"),
        ("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGSEGV: 11>.", "segfault"),
        ("The node was low on resource: ephemeral-storage.", "evicted"),
        (
            "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
            "collective_timeout",
        ),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "dns"),
        ("KeyError: 'x'\n", "exception"),
        ("Exception: who knows\n", "exception"),
        ("all is well\n", "exit"),
    ],
)
def test_the_cause_is_read_out_of_a_log(tmp_path, text, cause):
    log = tmp_path / "a.log"
    log.write_text(text)
    found = diagnose.of_log(str(log), ())
    assert (found.verdict.cause, found.source) == (cause, str(log))
    assert "-1" not in found.verdict.title


def test_the_sentence_speaks_of_the_program(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(OUT_OF_MEMORY)
    text = diagnose.render(diagnose.of_log(str(log), ()))
    assert text.splitlines()[0].startswith("The program ran out of memory on the device (OutOfMem")
    assert "Evidence: /home/ann/train.py:42: in step: loss.backward()\n          OutOfM" in text
    assert text.splitlines()[-1] == f"Log:      {log}"


def test_kernel_lines_in_a_log_are_facts(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(
        "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\nAborted (core dumped)\n"
    )
    assert diagnose.of_log(str(log), ()).verdict.cause == "device_lost"


def test_only_the_end_of_a_huge_log_counts(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(
        "Segmentation fault\n" + "x" * 80 + "\n" * diagnose.LOG_BYTES + "KeyError: 'x'\n"
    )
    assert diagnose.of_log(str(log), ()).verdict.cause == "exception"


def test_rows_of_the_user_are_tried_first(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("LicenseError: none left\n")
    assert diagnose.of_log(str(log), (OWN,)).verdict.cause == "license_server"


def test_standard_input_is_read_where_no_file_is_named(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"of a stranger: \xff\nMemoryError: \n"), "utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    found = diagnose.of_log("", ())
    assert (found.verdict.cause, found.source) == ("host_memory", "standard input")


@pytest.mark.parametrize(
    ("content", "said"),
    [("  \n", "is empty; diagnose takes"), (None, "cannot be read: No such file")],
)
def test_what_is_no_log_is_said_in_a_sentence(tmp_path, content, said):
    log = tmp_path / "a.log"
    if content is not None:
        log.write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        diagnose.of_log(str(log), ())


# ---- jobs


def failure(rank: int, round_: int, time: float, exception: str, message: str = "") -> Failure:
    return Failure(
        id=f"{round_}.{rank}", kind=FailureKind.EXCEPTION, node_id=0, rank=rank, local_rank=rank,
        round=round_, time=time, exception=exception, message=message, log_path=f"/logs/{rank}",
    )  # fmt: skip


@pytest.fixture
def job_dir(tmp_path):
    """A job in which workers failed in two rounds; it began with a row of the user's."""
    found = JobDir(tmp_path)
    config = MasterConfig(job=JobSpec(name="job", diagnosis_rules=(OWN,)))
    found.job.write_bytes(msgspec.json.encode(config))
    said = Verdict(title="as it was", origin=Origin.UNKNOWN)
    bodies = [
        WorkerFailed(failure(1, 1, 2.0, "RuntimeError", "Connection closed by peer"), said),
        WorkerFailed(failure(0, 1, 3.0, "LicenseError"), said),
        WorkerFailed(failure(0, 2, 9.0, "ValueError"), said),
        JobEnded(1, "it failed"),
    ]
    events = [Event(n, float(n), body) for n, body in enumerate(bodies, 1)]
    found.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return found


def test_each_round_of_a_job_has_the_verdict_on_its_root_cause(job_dir):
    found = diagnose.of_job(job_dir, ())
    assert [(f.source, f.verdict.cause) for f in found] == [
        ("round 1, /logs/0", "license_server"),
        ("round 2, /logs/0", "exception"),
    ]


def test_a_round_that_hung_has_the_verdict_on_the_hang(job_dir):
    hang = HangFound(
        1, (3,), "read (data.py:9)", "rank 3 in read (data.py:9)", 200, "evidence/1.txt"
    )
    with job_dir.events.open("ab") as events:
        events.write(msgspec.json.encode(Event(9, 9.0, hang)) + b"\n")
    found = [(f.source, f.verdict.cause) for f in diagnose.of_job(job_dir, ())]
    assert ("round 1, evidence/1.txt", "hang") in found
    assert found[-1] == ("round 2, /logs/0", "exception")


def test_other_rows_than_those_that_a_job_began_with_may_be_tried(job_dir):
    other = msgspec.structs.replace(OWN, cause="other", types=("ValueError",))
    assert [f.verdict.cause for f in diagnose.of_job(job_dir, (other,))] == ["exception", "other"]


def test_a_directory_without_events_is_said_in_a_sentence(job_dir):
    job_dir.events.unlink()
    with pytest.raises(ConfigurationError, match="has no readable record of failures"):
        diagnose.of_job(job_dir, ())


def test_the_verb_prints_json(tmp_path, job_dir):
    result = CliRunner().invoke(
        main.app, ["diagnose", "--job-dir", str(job_dir.path), "-o", "json"]
    )
    assert result.exit_code == 0, result.output
    printed = msgspec.json.decode(result.output)
    assert [found["verdict"]["cause"] for found in printed] == ["license_server", "exception"]
    assert printed[0]["verdict"]["action"] == "restart"


def test_the_verb_prints_a_paragraph_for_each_round(job_dir):
    result = CliRunner().invoke(main.app, ["diagnose", "--job-dir", str(job_dir.path)])
    first, second = result.output.split("\n\n")
    assert first.startswith("rank 0 got no license on node 0\nCause:    license_server\n")
    assert second.startswith("rank 0 raised ValueError on node 0")


def test_a_job_in_which_no_worker_failed_is_said_in_a_sentence(job_dir):
    job_dir.events.write_bytes(
        msgspec.json.encode(Event(1, 1.0, JobEnded(0, "it succeeded"))) + b"\n"
    )
    asked = ["diagnose", "--job-dir", str(job_dir.path)]
    assert CliRunner().invoke(main.app, asked).output == (
        f"No worker failed or hung in {job_dir.path}; dlrover events shows what happened there.\n"
    )
    assert CliRunner().invoke(main.app, [*asked, "-o", "json"]).output == "[]\n"


def test_a_log_and_a_job_exclude_each_other(job_dir):
    result = CliRunner().invoke(main.app, ["diagnose", "some.log", "--job-dir", str(job_dir.path)])
    assert str(result.exception) == "some.log: excludes --job-dir; give the log file or the job."


def test_nothing_is_read_from_a_terminal_unasked(monkeypatch):
    ours, theirs = os.openpty()
    with open(theirs) as terminal, open(ours, "wb", buffering=0) as typed:
        monkeypatch.setattr("sys.stdin", terminal)
        with pytest.raises(
            ConfigurationError, match="takes a log file, --job-dir DIR, or a log on"
        ):
            diagnose.of_log("", ())
        typed.write(b"ValueError: typed\n\x04")
        assert diagnose.of_log("-", ()).source == "standard input"
