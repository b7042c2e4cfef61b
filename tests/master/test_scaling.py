"""Another number of nodes is asked for: who may, what follows, and what does not."""

import pytest

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.scaling.scaling import Scaling
from dlrover.master.machine.state import Phase
from dlrover.rpc import messages
from dlrover.rpc.messages import StopRequest, Succeeded
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import JobSpec
from dlrover.spec.node import LaunchNode, NodeStatus
from tests.support.drivers import JobDriver


def asked(nodes: int, source: str = "user", role: str = "worker") -> inputs.ScaleRequested:
    return inputs.ScaleRequested(nodes, "it was asked for", source, role)


def of(commands: list[inputs.Command], kind: type) -> list[inputs.Command]:
    """Return the commands, or the orders to nodes, of one kind."""
    return [c for c in commands if isinstance(getattr(c, "message", c), kind)]


def ranks(commands: list[inputs.Command]) -> list[int]:
    return [command.node_rank for command in of(commands, LaunchNode)]


# ---- up


def test_a_user_may_have_more_nodes_than_the_job_was_submitted_with() -> None:
    driver = JobDriver.launched(2, 2)
    assert ranks(driver.give(asked(4))) == [2, 3]
    assert driver.machine.state.phase is Phase.RUNNING
    (scaled,) = driver.emitted(events.JobScaled)
    assert scaled.sentence() == "The job will have 4 nodes instead of 2: it was asked for."
    for node in (2, 3):
        driver.connect(node, claims=node)
    driver.join(2, 3, at=20.0)
    driver.give(inputs.DeadlinePassed(), at=driver.machine.deadline())
    driver.join(0, 1, at=22.0)
    assert driver.machine.rounds.world_size == 8
    assert driver.machine.restarts.count == 0


def test_a_job_that_was_scaled_up_trains_on_while_the_nodes_are_missing() -> None:
    driver = JobDriver.launched(2, 2)
    driver.give(asked(4))
    driver.give(inputs.NodeExited(1, "it was killed"), at=20.0)
    driver.join(0)
    driver.connect(4, claims=4)  # in place of node 1
    driver.join(4)
    assert driver.machine.state.phase is Phase.RUNNING
    assert driver.machine.rounds.world_size == 4


def test_nodes_that_a_plan_adds_have_its_size() -> None:
    driver = JobDriver.launched(1, 2)
    larger = inputs.ScaleRequested(3, "it was asked for", "user", factors=(2.0, 3.0))
    assert of(driver.give(larger), LaunchNode) == [LaunchNode(2, 2, (), 3.0, 2.0)]
    assert of(driver.give(asked(4)), LaunchNode) == [LaunchNode(3, 3)]
    lost = driver.give(inputs.NodeExited(2, "it was killed"), at=20.0)
    assert of(lost, LaunchNode) == [LaunchNode(4, 2, (), 3.0, 2.0)]


@pytest.mark.parametrize(("wanted", "launched"), [(2, []), (9, [3, 4]), (4, [3]), (1, [])])
def test_a_plan_stays_within_the_bounds_of_the_job(wanted: int, launched: list[int]) -> None:
    driver = JobDriver(2, 5, managed_nodes=3)
    assert ranks(driver.give(asked(wanted, "plan"))) == launched
    assert driver.machine.scaling.wanted == max(2, min(wanted, 5))


def test_what_a_user_has_asked_for_is_not_changed_by_a_plan() -> None:
    driver = JobDriver.launched(1, 3)
    driver.give(asked(3))
    assert driver.give(asked(1, "plan")) == []
    assert driver.machine.scaling.wanted == 3
    assert driver.emitted(events.JobScaled) == []


# ---- down


