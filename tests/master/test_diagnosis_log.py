"""Logs as launchers pass them on: prefixes, signals, echoes, boilerplate."""

import signal

import pytest

from dlrover.master.diagnosis_rules import table
from dlrover.master.machine.diagnosis import log
from dlrover.master.machine.diagnosis.traceback import raised

BUG = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 9, in step
    raise ValueError("bad batch")
ValueError: bad batch
"""
ECHO = (
    "RuntimeError: [../gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.1]:4040\n"
)
LAUNCHER = """\
E0424 01:17:26.952000 5212 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/opt/conda/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def diagnosed(text: str) -> tuple[str, str]:
    verdict = table().diagnose_log(text)
    return verdict.cause, verdict.origin.value


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank3]: ",
        "[default3]:",
        "(Worker pid=7, ip=10.0.0.1) ",
        "2024-05-01T10:00:00.1Z stderr F ",
    ],
    ids=["none", "torch", "torchrun", "Ray", "container"],
)
def test_an_exception_is_read_behind_the_prefix_of_whoever_passed_it_on(prefix: str) -> None:
    text = "".join(f"{prefix}{line}\n" for line in BUG.splitlines())
    (found,) = raised(log.plain(text))
    assert (found.error, found.message, found.frames[0].line) == ("ValueError", "bad batch", 9)


@pytest.mark.parametrize("text", [BUG + ECHO, ECHO + BUG, BUG + ECHO + LAUNCHER, BUG + LAUNCHER])
def test_the_root_goes_before_its_echoes_and_its_launcher(text: str) -> None:
    assert diagnosed(text) == ("exception", "user code")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("traceback : Signal 9 (SIGKILL) received by PID 7", signal.SIGKILL),
        (
            "mpirun noticed that process rank 5 with PID 0 on node a exited on signal 11",
            signal.SIGSEGV,
        ),
        ("srun: error: n1: tasks 0-3: Segmentation fault (core dumped)", signal.SIGSEGV),
        ("['python', 'train.py'] exits with return code = -9", signal.SIGKILL),
        ("Container rank 0 status failed cmd ['python'] code -7 log ./w.0", signal.SIGBUS),
        ("process 3 terminated with signal SIGKILL", signal.SIGKILL),
        ("      Exit Code:    137", signal.SIGKILL),
        ("run.sh: line 14: 30331 Killed    python train.py", signal.SIGKILL),
        ("Received 15 death signal, shutting down workers", signal.SIGTERM),
        ("exitcode  : -15\nexitcode  : -6", signal.SIGABRT),
        ("Out of memory: Killed process 99 (python)", signal.SIGKILL),
        ("exited with exit code 1\nstep 137 of 143", 0),
        ("exitcode  : -250", 0),
    ],
)
def test_the_signal_that_a_launcher_tells_of(text: str, number: int) -> None:
    assert log.signal_in(text) == number


def test_what_an_exception_was_raised_beside_counts_where_nothing_else_is_known() -> None:
    beside = "\nDuring handling of the above exception, another exception occurred:\n\n"
    full = 'Traceback (most recent call last):\n  File "/a/site-packages/t.py", line 1, in s\nOSError: [Errno 28] No space left on device\n'
    library = 'Traceback (most recent call last):\n  File "/a/site-packages/t.py", line 2, in s\nEngineError: state 7\n'
    assert diagnosed(full + beside + library) == ("disk_full", "infrastructure")
    mistake = BUG.replace('raise ValueError("bad batch")', "batch[i]").replace("Value", "Index")
    assert diagnosed(full + beside + mistake) == ("exception", "user code")
    assert diagnosed(full + beside + BUG) == ("disk_full", "infrastructure")  # raised because of it


def test_a_carrier_is_read_as_what_it_carries() -> None:
    assert diagnosed("ray.exceptions.RayTaskError(KeyError): ray::f() (pid=1)\n")[0] == "exception"
    assert diagnosed("ray.exceptions.RayTaskError(ActorDiedError): ray::f()\n")[0] == "peer_lost"


def test_endless_lines_are_cut() -> None:
    text = log.plain("x" * 100_000 + "no space left on device\n\n\n\n\n")
    assert len(text) < 2 * log.LINE_LIMIT
    assert text.endswith("left on device\n\n")
