"""Verdicts on failures as they are reported, and the choice of the root cause among many."""

import time

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.master.diagnosis_rules import table
from dlrover.master.machine.diagnosis import diagnosis
from dlrover.master.machine.diagnosis.traceback import HEADER, is_user_file
from dlrover.spec.failure import TEXT_LIMIT, Failure, FailureKind, Origin, Rule

TABLE = table()
ASSERTIONS = "assertion  failed" * 250
BLANKS = "\n".join([" " * 1980] * 3)
diagnose = TABLE.diagnose


def is_echo(failure: Failure) -> bool:
    return diagnose(failure).echo


def root_cause(failures: list[Failure]) -> Failure:
    return diagnosis.root_cause([TABLE.failed(failure) for failure in failures]).failure


def other_failures(failures: list[Failure], root: Failure | None) -> tuple[str, ...]:
    reports = [TABLE.failed(failure) for failure in failures]
    return diagnosis.other_failures(reports, TABLE.failed(root) if root else None)


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


def test_a_title_ends_without_a_full_stop_as_a_part_of_sentences():
    facts = {"kind": FailureKind.EXCEPTION, "exception": "ValueError"}
    titles = [diagnose(failed(**facts, message=m)).title for m in ("No data.", "No data...")]
    assert [title.rpartition(": ")[2] for title in titles] == ["No data", "No data..."]


def test_what_a_program_wrote_controls_no_terminal() -> None:
    evil = "bad\x1b]0;title\x07\x1b[2J\x9b2J\x08 end"
    for failure in (
        raised("ValueError", evil),
        raised(evil, "end"),
        failed(signal=11, stderr_tail=evil, hostname=evil),
        failed(FailureKind.NODE, message=evil),
    ):
        verdict = diagnose(failure)
        shown = f"{verdict.title}\n{verdict.evidence}\n{verdict.advice}"
        assert all(line.isprintable() for line in shown.split("\n")), shown
        assert "end" in shown


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
        (255, "left with exit code 255", False),
    ],
)
def test_exit_codes_of_wrappers(code: int, title: str, *, echo: bool) -> None:
    failure = failed(FailureKind.EXIT, exit_code=code)
    assert title in diagnose(failure).title
    assert is_echo(failure) is echo


def test_exit_code_2_without_a_usage_text_may_be_tried_again() -> None:
    assert not diagnose(failed(FailureKind.EXIT, exit_code=2, stderr_tail="usage high")).hopeless


@pytest.mark.parametrize(
    ("last_words", "title"),
    [
        (
            "/opt/venv/bin/python: No module named train",
            "could not load the program (exit code 1) on node 3",
        ),
        (
            "SyntaxError: '(' was never closed",
            "could not compile the program (SyntaxError) on node 3: '(' was never closed",
        ),
    ],
)
def test_a_program_that_python_cannot_load(last_words: str, title: str) -> None:
    failure = failed(FailureKind.EXIT, exit_code=1, stderr_tail=f"  File\n{last_words}\n")
    verdict = diagnose(failure)
    assert verdict.title == f"rank 1 {title}"
    assert (verdict.hopeless, verdict.evidence) == (True, last_words)


def test_a_failed_assertion_on_the_device_says_what_to_check() -> None:
    verdict = diagnose(raised("AcceleratorError", "CUDA error: device-side assert triggered"))
    assert "index and label" in verdict.advice


def test_checkpoints_that_are_lost_are_not_looked_for_again() -> None:
    verdict = diagnose(
        raised("dlrover.errors.CheckpointsLostError", "Step 400 was saved to memory")
    )
    assert (verdict.origin, verdict.hopeless) == (INFRASTRUCTURE, True)
    assert "start_afresh" in verdict.advice


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
            UNKNOWN,
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
    assert verdict.signature == "exception:ImportError:error while finding"


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
    "types", "codes", "signals", "text", "facts", "raised_in", "own_code", "before_first_step", "oom_killed",
)  # fmt: skip
DEFAULTS = Rule(cause="x", origin=Origin.USER, title="x", advice="x")


