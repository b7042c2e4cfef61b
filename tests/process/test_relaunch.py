"""What is done about a failure, with real processes: nodes launched again, and rules that travel with the job."""

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events
from dlrover.spec.failure import Action

pytest.importorskip("re2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RULES = """
[[rule]]
cause = "bad_device"
types = ["RuntimeError"]
text = 'device \\d+ is bad'
origin = "infrastructure"
action = "{action}"
title = "met a bad device ({{error}})"
advice = "Replace it."
"""
FAILS_ONCE = """
import os, pathlib, time
RESTART, RANK = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
pathlib.Path(f"parent-{RESTART}-{RANK}").write_text(str(os.getppid()))
if RESTART == "0":
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    if RANK == "1":
        raise RuntimeError("device 3 is bad")
    time.sleep(60)
"""


@pytest.fixture
def failing(run):
    """A job of two local nodes whose rank 1 fails in its first round, by a rule with an action."""

    def start(action: str):
        rules = run.directory / "rules.toml"
        rules.write_text(RULES.format(action=action))
        program = run.directory / "fails.py"
        program.write_text(FAILS_ONCE)
        options = ["--local-nodes=2", "--rdzv-conf", f"diagnosis_rules={rules}"]
        launch = run(*options, program, cwd=run.directory)
        run.until(lambda: launch.events_of(events.RoundCompleted), what="the first round")
        return launch, rules

    return start


def decision(launch) -> events.RestartDecided:
    (event,) = launch.events_of(events.RestartDecided)
    return event.body


def test_a_node_with_a_bad_device_is_replaced(run, failing) -> None:
    launch, _ = failing("relaunch")
    before = launch.pids("agent")
    (run.directory / "go").touch()
    launch.succeed()
    assert (decision(launch).action, decision(launch).cause) == (Action.RELAUNCH, "bad_device")
    launched = [event.body for event in launch.events_of(events.NodeLaunched)]
    assert [(node.node, node.replaces) for node in launched] == [(0, -1), (1, -1), (2, 1)]
    assert launch.events_of(events.HostExcluded) == [], "there is no other host"
    assert len(before) == 2


def test_fresh_processes_do_not_come_from_the_zygote_of_the_last_round(run, failing) -> None:
    launch, _ = failing("restart_fresh")
    zygotes = launch.pids("zygote")
    (run.directory / "go").touch()
    launch.succeed()
    assert decision(launch).action is Action.RESTART_FRESH
    parents = [int((run.directory / f"parent-1-{rank}").read_text()) for rank in (0, 1)]
    assert parents[0] in zygotes
    assert parents[1] not in zygotes


def test_the_rules_that_a_job_began_with_outlive_their_file_and_the_master(run, failing) -> None:
    launch, rules = failing("restart")
    rules.write_text("nothing that could be read")
    (master,) = launch.of_kind("master")
    master.kill()
    run.until(lambda: launch.events_of(events.MasterRecovered), what="another master")
    (run.directory / "go").touch()
    launch.succeed()
    assert decision(launch).cause == "bad_device"


def test_wrong_rules_are_refused_before_anything_starts(run) -> None:
    rules = run.directory / "rules.toml"
    rules.write_text(RULES.format(action="reboot"))
    launch = run("--rdzv-conf", f"diagnosis_rules={rules}", run.scripts / "hello.py")
    stdout, stderr = launch.end_with(ExitCode.USAGE)
    assert f"diagnosis_rules {rules}: row 1: action = 'reboot'; it takes one of restart" in stderr
    assert stdout == ""
    assert launch.events == []