def test_the_nodes_of_the_highest_ranks_leave_and_the_others_go_on() -> None:
    driver = JobDriver.launched(3, 3)
    commands = driver.give(asked(1), at=20.0)
    dismissed = of(commands, messages.Dismiss)
    assert [command.node_id for command in dismissed] == [1, 2]
    assert all(c.message.store and c.message.outcome.exit_code == 0 for c in dismissed)
    (called,) = of(commands, messages.CallToRound)
    assert (called.node_id, called.message.store) == (0, True)
    driver.join(0, at=21.0)
    assert driver.machine.state.phase is Phase.RESTARTING  # the others may be storing their part
    for node in (1, 2):
        driver.give(inputs.NodeDisconnected(node), at=22.0)
        commands = driver.give(inputs.NodeExited(node, "its agent ended"), at=22.5)
        assert of(commands, inputs.KillNode) == [inputs.KillNode(node)]
        assert of(commands, LaunchNode) == []
        assert driver.status(node) is NodeStatus.RELEASED
    assert driver.machine.rounds.world_size == 2
    assert driver.machine.incident is None
    assert driver.emitted(events.NodeLost) == []
    assert driver.emitted(events.RestartDecided) == []
    left = driver.emitted(events.NodeReleased)[0]
    assert left.sentence() == "Node 1 is released: its agent ended."


def test_a_node_that_leaves_while_a_round_collects_has_all_others_store_what_they_hold() -> None:
    driver = JobDriver.launched(3, 3, max_restarts=1)
    called = of(
        driver.fail(1, {"kind": FailureKind.SIGNAL, "signal": 9}, at=20.0), messages.CallToRound
    )
    assert [(c.node_id, c.message.store) for c in called] == [(0, False), (1, False), (2, False)]
    driver.join(0, at=21.0)
    commands = driver.give(asked(2), at=22.0)
    assert [command.node_id for command in of(commands, messages.Dismiss)] == [2]
    called = of(commands, messages.CallToRound)
    assert [(c.node_id, c.message.store) for c in called] == [(0, True), (1, True)]
    driver.join(0, 1, at=23.0)
    driver.give(inputs.NodeExited(2, "its agent ended"), at=24.0)
    assert driver.machine.rounds.world_size == 4
    assert len(driver.emitted(events.RoundOpened)) == 2


def test_the_time_of_a_node_that_leaves_is_shutdown_and_that_of_the_others_rendezvous() -> None:
    driver = JobDriver.launched(2, 2)
    driver.give(inputs.Progressed(1, 1), at=20.0)
    driver.give(asked(1), at=20.0)
    before = driver.spent()
    driver.give(inputs.NodeExited(1, "its agent ended"), at=24.0)
    driver.join(0, at=26.0)
    after = driver.spent()
    assert after["shutdown"] - before.get("shutdown", 0.0) == 4.0
    assert after["rendezvous"] - before.get("rendezvous", 0.0) == 6.0
    assert after.get("fault_detection", 0.0) == 0.0


def test_a_node_that_was_not_placed_yet_is_killed_when_it_is() -> None:
    driver = JobDriver(1, 2, managed_nodes=2)
    driver.give(asked(1))
    assert driver.status(1) is NodeStatus.RELEASED
    assert driver.give(inputs.NodePlaced(1, "process 1")) == [inputs.KillNode(1)]
    (dismissed,) = of(driver.connect(1, claims=1), messages.Dismiss)
    assert dismissed.message.store


def test_a_node_whose_agent_comes_back_is_told_again_to_leave() -> None:
    driver = JobDriver.launched(1, 2)
    driver.give(inputs.NodeDisconnected(1), at=20.0)
    driver.give(asked(1), at=20.0)
    (dismissed,) = of(driver.connect(1, claims=1, runs=1), messages.Dismiss)
    assert dismissed.message.store


def test_a_job_that_is_about_to_end_is_not_interrupted() -> None:
    driver = JobDriver.launched(3, 3)
    driver.give(inputs.Reported(0, Succeeded(1)))
    assert driver.give(asked(1)) == []
    driver.give(inputs.Reported(1, Succeeded(1)), inputs.Reported(2, Succeeded(1)))
    assert driver.machine.outcome is not None
    assert driver.machine.outcome.exit_code == ExitCode.SUCCESS