def test_every_kind_ends_with_a_rule_that_fits_all() -> None:
    for kind in FailureKind:
        rules = [rule for rule in TABLE.rules if rule.is_for(kind)]
        for rule in rules:
            named = [c for c in CONDITIONS if getattr(rule, c) != getattr(DEFAULTS, c)]
            assert (named == []) is (rule is rules[-1]), rule


# ---- whose code it was


def stack(*frames: tuple[str, str], error: str) -> str:
    lines = [f'  File "{file}", line 7, in f\n    {source}\n' for file, source in frames]
    return f"Traceback (most recent call last):\n{''.join(lines)}{error}\n"


LIBRARY = "/opt/venv/lib/python3.11/site-packages/engine/core.py"


@pytest.mark.parametrize(
    ("frames", "error", "origin"),
    [
        ([(TRAIN, 'raise EngineError("x")')], "EngineError", USER),
        ([(TRAIN, "engine.run()"), (LIBRARY, 'raise EngineError("x")')], "EngineError", UNKNOWN),
        ([(TRAIN, "engine.run()")], "RuntimeError", UNKNOWN),
        ([(TRAIN, "engine.run()"), (LIBRARY, "raise KeyError(name)")], "KeyError", USER),
        ([(LIBRARY, "raise KeyError(name)")], "KeyError", UNKNOWN),
        ([(TRAIN, "assert done")], "AssertionError", USER),
        ([(LIBRARY, "assert done")], "AssertionError", UNKNOWN),
        ([], "ValueError", USER),
        ([], "EngineError", UNKNOWN),
    ],
)
def test_the_program_is_at_fault_where_its_own_files_are(
    frames: list[tuple[str, str]], error: str, origin: Origin
) -> None:
    trace = stack(*frames, error=f"{error}: x") if frames else ""
    verdict = diagnose(raised(f"engine.{error}", "x", traceback=trace))
    assert (verdict.cause in ("exception", "assertion"), verdict.origin) == (True, origin)


def test_a_syntax_error_at_run_time_is_not_one_of_the_program() -> None:
    literal = (
        'Traceback (most recent call last):\n  File "'
        + TRAIN
        + '", line 3, in load\n    ast.literal_eval(x)\n'
        '  File "<unknown>", line 1\n    {"a":\n         ^\nSyntaxError: \'{\' was never closed\n'
    )
    verdict = diagnose(raised("SyntaxError", "'{' was never closed", traceback=literal))
    assert (verdict.cause, verdict.origin, verdict.hopeless) == ("exception", USER, False)
    assert "train.py:3" in verdict.advice


BOILERPLATE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("an illegal memory access was encountered", "illegal_address"),
        ("unspecified launch failure", "launch_failure"),
        ("device-side assert triggered", "device_assert"),
        ("uncorrectable ECC error encountered", "ecc"),
    ],
)
def test_what_torch_says_of_every_error_of_the_device_is_no_evidence(what: str, cause: str) -> None:
    message = f"CUDA error: {what}\n{BOILERPLATE}"
    assert diagnose(raised("torch.AcceleratorError", message)).cause == cause
    assert diagnose(failed(signal=6, stderr_tail=message)).cause == cause


def test_signatures_of_one_failure_are_equal_on_all_nodes() -> None:
    first = raised("EngineError", "state 7 at 0x7f00 in /data/a.bin", rank=1)
    second = raised("EngineError", "state 9 at 0x8e10 in /mnt/b.bin", rank=5)
    other = raised("EngineError", "phase 7 at 0x7f00 in /data/a.bin", rank=1)
    assert diagnose(first).signature == diagnose(second).signature != diagnose(other).signature


