"""What a node tells of its waits, and when it gives its master up."""

from __future__ import annotations

from dlrover.agent.machine.node import Stage
from dlrover.agent.machine.waits import Waits
from dlrover.errors import ExitCode
from dlrover.spec.job import Limits

AT = "host0:29400"


def waits(now: float = 0.0) -> Waits:
    return Waits(Limits(), now)


def test_a_master_that_never_answered_is_waited_for_and_given_up() -> None:
    node = waits()
    assert node.notice(4.9, Stage.CONNECTING, -1, AT) == ""
    told = node.notice(5.0, Stage.CONNECTING, -1, AT)
    assert told == "waiting for the master at host0:29400: 5 s of 60 s (connect_timeout)"
    assert node.notice(34.9, Stage.CONNECTING, -1, AT) == ""
    assert "35 s of 60 s" in node.notice(35.0, Stage.CONNECTING, -1, AT)
    assert node.expired(60.0, AT) is None
    outcome = node.expired(60.1, AT)
    assert outcome is not None
    assert outcome.exit_code == ExitCode.INFRASTRUCTURE
    assert (
        outcome.reason == "No DLRover master answered at host0:29400 within 60 s (connect_timeout)."
    )


def test_a_quiet_master_is_not_away() -> None:
    node = waits()
    assert node.answered(1.0, AT) == ""
    assert node.notice(5000.0, Stage.RUNNING, 1, AT) == ""
    node.lost(5000.0)
    assert node.expired(5001.0, AT) is None, "the time since its last message does not count"
    node.lost(5500.0)
    assert node.expired(5600.0, AT) is None
    outcome = node.expired(5600.1, AT)
    assert outcome is not None
    assert "No DLRover master came back at host0:29400 within 600 s" in outcome.reason


def test_a_lost_master_is_told_of_with_what_goes_on_meanwhile() -> None:
    node = waits()
    node.answered(1.0, AT)
    node.lost(100.0)
    assert node.notice(106.0, Stage.RUNNING, 1, AT) == (
        "node 1 waits for the master at host0:29400: 6 s of 600 s (master_timeout); "
        "the workers train on as far as they can"
    )
    assert "a worker has failed" in node.notice(136.0, Stage.FAILED, 1, AT)
    assert node.answered(142.0, AT) == "The master answers at host0:29400, after 42 s."
    assert node.answered(143.0, AT) == ""


def test_a_short_absence_is_not_told() -> None:
    node = waits()
    node.answered(1.0, AT)
    node.lost(100.0)
    assert node.notice(102.0, Stage.RUNNING, 1, AT) == ""
    assert node.answered(102.5, AT) == ""


def test_a_node_that_has_joined_says_that_it_waits_for_the_others() -> None:
    node = waits()
    node.answered(1.0, AT)
    node.joined(2.0)
    node.joined(6.0)
    assert node.notice(12.0, Stage.JOINED, 1, AT) == (
        "node 1 has joined, and waits for the other nodes: 10 s of 600 s (join_timeout); "
        "dlrover status on the master's machine names them"
    )
    node.started()
    assert node.notice(100.0, Stage.RUNNING, 1, AT) == ""


def test_nothing_is_told_of_a_wait_that_is_over() -> None:
    node = Waits(Limits(connect_timeout=2.0), 0.0)
    assert node.notice(6.0, Stage.JOINED, 1, AT) == ""
    assert node.expired(6.0, AT) is not None


def test_the_time_without_a_notice_is_known_so_that_nothing_polls() -> None:
    node = waits()
    assert node.quiet(1.0) == 4.0
    node.notice(5.0, Stage.CONNECTING, -1, AT)
    assert node.quiet(5.0) == 30.0
    node.answered(6.0, AT)
    assert node.quiet(40.0) == 5.0, "a wait may begin at once"
    node.joined(41.0)
    assert node.quiet(45.0) == 1.0
    assert node.quiet(700.0) == 0.5, "the next check of the connection ends the wait"
