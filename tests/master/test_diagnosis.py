"""Verdicts on failures as they are reported, and the choice of the root cause among many."""

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.master import diagnosis
from dlrover.master.diagnosis import diagnose, is_echo, other_failures, root_cause
from dlrover.master.diagnosis_facts import is_user_file
from dlrover.master.diagnosis_rules import by_kind
from dlrover.spec.failure import Failure, FailureKind, Origin

TRAIN = "/home/ann/project/train.py"
USER, INFRASTRUCTURE, UNKNOWN = Origin.USER, Origin.INFRASTRUCTURE, Origin.UNKNOWN


LOADER_KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def failed(kind: FailureKind = FailureKind.SIGNAL, **facts: object) -> Failure:
    numbers = {"node_id": 3, "rank": 1, "local_rank": 1, "round": 0} | facts
    return Failure(**{"id": f"{numbers['rank']}", "kind": kind, **numbers})


def raised(exception: str, message: str = "", **facts: object) -> Failure:
    return failed(FailureKind.EXCEPTION, exception=exception, message=message, **facts)


def test_title_names_rank_and_node() -> None:
    assert diagnose(failed(signal=9)).title == "rank 1 was killed by SIGKILL (signal 9) on node 3"


def test_out_of_memory_killer() -> None:
    verdict = diagnose(failed(signal=9, oom_killed=True))
    assert verdict.title.startswith("rank 1 was killed by the kernel's out-of-memory killer")
    assert verdict.origin is INFRASTRUCTURE
    assert "more memory" in verdict.advice
    assert verdict.signature == "signal:SIGKILL:oom"
    assert diagnose(failed(signal=11, oom_killed=True)).signature == "signal:SIGSEGV"


@pytest.mark.parametrize(
    ("number", "name", "origin", "echo"),
    [
        (1, "SIGHUP", INFRASTRUCTURE, True),
        (2, "SIGINT", INFRASTRUCTURE, True),
        (4, "SIGILL", INFRASTRUCTURE, False),
        (8, "SIGFPE", USER, False),
        (10, "SIGUSR1", INFRASTRUCTURE, False),
        (24, "SIGXCPU", INFRASTRUCTURE, False),
        (31, "SIGSYS", UNKNOWN, False),
        (40, "SIG40", UNKNOWN, False),
    ],
)
def test_signals_are_decoded(number: int, name: str, origin: Origin, *, echo: bool) -> None:
    failure = failed(signal=number)
    verdict = diagnose(failure)
    assert f"{name} (signal {number})" in verdict.title
    assert (verdict.origin, is_echo(failure)) == (origin, echo)
    assert verdict.signature == f"signal:{name}"


@pytest.mark.parametrize(
    ("code", "title", "echo"),
    [
        (137, "a program that it ran was killed by SIGKILL (signal 9)", False),
        (143, "a program that it ran was asked to stop by SIGTERM (signal 15)", True),
        (255, "left with exit code 255 (the program called exit or os._exit)", False),
    ],
)
def test_exit_codes_of_wrappers(code: int, title: str, *, echo: bool) -> None:
    failure = failed(FailureKind.EXIT, exit_code=code)
    assert title in diagnose(failure).title
    assert is_echo(failure) is echo


def test_exit_code_2_without_a_usage_text_may_be_tried_again() -> None:
    assert not diagnose(failed(FailureKind.EXIT, exit_code=2, stderr_tail="usage high")).hopeless


@pytest.mark.parametrize(
    "last_words",
    ["/opt/venv/bin/python: No module named train", "SyntaxError: '(' was never closed"],
)
def test_a_program_that_python_cannot_load(last_words: str) -> None:
    failure = failed(FailureKind.EXIT, exit_code=1, stderr_tail=f"  File\n{last_words}\n")
    verdict = diagnose(failure)
    assert verdict.title == "rank 1 could not load the program (exit code 1) on node 3"
    assert (verdict.hopeless, verdict.evidence) == (True, last_words)


def test_a_failed_assertion_on_the_device_says_what_to_check() -> None:
    verdict = diagnose(raised("AcceleratorError", "CUDA error: device-side assert triggered"))
    assert "index and label" in verdict.advice


def test_long_messages_are_cut_in_titles() -> None:
    verdict = diagnose(raised("ValueError", "x" * 1000))
    assert len(verdict.title) < 200
    assert verdict.title.endswith("x…")


def test_an_exit_code_of_the_programs_own_is_not_explained_by_a_traceback() -> None:
    stderr = (
        f'Traceback (most recent call last):\n  File "{TRAIN}", line 1, in f\nValueError: bad\n'
    )
    assert diagnose(failed(FailureKind.EXIT, exit_code=1, stderr_tail=stderr)).signature == (
        "exception:ValueError:train.py:f:1"
    )
    assert diagnose(failed(FailureKind.EXIT, exit_code=4, stderr_tail=stderr)).signature == "exit:4"