@pytest.mark.parametrize(
    "facts",
    [
        {"message": "a" * TEXT_LIMIT},
        {"traceback": f"{HEADER}\nEngineError: {chr(10)}module.A{'a' * 8000}!"},
        {"kind": FailureKind.EXIT, "exit_code": 1, "stderr_tail": f"exit code{BLANKS}!"},
        {
            "kind": FailureKind.SIGNAL,
            "signal": 6,
            "stderr_tail": f"Connection reset by peer\n{'_' * 9000}",
        },
        {
            "kind": FailureKind.SIGNAL,
            "signal": 6,
            "stderr_tail": f"device-side assert triggered\n{ASSERTIONS}",
        },
    ],
    ids=["word", "name", "blank", "line", "assertions"],
)
def test_a_long_word_takes_no_time(facts: dict[str, object]) -> None:
    """A text may be one word, such as a bar of progress; its time must not grow with the square of its length."""
    failure = failed(**({"kind": FailureKind.EXCEPTION, "exception": "EngineError"} | facts))
    diagnose(failure)  # compiles the expressions
    before = time.process_time()
    diagnose(failure)
    assert time.process_time() - before < 0.2


@pytest.mark.parametrize("last_line", ["", "SystemExit: 7\n"])
@pytest.mark.parametrize(
    ("kind", "facts", "call", "cause"),
    [
        (FailureKind.EXIT, {"exit_code": 7}, "SystemExit", "exit"),
        (FailureKind.EXIT, {"exit_code": 7}, "os._exit", "exit"),
        (FailureKind.SIGNAL, {"signal": 9}, "os.kill", "ended_itself"),
        (FailureKind.SIGNAL, {"signal": 6}, "os.abort", "ended_itself"),
    ],
)
def test_a_program_that_ends_itself_is_not_ended_from_outside(
    kind: FailureKind, facts: dict[str, int], call: str, cause: str, last_line: str
) -> None:
    trace = stack((TRAIN, "end()"), error="")[:-1] + last_line
    own = diagnose(failed(kind, exception=call, traceback=trace, **facts))
    assert (own.cause, own.origin) == (cause, USER)
    library = diagnose(
        failed(kind, exception=call, traceback=trace.replace(TRAIN, LIBRARY), **facts)
    )
    assert library.origin is not USER
    if cause == "ended_itself":
        assert "train.py:7" in own.advice
        crash = diagnose(failed(kind, exception="SystemExit", traceback=trace, **facts))
        assert crash.cause != "ended_itself"


INTERRUPT = f"""Traceback (most recent call last):
  File "{TRAIN}", line 7, in <module>
    %s
KeyboardInterrupt
"""
AGAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
OWN_RAISE = INTERRUPT % 'if bad: raise KeyboardInterrupt("enough")'


@pytest.mark.parametrize(
    ("trace", "facts", "cause", "origin"),
    [
        (OWN_RAISE, {}, "exception", USER),
        (INTERRUPT % "step()", {}, "interrupted", INFRASTRUCTURE),
        (INTERRUPT % "assert step()", {}, "interrupted", INFRASTRUCTURE),
        (INTERRUPT % "step()" + AGAIN + OWN_RAISE, {}, "interrupted", INFRASTRUCTURE),
        (OWN_RAISE, {"handled_signal": 2}, "interrupted", INFRASTRUCTURE),
        (OWN_RAISE.replace(TRAIN, LIBRARY), {}, "interrupted", INFRASTRUCTURE),
        (OWN_RAISE, {"signal": 15}, "terminated", INFRASTRUCTURE),
        ("", {}, "interrupted", INFRASTRUCTURE),
    ],
)
def test_an_interrupt_that_the_program_raises_is_its_own(
    trace: str, facts: dict[str, object], cause: str, origin: Origin
) -> None:
    facts = {"signal": 2, "exception": "KeyboardInterrupt", "traceback": trace} | facts
    verdict = diagnose(failed(**facts))

    assert (verdict.cause, verdict.origin) == (cause, origin)
    if origin is USER:
        assert verdict.title == "rank 1 raised KeyboardInterrupt on node 3"
        assert verdict.advice.startswith("Correct the program at train.py:7")
        assert not verdict.echo


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"exit_code": 143}, "terminated"),
        ({"exit_code": 137}, "killed"),
        ({"exit_code": 137, "oom_killed": True}, "host_oom"),
        ({"exit_code": 130}, "interrupted"),
    ],
)
def test_an_exit_code_that_tells_of_a_signal_is_passed_on(
    facts: dict[str, object], cause: str
) -> None:
    trace = f"""Traceback (most recent call last):
  File "{TRAIN}", line 9, in on_term
    sys.exit(code)
SystemExit
"""
    verdict = diagnose(failed(FailureKind.EXIT, exception="SystemExit", traceback=trace, **facts))
    assert (verdict.origin, verdict.cause) == (INFRASTRUCTURE, cause)


