"""The last screen, on failures that really happened (recorded by tests/master/fixtures/gather.py)."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from dlrover.cli.run.report import SCREEN_ROWS, render, render_json
from dlrover.errors import ExitCode
from dlrover.master.diagnosis_rules import table
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.outcome import Cause, Goodput, Outcome

RECORDED = msgspec.json.decode(
    (Path(__file__).parents[1] / "master" / "fixtures" / "recorded.json").read_bytes(),
    type=dict[str, Failure],
)
TRAIN = "/home/ann/project/train.py"


def ended_by(failure: Failure, **facts: object) -> Outcome:
    verdict = table().diagnose(failure)
    usual = {
        "exit_code": ExitCode.USER_CODE,
        "reason": f"{verdict.title}; all 2 restarts are used.",
        "restarts": 2,
        "steps": 120,
        "seconds": 200.4,
        "job_dir": "/home/ann/jobs/llm",
    }
    return Outcome(**{**usual, "failure": failure, "verdict": verdict, **facts})


def shown(outcome: Outcome, width: int = 100) -> str:
    return render(outcome, width=width, colour=False)


def rows(screen: str, width: int) -> int:
    return sum(max(1, -(-cell_len(line) // width)) for line in screen.split("\n"))


def test_exception() -> None:
    outcome = ended_by(
        RECORDED["nested_exception"],
        others=("rank 1 lost the connection to its peers", "and 3 more"),
    )
    assert shown(outcome) == (
        f"""\
rank 0 raised ValueError on node 0 (gpu-0): bad batch 2
Fault:    user code
Evidence: {TRAIN}:3: in load: raise ValueError(f"bad batch {{batch}}")

Traceback (most recent call last):
  File "{TRAIN}", line 9, in <module>
    train()
  File "{TRAIN}", line 7, in train
    load(batch)
  File "{TRAIN}", line 3, in load
    raise ValueError(f"bad batch {{batch}}")
ValueError: bad batch 2

Log:      /home/ann/project/logs/0/stderr.log on node 0 (gpu-0)
Others:   rank 1 lost the connection to its peers
          and 3 more