def test_a_logged_traceback_of_a_thread_does_not_explain_an_exit() -> None:
    thread = f'Exception in thread Thread-1:\nTraceback (most recent call last):\n  File "{TRAIN}"'
    stderr = f"{thread}, line 9, in work\n    1 / 0\nZeroDivisionError: division by zero\nno data\n"
    verdict = diagnose(failed(FailureKind.EXIT, exit_code=1, stderr_tail=stderr))
    assert verdict.signature == "exit:1"
    assert verdict.evidence == "no data"


@pytest.mark.parametrize(
    ("message", "origin", "hopeless"),
    [
        ("[Errno 2] No such file or directory: 'trainer'", USER, True),
        ("[Errno 11] Resource temporarily unavailable", INFRASTRUCTURE, False),
    ],
)
def test_spawn(message: str, origin: Origin, *, hopeless: bool) -> None:
    verdict = diagnose(failed(FailureKind.SPAWN, message=message))
    assert verdict.title.startswith("rank 1 could not be started on node 3: ")
    assert verdict.title.endswith(message)
    assert (verdict.origin, verdict.hopeless, verdict.evidence) == (origin, hopeless, message)
    assert verdict.signature == "spawn"


@pytest.mark.parametrize(
    ("failure", "origin", "echo"),
    [
        (
            raised("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
            USER,
            False,
        ),
        (raised("RuntimeError", "NPU out of memory. Tried to allocate 2.00 GiB"), USER, False),
        (raised("torch.AcceleratorError", "CUDA error: device-side assert triggered"), USER, False),
        (
            raised("RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
            INFRASTRUCTURE,
            False,
        ),
        (
            raised(
                "torch.distributed.DistBackendError",
                "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a "
                "network error, NCCL version 2.26.2\nncclRemoteError: A call failed",
            ),
            INFRASTRUCTURE,
            True,
        ),
        (
            raised(
                "torch.distributed.DistBackendError",
                "NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on 1b000",
            ),
            USER,
            False,
        ),
        (
            raised("ConnectionResetError", "[Errno 104] Connection reset by peer"),
            INFRASTRUCTURE,
            False,
        ),
        (
            failed(
                signal=6,
                stderr_tail="[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
            ),
            INFRASTRUCTURE,
            True,
        ),
        (
            raised(
                "ConnectionResetError",
                traceback='  File "/opt/venv/site-packages/torch/distributed/rpc/api.py", line 5, in f',
            ),
            INFRASTRUCTURE,
            True,
        ),
        (raised("OSError", "[Errno 24] Too many open files: 'x'"), INFRASTRUCTURE, False),
        (raised("RuntimeError", LOADER_KILLED), UNKNOWN, False),
        (raised("RuntimeError", LOADER_KILLED, oom_killed=True), INFRASTRUCTURE, False),
        (raised("RuntimeError", "shape mismatch"), USER, False),
    ],
)
def test_devices_and_collectives(failure: Failure, origin: Origin, *, echo: bool) -> None:
    verdict = diagnose(failure)
    assert (verdict.origin, verdict.hopeless, is_echo(failure)) == (origin, False, echo)


def test_a_missing_data_file_is_no_missing_program() -> None:
    trace = (
        f'Traceback (most recent call last):\n  File "{TRAIN}", line 3, in load\n    open(name)\n'
    )
    missing = raised(
        "FileNotFoundError", "[Errno 2] No such file or directory: 'x'", traceback=trace
    )
    assert not diagnose(missing).hopeless


def test_frames_of_a_cause_are_not_those_of_the_exception() -> None:
    """As with python -m and a module that does not exist: no frame is left of the import itself."""
    chain = (
        'Traceback (most recent call last):\n  File "<frozen importlib.util>", line 94, in find_spec\n'
        "ModuleNotFoundError: No module named 'no'\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "ImportError: Error while finding module specification\n"
    )
    verdict = diagnose(raised("ImportError", "Error while finding", traceback=chain))
    assert verdict.evidence == "ImportError: Error while finding"
    assert verdict.signature == "exception:ImportError"


def test_what_was_being_handled_is_no_cause() -> None:
    handled = (
        "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        f'Traceback (most recent call last):\n  File "{TRAIN}", line 3, in load\n    1 / 0\n'
        "ZeroDivisionError: division by zero\n"
    )
    verdict = diagnose(raised("ZeroDivisionError", "division by zero", traceback=handled))
    assert verdict.origin is USER


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/home/ann/project/train.py", True),
        ("train.py", True),
        ("/home/ann/library/python_code/model.py", True),
        ("/usr/lib/python3.10/runpy.py", False),
        ("/opt/conda/lib/python3.12/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/srv/libraries/site-packages/torch/optim/adam.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("/home/ann/dlrover/src/dlrover/agent/bootstrap.py", False),
        ("/home/ann/dlrover/examples/train.py", True),
    ],
)
def test_is_user_file(path: str, *, own: bool) -> None:
    assert is_user_file(path) is own


# ---- root cause


def echo(rank: int, time: float, **facts: object) -> Failure:
    return raised("RuntimeError", "Connection closed by peer", rank=rank, time=time, **facts)


def bug(rank: int, time: float, **facts: object) -> Failure:
    return raised("ValueError", "bad batch", rank=rank, time=time, **facts)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([bug(0, 10.0), bug(1, 9.0)], 1),
        ([bug(0, 10.0), echo(1, 9.0)], 0),
        ([bug(0, 9.0 + diagnosis.ECHO_WINDOW + 1), echo(1, 9.0)], 1),
        ([bug(0, 10.0, round=1), echo(1, 9.0)], 1),
        ([echo(0, 10.0), echo(1, 9.0), echo(2, 9.5)], 1),
        ([echo(0, 1.0), bug(3, 3.0), bug(2, 2.0)], 2),
        ([failed(signal=15, rank=0, time=1.0), failed(signal=9, rank=1, time=2.0)], 1),
        ([bug(3, 1.0), bug(2, 1.0)], 2),
    ],
)
def test_root_cause(failures: list[Failure], rank: int) -> None:
    assert root_cause(failures).rank == rank