@pytest.mark.parametrize(
    ("kind", "facts", "title"),
    [
        (
            FailureKind.EXIT,
            {"exit_code": 1, "exception": "SystemExit"},
            "left with exit code 1 on node 3: it was asked to stop by SIGTERM (signal 15), which its program handles",
        ),
        (
            FailureKind.EXIT,
            {"exit_code": 3, "exception": "os._exit"},
            "left with exit code 3 on node 3",
        ),
        (FailureKind.SIGNAL, {"signal": 15, "exception": "os.kill"}, "ended itself with SIGTERM"),
        (
            FailureKind.EXCEPTION,
            {"exit_code": 1, "exception": "Preempted"},
            "left with exit code 1",
        ),
    ],
)
def test_a_program_that_handles_a_signal_from_outside_is_not_at_fault(
    kind: FailureKind, facts: dict[str, object], title: str
) -> None:
    trace = stack((TRAIN, "sys.exit(1)"), error="SystemExit: 1")
    failure = failed(kind, traceback=trace, handled_signal=15, **facts)
    verdict = diagnose(failure)
    assert (verdict.origin, verdict.cause, verdict.echo) == (INFRASTRUCTURE, "terminated", True)
    assert title in verdict.title
    assert diagnose(msgspec.structs.replace(failure, handled_signal=0)).cause != "terminated"


OWN_WORDS = {
    "ValueError: connection of layer 3 refused": "exception",
    "ValueError: timeout must be positive": "exception",
    "RuntimeError: out of memory budget: 3": "exception",
    "RuntimeError: pipeline stage 2: broken pipe schedule": "exception",
    "ValueError: no space left on device list: 8 experts for 4 devices": "exception",
    "ValueError: Xid 79 is not in the vocabulary": "exception",
    "ShardError: 503 service unavailable slots": "exception",
    "RuntimeError: loss is NaN at step 3": "nan_loss",
}


@pytest.mark.parametrize("error", OWN_WORDS)
def test_words_of_the_program_itself_are_no_evidence(error: str) -> None:
    name, _, message = error.partition(": ")
    trace = stack((TRAIN, "check(i)"), (TRAIN, f"raise {name}(text)"), error=error)
    verdict = diagnose(raised(name, message, traceback=trace))
    assert (verdict.origin, verdict.cause) == (USER, OWN_WORDS[error])


@pytest.mark.parametrize(
    "line", ["if not ok: raise {}(text)", "i += 1; raise {}", "raise({}(text))"]
)
def test_the_program_raises_in_any_place_of_its_line(line: str) -> None:
    trace = stack((TRAIN, line.format("RuntimeError")), error="RuntimeError: no step left")
    assert diagnose(raised("RuntimeError", "no step left", traceback=trace)).origin == USER


@pytest.mark.parametrize(
    ("first", "link", "message", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "direct cause", "save failed", "disk_full"),
        ("OSError: [Errno 28] No space left on device", "handling", "save failed", "disk_full"),
        ("KeyError: 'throttle'", "handling", "bad options", "exception"),
        ("", "", "save failed: [Errno 28] No space left on device", "disk_full"),
    ],
)
def test_what_the_program_passes_on_is_evidence(
    first: str, link: str, message: str, cause: str
) -> None:
    own = stack((TRAIN, "raise RuntimeError(text) from error"), error=f"RuntimeError: {message}")
    links = {
        "direct cause": "The above exception was the direct cause of the following exception:",
        "handling": "During handling of the above exception, another exception occurred:",
    }
    trace = f"{stack((TRAIN, 'write(data)'), error=first)}\n{links[link]}\n\n{own}" if link else own
    assert diagnose(raised("RuntimeError", message, traceback=trace)).cause == cause


