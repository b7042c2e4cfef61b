"""Where a job stands, as ``dlrover status`` and the status line show it."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from dlrover.cli.output import Form, print_line, show
from dlrover.dashboard.inspect import queries
from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.views.status import status_of
from dlrover.rpc import messages
from dlrover.rpc.messages import StopRequest, Succeeded
from dlrover.spec.failure import FailureKind
from tests.support.drivers import JobDriver


def status(job: JobDriver) -> messages.Status:
    return status_of(job.machine, job.now, {})


def ended(exit_code: int) -> JobDriver:
    job = JobDriver.running(2, 2, 2)
    job.give(inputs.Progressed(1, 40, (), 360), at=20.0)
    if exit_code == ExitCode.SUCCESS:
        job.give(inputs.Reported(0, Succeeded(1)), inputs.Reported(1, Succeeded(1)), at=30.0)
    else:
        job.give(StopRequest("stopped", exit_code), at=30.0)
    for node in (0, 1):
        job.give(inputs.NodeDisconnected(node), inputs.NodeExited(node, "left"), at=31.0)
    return job


def test_the_nodes_of_an_ended_job_keep_what_they_did() -> None:
    found = status(ended(ExitCode.SUCCESS))
    assert [(n.node_rank, n.status, n.steps) for n in found.nodes] == [
        (0, "succeeded", 40),
        (1, "succeeded", 40),
    ]
    assert (found.step, found.total_steps) == (400, 40)
    assert [n.status for n in status(ended(ExitCode.STOPPED)).nodes] == ["stopped", "stopped"]


def test_the_step_number_stays_until_the_next_one_is_known() -> None:
    job = JobDriver.running(2, 2, 2, max_restarts=3)
    job.give(inputs.Progressed(1, 12, (), 400), at=20.0)
    assert status(job).step == 412
    job.fail(0, {"kind": FailureKind.SIGNAL, "signal": 9}, at=21.0)
    job.join(0, 1, at=22.0)
    assert (status(job).step, status(job).steps) == (412, 0)
    job.give(inputs.Progressed(2, 1, (), 400), at=25.0)
    assert status(job).step == 401
    job.fail(0, {"kind": FailureKind.SIGNAL, "signal": 9}, at=26.0)
    job.join(0, 1, at=27.0)
    job.give(inputs.Progressed(3, 2), at=28.0)
    assert status(job).step == -1, "the program does not say with which step it began"


def test_an_ended_jobs_world_is_its_last_one() -> None:
    text = io.StringIO()
    report = queries.StatusReport("job", False, status(ended(ExitCode.SUCCESS)))
    queries.render_status(report, Console(file=text, width=50))
    assert (
        "last round 1: 4 workers; 0 restarts; at step 400, 40 steps in this round"
        in text.getvalue()
    )
    assert "released" not in text.getvalue()


def test_what_a_program_said_is_text_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobDriver.running(1, 1, 1)
    said = "rank 0 raised KeyError: 'no column [/bold] in [red]data[/red] :warning:'"
    job.give(StopRequest(said, ExitCode.USER_CODE), at=30.0)
    found = msgspec.structs.replace(status(job), name="a [b] c", waiting_for="[/wait]")
    show(queries.StatusReport("job", False, found), Form.TEXT, queries.render_status)
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown
    assert "a [b] c: " in shown
    assert "[/wait]" in shown


def test_a_name_or_a_reason_does_not_reach_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "a\x1b]0;owned\x07b\x1b[31mc\u202e"
    found = msgspec.structs.replace(
        status(ended(ExitCode.STOPPED)), name=hostile, waiting_for=hostile
    )
    monkeypatch.setenv("COLUMNS", "0")  # as wide as where nothing is known
    show(queries.StatusReport(hostile, False, found), Form.TEXT, queries.render_status)
    print_line(hostile)
    shown = capsys.readouterr().out
    assert shown.endswith("\nabc\n")
    assert all(each.isprintable() for each in shown.splitlines())
    assert "\n node  rank " in shown