def test_root_cause_needs_a_failure() -> None:
    with pytest.raises(ValueError, match="at least one failure"):
        root_cause([])


KINDS = (
    bug(0, 0.0),
    echo(0, 0.0),
    failed(signal=9, rank=0),
    failed(signal=15, rank=0),
    failed(FailureKind.EXIT, exit_code=143, rank=0),
)
some_failures = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 1), st.integers(0, 30)),
    min_size=1,
    max_size=8,
).map(
    lambda rows: [
        msgspec.structs.replace(kind, id=str(number), rank=rank, round=round_, time=float(time))
        for number, (kind, rank, round_, time) in enumerate(rows)
    ]
)


@settings(max_examples=50)
@given(some_failures.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows))))
def test_root_cause_is_one_of_them_in_whatever_order(
    orders: tuple[list[Failure], list[Failure]],
) -> None:
    failures, shuffled = orders
    root = root_cause(failures)
    assert root in failures
    assert root_cause(shuffled) is root


@settings(max_examples=50)
@given(some_failures)
def test_no_echo_wins_over_a_failure_nearby(failures: list[Failure]) -> None:
    root = root_cause(failures)
    if is_echo(root):
        near = [f for f in failures if 0 <= f.time - root.time <= 5 and f.round == root.round]
        assert all(is_echo(f) for f in near)


def test_other_failures_in_order_of_time() -> None:
    failures = [bug(0, 3.0), bug(1, 2.0), echo(2, 1.0)]
    lines = other_failures(failures, failures[1])
    assert [line.split(" on node")[0] for line in lines] == [
        "rank 2 lost the connection to its peers (RuntimeError)",
        "rank 0 raised ValueError",
    ]
    assert len(other_failures(failures, None)) == 3


def test_other_failures_are_counted_beyond_eight() -> None:
    failures = [bug(rank, float(rank)) for rank in range(12)]
    lines = other_failures(failures, failures[0])
    assert len(lines) == 9
    assert lines[0].startswith("rank 1 ")
    assert lines[-1] == "and 3 more"
    assert len(other_failures(failures[:9], failures[0])) == 8


# ---- any text


marks = st.sampled_from(
    [
        "Traceback (most recent call last):",
        f'  File "{TRAIN}", line 1, in f',
        "    code",
        "ValueError: x",
        "Current thread 0x1 (most recent call first):",
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
        "usage: x",
        "{place} {0} %s",
    ]
)
texts = st.lists(marks | st.text(max_size=8), max_size=8).map("\n".join)


@given(st.sampled_from(FailureKind), st.none() | st.integers(-300, 300), texts, texts)
def test_any_failure_gets_a_verdict(
    kind: FailureKind, number: int | None, said: str, written: str
) -> None:
    failure = failed(
        kind,
        exit_code=number,
        signal=number,
        exception=said,
        message=said,
        traceback=written,
        stderr_tail=written,
    )
    verdict = diagnose(failure)
    assert verdict.title.startswith("node 3 " if kind is FailureKind.NODE else "rank 1 ")
    assert len(verdict.title.splitlines()) == 1
    assert verdict.advice
    assert verdict.signature


CONDITIONS = (
    "types", "codes", "signals", "text", "facts", "raised_in", "before_first_step", "oom_killed",
)  # fmt: skip


def test_every_kind_ends_with_a_rule_that_fits_all() -> None:
    assert by_kind().keys() == set(FailureKind)
    for rules in by_kind().values():
        assert not any(getattr(rules[-1], condition) for condition in CONDITIONS)
        for rule in rules[:-1]:
            assert any(getattr(rule, condition) for condition in CONDITIONS), rule