def test_a_kill_for_want_of_memory_is_not_the_programs_own_signal() -> None:
    trace = (
        f'Traceback (most recent call last):\n  File "{TRAIN}", line 9, in f\n    os.kill(pid, 9)\n'
    )
    own = failed(signal=9, exception="os.kill", traceback=trace)
    assert diagnose(own).cause == "ended_itself"
    assert diagnose(msgspec.structs.replace(own, oom_killed=True)).cause == "host_oom"


@pytest.mark.parametrize(
    ("error", "cause", "origin"),
    [
        ("requests.exceptions.HTTPError: 503 Server Error: for url: x", "network", INFRASTRUCTURE),
        ("torch.distributed.DistBackendError: NCCL error in: x", "peer_lost", INFRASTRUCTURE),
        ("OutsideError: no words that anybody knows", "exit", USER),
    ],
)
@pytest.mark.parametrize("code", [1, 3])
def test_a_wrapper_that_leaves_with_the_code_of_its_program_does_not_hide_its_words(
    code: int, error: str, cause: str, origin: Origin
) -> None:
    wrapper = stack((TRAIN, "sys.exit(subprocess.call(command))"), error=f"SystemExit: {code}")
    facts = {"exception": "SystemExit", "traceback": wrapper, "exit_code": code}
    child = stack((LIBRARY, "run()"), error=error)
    verdict = diagnose(failed(FailureKind.EXIT, stderr_tail=child, **facts))
    assert (verdict.cause, verdict.origin) == (cause, origin)


def test_who_gives_up_on_a_collective_names_the_rank_that_did_not_join_it() -> None:
    words = "Timed out waiting 5000ms for recv operation to complete"
    fact = "did not join the collective: rank 1 in load (data.py:16)"
    trace = f'{HEADER}\n  File "{TRAIN}", line 3, in <module>\n    loss.backward()\nRuntimeError: {words}'
    first = raised("RuntimeError", words, traceback=trace, rank=0, time=1.0)
    named = msgspec.structs.replace(first, rank=2, id="2", time=1.1, node_facts=(fact,))
    verdict = diagnose(named)
    assert verdict.cause == "collective_timeout"
    assert verdict.echo
    assert verdict.evidence == fact
    assert "the rank that the evidence names" in verdict.advice
    assert diagnose(first).cause == "collective_timeout"
    alone = "Timed out after 6 seconds waiting for clients. 1/2 clients joined."
    late = raised("DistStoreError", alone, traceback=trace.replace(words, alone))
    assert diagnose(late).cause == "peer_lost"
    late = msgspec.structs.replace(late, node_facts=(fact,))
    assert diagnose(late).cause == "collective_timeout"
    assert root_cause([first, named]) == named
    other = raised("KeyError", "'x'", rank=1, id="1", time=1.2)
    assert root_cause([first, named, other]) == other


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("AssertionError", "Torch not compiled with CUDA enabled"),
        ("RuntimeError", "Distributed package doesn't have NCCL built in"),
    ],
)
def test_a_pytorch_that_was_built_for_no_device_fails_again_in_the_same_way(
    error: str, message: str
) -> None:
    library = "/x/site-packages/torch/cuda/__init__.py"
    trace = f'{HEADER}\n  File "{TRAIN}", line 3, in <module>\n    model.cuda()\n  File "{library}", line 5, in f\n    raise E\n'
    verdict = diagnose(raised(error, message, traceback=f"{trace}{error}: {message}"))
    assert (verdict.cause, verdict.origin, verdict.hopeless) == ("unsupported_device", USER, True)