def test_nodes_that_are_too_many_leave_at_the_next_fault_of_a_job_that_was_about_to_end() -> None:
    driver = JobDriver.launched(1, 3, max_restarts=1)
    driver.give(inputs.Reported(2, Succeeded(1)))
    driver.give(asked(1))
    driver.fail(0, {"kind": FailureKind.EXIT, "exit_code": 3})
    assert driver.machine.scaling.leaving.keys() == {1, 2}


def test_a_lost_node_that_is_one_too_many_is_not_replaced() -> None:
    driver = JobDriver.launched(1, 3)
    driver.give(inputs.Reported(0, Succeeded(1)))
    driver.give(asked(1))
    assert ranks(driver.give(inputs.NodeExited(2, "it was killed"))) == []
    assert driver.status(2) is NodeStatus.LOST


def test_a_check_does_not_wait_for_a_node_that_leaves() -> None:
    driver = JobDriver(1, 2, managed_nodes=2, node_check=True)
    for node in (0, 1):
        driver.give(inputs.NodePlaced(node, f"process {node}"))
        driver.connect(node, claims=node)
    driver.join(0, 1)
    assert driver.machine.checks.run is not None
    driver.give(asked(1))
    assert driver.machine.checks.run.missing == {0}


def test_only_nodes_of_role_worker_leave() -> None:
    driver = JobDriver.launched(1, 5, other_nodes=2)
    driver.give(asked(1))
    assert driver.machine.scaling.leaving.keys() == {3, 4}
    (scaled,) = driver.emitted(events.JobScaled)
    assert scaled.sentence().startswith("The job will have 1 worker node instead of 3")


# ---- what changes nothing


def test_what_is_asked_for_again_changes_nothing() -> None:
    driver = JobDriver.launched(1, 3)
    driver.give(asked(2))
    before = len(driver.events)
    assert driver.give(asked(2)) == []
    assert len(driver.events) == before


def test_what_comes_after_the_end_changes_nothing() -> None:
    driver = JobDriver.launched(1, 3)
    driver.give(StopRequest("stopped", 5))
    assert driver.give(asked(5)) == []
    assert driver.machine.scaling.wanted == 3


REFUSED = [
    ({}, asked(2), "come by themselves"),
    ({"managed_nodes": 4}, asked(0), "0 nodes: must be from 1 to"),
    ({"managed_nodes": 4}, asked(-3), "-3 nodes: must be from 1 to"),
    ({"managed_nodes": 4}, asked(10**9), "must be from 1 to 100000"),
    ({"managed_nodes": 4, "node_unit": 2}, asked(3), "must be a multiple of --node-unit, 2"),
    ({"managed_nodes": 4}, asked(2, role="ps"), "was started without nodes of role ps"),
    ({"managed_nodes": 4}, asked(2, role="chief"), "Role chief keeps its number of nodes"),
    ({"managed_nodes": 4, "servers": 1}, asked(2, role="evaluator"), "only worker and ps can be"),
    ({"managed_nodes": 4, "servers": 1}, asked(0, role="ps"), "0 nodes: must be from 1 to"),
]


@pytest.mark.parametrize(("spec", "wrong", "why"), REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(spec, wrong, why) -> None:
    driver = JobDriver(2, 4, **spec)
    commands = driver.give(wrong)
    refusal = driver.machine.scaling.refusal(wrong)
    assert why in refusal
    assert refusal.endswith(".")
    assert commands == []
    assert driver.emitted(events.JobScaled) == []


def test_a_plan_is_told_that_a_user_has_set_the_number() -> None:
    scaling = Scaling(JobSpec(name="job", max_nodes=4, managed_nodes=4))
    scaling.take(asked(2))
    assert scaling.refusal(asked(3, "plan")) == (
        "A user has set the number of nodes to 2; a plan does not change it."
    )
    assert scaling.refusal(asked(3)) == ""
