"""A node gives its place to another one, which is started while it trains on."""

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.state import Phase
from dlrover.rpc.messages import Dismiss, Succeeded
from dlrover.spec import events
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import Limits
from dlrover.spec.measurements import SpeedSample
from dlrover.spec.node import LaunchNode, NodeStatus
from tests.support.drivers import JobDriver

OOM = {"kind": FailureKind.SIGNAL, "signal": 9, "oom_killed": True}


def asked(node: int = 1, cpu: float = 1.0, memory: float = 2.0) -> inputs.MigrationRequested:
    return inputs.MigrationRequested(node, cpu, memory, "its queue is long")


def migrating(**spec) -> JobDriver:
    """A job of nodes 0, 1 and 2, where node 3 is started in place of node 1."""
    driver = JobDriver.launched(3, 3, grows_memory=True, **spec)
    driver.give(asked(cpu=1.5), at=20.0)
    return driver


def come(driver: JobDriver, node: int, at: float) -> list[inputs.Command]:
    driver.give(inputs.NodePlaced(node, f"process {node}"))
    driver.connect(node, claims=node)
    return driver.join(node, at=at)


def leave(driver: JobDriver, node: int, at: float) -> list[inputs.Command]:
    return driver.give(inputs.NodeExited(node, "it left with exit code 0"), at=at)


def test_the_world_trains_until_the_other_node_has_joined():
    driver = JobDriver.launched(3, 3)
    assert driver.give(asked(cpu=1.5), at=20.0) == [LaunchNode(3, 1, (), 2.0, 1.5)]
    assert driver.machine.state.phase is Phase.RUNNING
    (told,) = driver.emitted(events.NodeMigrates)
    assert told.sentence() == ("Node 1 trains on until node 3 takes its place: its queue is long.")
    assert driver.emitted(events.NodeLaunched)[-1].sentence() == (
        "Node 3 is being started in place of node 1 with 1.5 times the cores and 2 times the memory "
        "that the job requested."
    )
    commands = come(driver, 3, at=30.0)
    assert driver.machine.state.phase is Phase.RESTARTING
    (dismissed,) = [c for c in commands if isinstance(getattr(c, "message", c), Dismiss)]
    assert dismissed.node_id == 1
    assert dismissed.message.store
    assert "another node takes its place" in dismissed.message.outcome.reason
    driver.join(0, 2, at=31.0)
    assert driver.machine.state.phase is Phase.RESTARTING, "node 1 may be storing its part"
    leave(driver, 1, at=32.0)
    assert driver.machine.rendezvous.members == (0, 3, 2)
    assert driver.status(1) is NodeStatus.RELEASED
    assert driver.machine.restarts.count == 0
    assert not driver.machine.fleet.migrations


def test_nodes_that_come_together_cost_one_round():
    driver = migrating()
    driver.give(asked(2))
    come(driver, 3, at=30.0)
    assert driver.machine.state.phase is Phase.RUNNING
    assert driver.machine.deadline() == 30.0 + driver.machine.job.limits.scale_up_delay
    come(driver, 4, at=30.5)
    driver.join(0)
    leave(driver, 1, at=31.0)
    leave(driver, 2, at=31.0)
    assert driver.machine.rendezvous.members == (0, 3, 4)
    assert driver.machine.rendezvous.round == 2


def test_a_node_does_not_wait_long_for_another_one():
    driver = migrating()
    driver.give(asked(2))
    come(driver, 3, at=30.0)
    driver.give(inputs.DeadlinePassed(), at=driver.machine.deadline())
    driver.join(0, 2)
    leave(driver, 1, at=33.0)
    assert driver.machine.rendezvous.members == (0, 3, 2)


def test_a_world_that_is_about_to_end_is_left_alone_without_haste():
    driver = migrating()
    driver.give(asked(2))
    come(driver, 3, at=30.0)
    driver.give(inputs.Reported(0, Succeeded(1)), at=30.5)
    driver.give(inputs.DeadlinePassed(), at=driver.machine.deadline())
    assert driver.machine.state.phase is Phase.RUNNING
    assert driver.machine.deadline() == 20.0 + driver.machine.job.limits.join_timeout


