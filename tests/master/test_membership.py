"""Memberships of a job that survives losses: who takes a lost rank's place, and which reports come too late."""

from dlrover.master.machine import inputs
from dlrover.master.machine.membership import Membership
from dlrover.spec import events
from tests.support.drivers import JobDriver


def membership(job: JobDriver) -> Membership:
    return job.machine.state.membership


def test_a_node_that_waits_beyond_a_full_world_takes_a_lost_nodes_place():
    job = JobDriver.running(2, 2, 2, survive=True)
    job.connect(2)
    job.join(2)
    assert job.machine.spares.standing == {2}
    job.give(inputs.NodeSilent(1, 60.0))
    assert job.machine.rendezvous.members == (0, 2)
    assert job.machine.spares.standing == set()
    assert job.emitted(events.SpareTakesPlace) == [events.SpareTakesPlace(2, 1)]
    assert membership(job).ranks == {0: range(2), 2: range(2, 4)}