Ended:    all 2 restarts are used; 120 steps in 3 min 20 s, 2 restarts
Next:     Correct the program at train.py:3, then run the same command again.
Job:      /home/ann/jobs/llm
Events:   dlrover events --job-dir /home/ann/jobs/llm"""
    )


def test_signal_shows_the_end_of_stderr() -> None:
    lines = shown(ended_by(RECORDED["segfault"])).split("\n")
    assert lines[0].startswith("rank 0 crashed with SIGSEGV (signal 11) on node 0 (gpu-0)")
    assert lines[1] == "Fault:    undetermined"
    at = lines.index("The end of its standard error:")
    assert lines[at + 1] == "Fatal Python error: Segmentation fault"
    assert f'  File "{TRAIN}", line 4 in read_null' in lines[at:]


def test_words_from_standard_output_are_called_so() -> None:
    failure = msgspec.structs.replace(
        RECORDED["exit_3"], stderr_tail="no license\n", log_path="/logs/0/stdout.log"
    )
    lines = shown(ended_by(failure)).split("\n")
    assert lines[lines.index("The end of its standard output:") + 1] == "no license"


def test_library_frames_are_cut_down_to_the_one_that_raised() -> None:
    lines = shown(ended_by(RECORDED["argparse_conflict"])).split("\n")
    at = lines.index(f'  File "{TRAIN}", line 6, in arguments')
    assert re.fullmatch(r"  \.\.\. \d library frames \.\.\.", lines[at + 2])
    assert "argparse.py" in lines[at + 3]
    assert lines[at + 5].startswith("argparse.ArgumentError: ")
    assert sum("argparse.py" in line for line in lines) == 1


def test_library_frames_between_the_users_own_are_counted() -> None:
    torch = (
        '  File "/opt/venv/lib/python3.11/site-packages/torch/nn.py", line 1, in call\n    f()\n'
    )
    own = f'  File "{TRAIN}", line 2, in forward\n    g()\n'
    trace = f"Traceback (most recent call last):\n{own}{torch}{torch}{own}ValueError: bad\n"
    failure = msgspec.structs.replace(RECORDED["nested_exception"], traceback=trace)
    screen = shown(ended_by(failure))
    assert f"{own}  ... 2 library frames ...\n{own}ValueError: bad\n" in screen
    assert "torch" not in screen


def test_process_that_said_nothing_anywhere() -> None:
    failure = msgspec.structs.replace(RECORDED["exit_3"], log_path="")
    lines = shown(ended_by(failure)).split("\n")
    assert lines[2] == "Evidence: it wrote nothing"
    assert lines[3] == ""
    assert lines[4].startswith("Ended: ")


def test_the_last_lines_of_stderr_are_enough() -> None:
    said = "".join(f"line {n}\n" for n in range(100))
    screen = shown(ended_by(msgspec.structs.replace(RECORDED["killed"], stderr_tail=said)))
    assert "standard error:\nline 80\n" in screen
    assert "line 99\n" in screen


def test_many_others_and_long_lines_fit() -> None:
    long = msgspec.structs.replace(RECORDED["killed"], stderr_tail=("x" * 90 + "\n") * 20)
    outcome = ended_by(long, others=tuple(f"rank {n} failed" for n in range(60)))
    screen = shown(outcome, width=40)
    assert rows(screen, 40) <= SCREEN_ROWS
    assert "rank 8 failed" in screen
    assert screen.endswith("--job-dir /home/ann/jobs/llm")


def test_long_traceback_keeps_its_end() -> None:
    calls = "".join(f'  File "{TRAIN}", line {n}, in f{n}\n    f{n + 1}()\n' for n in range(1, 200))
    trace = f"Traceback (most recent call last):\n{calls}ValueError: deep\n"
    failure = msgspec.structs.replace(RECORDED["nested_exception"], traceback=trace).bounded()
    screen = shown(ended_by(failure))
    assert rows(screen, 100) == SCREEN_ROWS
    lines = screen.split("\n")
    assert re.fullmatch(r"  \.\.\. \d+ lines left out \.\.\.", lines[4])
    assert "    f200()\nValueError: deep\n" in screen


def test_a_narrow_terminal_wraps_within_the_screen() -> None:
    for name, failure in RECORDED.items():
        assert rows(shown(ended_by(failure), width=40), 40) <= SCREEN_ROWS, name


def test_stderr_as_a_terminal_would_leave_it() -> None:
    said = "\x1b[31mred\x1b[0m\nstep 1\rstep 2\rstep 3\r\n\n\x1b]0;title\x07bell\x07 \x9b2Jnul\0\n"
    failure = msgspec.structs.replace(RECORDED["killed"], stderr_tail=said)
    lines = shown(ended_by(failure)).split("\n")
    at = lines.index("The end of its standard error:")
    assert lines[at + 1 : at + 5] == ["red", "step 3", "bell 2Jnul", ""]


def test_end_without_a_failure() -> None:
    outcome = Outcome(
        exit_code=ExitCode.INFRASTRUCTURE,
        reason="only 1 of at least 2 nodes joined round 0 within 600 s (join_timeout).",
        seconds=601,
        job_dir="/tmp/my job",
    )
    assert shown(outcome).split("\n") == [
        "only 1 of at least 2 nodes joined round 0 within 600 s (join_timeout).",
        "",
        "Ended:    0 steps in 10 min 1 s, 0 restarts",
        "Job:      /tmp/my job",
        "Events:   dlrover events --job-dir '/tmp/my job'",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.04 s"),
        (0.4, "0.4 s"),
        (59.6, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_success_is_one_line(seconds: float, words: str) -> None:
    outcome = Outcome(
        exit_code=0, reason="", steps=1, restarts=1, seconds=seconds, job_dir="/jobs/a"
    )
    expected = f"The job succeeded: 1 step in {words}, 1 restart. Job directory: /jobs/a"
    assert shown(outcome, width=20) == expected


def test_colour_adds_nothing_but_colour() -> None:
    outcome = ended_by(RECORDED["nested_exception"])
    coloured = render(outcome, width=100, colour=True)
    assert coloured.startswith("\x1b[1;31mrank 0 raised ValueError")
    assert "\x1b[33muser code\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown(outcome)


def test_environment_does_not_change_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ended_by(RECORDED["nested_exception"])
    plain, coloured = shown(outcome), render(outcome, width=100, colour=True)
    for name, value in {
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "20",
        "FORCE_COLOR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert (shown(outcome), render(outcome, width=100, colour=True)) == (plain, coloured)


def test_json() -> None:
    outcome = ended_by(RECORDED["peer_1"], others=("rank 0 raised ValueError",))
    decoded = json.loads(render_json(outcome))
    assert decoded["exit_code"] == 1
    assert decoded["failure"]["kind"] == "exception"
    assert decoded["verdict"]["origin"] == "infrastructure"
    assert decoded["others"] == ["rank 0 raised ValueError"]
    assert msgspec.json.decode(render_json(outcome), type=Outcome) == outcome


texts = st.text(max_size=30) | st.sampled_from(
    [
        "[bold]x[/] :smile: [/nothing]",
        "\x1b[2J\x1b]8;;http://x\x07",
        "word " * 150,
        "line\n" * 60 + "end",
        "a\u2028b\x85c\x0bd\ud800",
        'Traceback (most recent call last):\n  File "x", line 1, in f\n    g()\n' * 12,
        "宽" * 300,
    ]
)
failures = st.builds(
    Failure,
    id=st.just("0"),
    kind=st.sampled_from(FailureKind),
    node_id=st.just(0),
    rank=st.just(0),
    local_rank=st.just(0),
    round=st.just(0),
    traceback=texts,
    stderr_tail=texts,
    log_path=texts,
    hostname=texts,
)
verdicts = st.builds(
    Verdict, title=texts, origin=st.sampled_from(Origin), evidence=texts, advice=texts
)


@pytest.mark.slow
@given(
    st.builds(
        Outcome,
        exit_code=st.integers(0, 255),
        reason=texts,
        failure=st.none() | failures,
        verdict=st.none() | verdicts,
        others=st.lists(texts, max_size=12).map(tuple),
        seconds=st.floats(-1, 1e9),
        job_dir=texts,
    ),
    st.integers(0, 300),
    st.booleans(),
)
def test_any_outcome_fits_on_the_screen(outcome: Outcome, width: int, colour: bool) -> None:
    screen = render(outcome, width=width, colour=colour)
    assert len(screen.splitlines()) <= SCREEN_ROWS
    assert json.loads(render_json(outcome))["exit_code"] == outcome.exit_code
    if not colour:
        assert "\x1b" not in screen
        if outcome.exit_code:
            assert rows(screen, max(width, 40)) <= SCREEN_ROWS
        else:
            assert len(screen.splitlines()) == 1


# ---- goodput


def spent(**seconds: float) -> Goodput:
    wall = sum(seconds.values())
    return Goodput(
        goodput_ratio=seconds.get("productive", 0.0) / wall if wall else 0.0,
        wall_seconds=wall,
        job_seconds=wall,
        nodes=1,
        seconds={cause.value: 0.0 for cause in Cause} | seconds,
    )


GOODPUT = spent(productive=150.0, start_up=42.0, fault_detection=8.0)
LINE = "Goodput:  75.0 %; the largest loss is start-up: 42 s of all nodes (21.0 %)"


def test_the_goodput_and_the_largest_loss_are_one_line_after_success() -> None:
    screen = shown(Outcome(exit_code=0, reason="All workers succeeded.", goodput=GOODPUT))
    assert screen.split("\n")[1:] == [LINE]


def test_the_goodput_and_the_largest_loss_are_one_line_after_a_failure() -> None:
    screen = shown(ended_by(RECORDED["nested_exception"], goodput=GOODPUT))
    assert screen.split("\n").count(LINE) == 1


def test_without_a_loss_the_goodput_stands_alone() -> None:
    screen = shown(Outcome(exit_code=0, reason="", goodput=spent(productive=3.0)))
    assert screen.split("\n")[1:] == ["Goodput:  100.0 %"]


@pytest.mark.parametrize("goodput", [None, spent()])
def test_no_goodput_is_shown_where_none_is_known(goodput: Goodput | None) -> None:
    assert "Goodput" not in shown(Outcome(exit_code=0, reason="", goodput=goodput))


def test_nothing_is_said_of_a_killed_job_of_which_nothing_is_known() -> None:
    screen = shown(
        Outcome(exit_code=130, reason="The job was killed after SIGINT.", job_dir="/jobs/1")
    )
    assert "Ended" not in screen
    assert "Job:      /jobs/1" in screen