def test_the_number_of_nodes_is_not_changed_meanwhile():
    driver = JobDriver.launched(1, 3, auto_scale=True)
    driver.give(
        inputs.SpeedMeasured(1, SpeedSample(nodes=3, replicas=6, step_seconds=0.2, steps=9))
    )
    assert driver.machine.resizer.may_scale(20.0)
    driver.give(asked(1), at=20.0)
    assert not driver.machine.resizer.may_scale(20.0)


def test_a_slow_node_that_is_being_replaced_is_not_replaced_twice():
    driver = JobDriver.launched(1, 3, auto_scale=True)
    sample = SpeedSample(nodes=3, replicas=6, step_seconds=0.2, steps=9)
    driver.give(inputs.SpeedMeasured(1, sample))
    driver.give(asked(1), at=20.0)
    driver.give(inputs.RankSpeed(1, events.SlowRank(2, 1, 1.8, "compute")), at=21.0)
    assert not driver.emitted(events.PlanMade)
    driver.give(inputs.RankSpeed(1, events.SlowRank(0, 0, 1.8, "compute")), at=22.0)
    assert driver.emitted(events.PlanMade)
    assert driver.emitted(events.NodeMigrates)[-1].reason == "it is slow"


def test_what_replaces_the_new_node_has_its_size():
    driver = migrating()
    come(driver, 3, at=30.0)
    driver.join(0, 2)
    leave(driver, 1, at=31.0)
    commands = driver.give(inputs.NodeExited(3, "it was killed"), at=40.0)
    assert commands[-1] == LaunchNode(4, 1, (), 2.0, 1.5)


def test_a_node_that_never_starts_changes_nothing():
    driver = migrating()
    commands = driver.give(inputs.NodeExited(3, "no room"), at=25.0)
    assert not [c for c in commands if isinstance(c, LaunchNode)]
    assert driver.machine.state.phase is Phase.RUNNING
    (told,) = driver.emitted(events.MigrationEnded)
    assert told.sentence() == "Node 1 stays: node 3 does not take its place: no room."
    assert not driver.machine.resizer.migration_refusal(asked())


def test_a_node_that_does_not_come_in_time_is_called_off():
    driver = migrating()
    driver.give(inputs.NodePlaced(3, "process 3"), events.NodeWaits(3, "no node has 2 cores"))
    deadline = driver.machine.deadline()
    assert deadline == 20.0 + driver.machine.job.limits.join_timeout
    assert driver.give(inputs.DeadlinePassed(), at=deadline) == [inputs.KillNode(3)]
    (told,) = driver.emitted(events.MigrationEnded)
    assert told.reason == "it did not come within 600 s (join_timeout): no node has 2 cores"
    assert driver.machine.state.phase is Phase.RUNNING
    assert driver.machine.deadline() is None


def test_the_node_that_was_to_leave_is_lost_first():
    driver = migrating()
    commands = driver.give(inputs.NodeExited(1, "it was killed"), at=25.0)
    assert not [c for c in commands if isinstance(c, LaunchNode)], "node 3 is coming"
    driver.join(0, 2)
    come(driver, 3, at=30.0)
    assert driver.machine.rendezvous.members == (0, 3, 2)
    assert driver.machine.restarts.count == 1


def test_a_fault_meanwhile_does_not_wait_for_the_new_node():
    driver = migrating()
    driver.fail(0, {"kind": FailureKind.SIGNAL, "signal": 9})
    driver.join(0, 1, 2, at=26.0)
    assert driver.machine.rendezvous.members == (0, 1, 2)
    come(driver, 3, at=30.0)
    driver.join(0, 2)
    leave(driver, 1, at=31.0)
    assert driver.machine.rendezvous.members == (0, 3, 2)


def test_a_node_that_joins_a_round_that_collects_takes_over_in_it():
    driver = migrating()
    driver.fail(0, {"kind": FailureKind.SIGNAL, "signal": 9})
    driver.join(0, 1, at=26.0)
    come(driver, 3, at=27.0)
    driver.join(2, at=28.0)
    assert driver.machine.state.phase is Phase.RESTARTING
    leave(driver, 1, at=29.0)
    assert driver.machine.rendezvous.members == (0, 3, 2)


def test_a_node_that_is_lost_while_the_other_leaves_is_replaced():
    driver = migrating()
    come(driver, 3, at=30.0)
    commands = driver.give(inputs.NodeExited(3, "it was killed"), at=31.0)
    assert commands[-1] == LaunchNode(4, 1, (), 2.0, 1.5)
    assert not driver.emitted(events.MigrationEnded)


def test_a_killed_for_want_of_memory_before_the_larger_one_is_there():
    driver = migrating()
    commands = driver.fail(1, OOM, at=25.0)
    assert not [c for c in commands if isinstance(c, LaunchNode)]
    driver.join(0, 2)
    come(driver, 3, at=30.0)
    assert driver.machine.rendezvous.members == (0, 3, 2)
    assert driver.machine.nodes[3].memory_factor == 2.0


def test_a_job_that_is_to_have_fewer_nodes_calls_both_off():
    driver = migrating()
    driver.give(inputs.ScaleRequested(1, "enough", "user"), at=25.0)
    assert driver.status(3) is NodeStatus.RELEASED
    assert driver.machine.scaling.leaving.keys() == {1, 2}
    assert not driver.emitted(events.MigrationEnded)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (asked(7), "Node 7 is none that DLRover has started: only those can be replaced."),
        (asked(1), "Node 1 is being replaced already."),
        (asked(3), "Node 3 does not train: only nodes of the running world can be replaced."),
        (
            asked(0, cpu=0.0),
            "Node 0: 0 times the cores and 2 times the memory were requested; both must be more than 0.",
        ),
    ],
)
def test_what_cannot_be_done_changes_nothing(given, sentence):
    driver = migrating()
    assert driver.machine.resizer.migration_refusal(given) == sentence
    assert driver.give(given) == []


def test_nodes_that_came_by_themselves_stay():
    driver = JobDriver.running()
    assert "none that DLRover has started" in driver.machine.resizer.migration_refusal(asked())


def test_no_node_gets_more_memory_than_the_platform_has():
    driver = JobDriver.launched(3, 3, grows_memory=True, most_memory_factor=3.0)
    assert driver.give(asked(memory=8.0))[-1] == LaunchNode(3, 1, (), 3.0)


def test_a_node_that_has_all_the_memory_restarts_with_it():
    driver = JobDriver.launched(1, 1, grows_memory=True, most_memory_factor=1.0)
    commands = driver.fail(0, OOM, at=20.0)
    assert not [c for c in commands if isinstance(c, LaunchNode)]
    (told,) = driver.emitted(events.MemoryBound)
    assert told.sentence() == "Node 0 has all the memory that it can be given: it gets no more."


@pytest.mark.parametrize(
    ("action", "most", "ordered"),
    [("replace", 0.0, True), ("report", 0.0, False), ("replace", 1.0, False)],
)
def test_a_forecast_is_followed_where_that_is_wanted_and_possible(action, most, ordered):
    driver = JobDriver.launched(
        1, 1, grows_memory=True, most_memory_factor=most, limits=Limits(memory_action=action)
    )
    commands = driver.give(
        inputs.MemoryForecast(1, events.MemoryGrows(0, 24 << 30, 16 << 30, 1800.0)), at=20.0
    )
    assert commands == ([LaunchNode(1, 0, (), 1.5)] if ordered else [])
    assert driver.machine.state.phase is Phase.RUNNING
    (told,) = driver.emitted(events.MemoryGrows)
    assert told.ordered == ordered
    assert bool(driver.emitted(events.MemoryBound)) == (most == 1.0)


def test_a_master_that_takes_over_gives_the_new_node_its_time_again():
    driver = migrating()
    driver.give(inputs.MasterStarted(9), at=500.0)
    assert (
        driver.machine.fleet.migrations[3].until == 500.0 + driver.machine.job.limits.join_timeout
    )
