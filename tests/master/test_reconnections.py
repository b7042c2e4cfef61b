"""Nodes that are away while others come back: who is given up, and when."""

from dlrover.master.machine.inputs import DeadlinePassed, MasterStarted, NodeDisconnected, Submitted
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Phase
from dlrover.rpc.messages import Hello
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.node import NodeStatus
from dlrover.spec.world import Holding, World
from tests.support.drivers import JobDriver


def returns(job: JobDriver, node: int, at: float) -> None:
    job.give(Hello(f"agent {node}", node, -1, f"host{node}", 1, epoch=1), at=at)


def pass_deadlines(job: JobDriver, until: float) -> None:
    """Give the machine each deadline up to a time."""
    while (due := job.machine.deadline()) is not None and due <= until:
        job.give(DeadlinePassed(), at=due)


def test_no_node_is_given_up_while_the_connections_of_others_come_back():
    """The network was away for a while; the nodes return one after the other, the last after 9 s."""
    job = JobDriver.running(5, 1, 5)
    job.give(*map(NodeDisconnected, range(5)), at=100.0)
    for node in range(5):
        at = 101.0 + 2.0 * node
        pass_deadlines(job, at)
        returns(job, node, at)
    assert job.machine.deadline() is None
    assert job.machine.state.phase is Phase.RUNNING
    assert not job.emitted(events.NodeLost)


def test_no_node_is_given_up_while_the_connections_of_others_break():
    """A node returns soon after the others have lost their connections, too."""
    job = JobDriver.running()
    job.give(NodeDisconnected(0), at=100.0)
    job.give(NodeDisconnected(1), at=102.0)
    job.give(NodeDisconnected(2), at=104.0)
    pass_deadlines(job, 106.0)
    for node in range(3):
        returns(job, node, 106.0)
    assert not job.emitted(events.NodeLost)


def test_a_new_master_gives_up_no_node_while_others_come_back():
    job = JobDriver.running(4, 1, 4)
    job.give(MasterStarted(17), at=100.0)
    for node in range(4):
        at = 113.0 + 2.0 * node
        pass_deadlines(job, at)
        returns(job, node, at)
    assert job.machine.state.phase is Phase.RUNNING
    assert not job.emitted(events.NodeLost)


def test_who_does_not_come_back_is_given_up_once_the_others_are_back():
    job = JobDriver.running()
    job.give(*map(NodeDisconnected, range(3)), at=100.0)
    returns(job, 0, 101.0)
    returns(job, 1, 102.5)
    pass_deadlines(job, 105.0)
    assert not job.emitted(events.NodeLost)
    pass_deadlines(job, 106.0)
    assert job.emitted(events.NodeLost) == [events.NodeLost(2, "its connection did not come back")]
    assert job.now == 105.5


def test_nodes_that_are_lost_together_are_given_up_as_early_as_one():
    job = JobDriver.running()
    job.give(NodeDisconnected(1), NodeDisconnected(2), at=100.0)
    pass_deadlines(job, 200.0)
    assert job.now == 103.0
    assert job.status(1) is job.status(2) is NodeStatus.LOST


def test_a_connection_that_never_rests_keeps_no_lost_node_for_longer_than_a_silent_one():
    job = JobDriver.running()
    job.give(NodeDisconnected(2), at=100.0)
    for at in range(100, 200):
        pass_deadlines(job, float(at))
        job.give(NodeDisconnected(1), at=float(at))
        returns(job, 1, at + 0.5)
        if job.status(2) is NodeStatus.LOST:
            break
    assert at == 160, "the heartbeat timeout is 60 s"
    assert job.status(1) is NodeStatus.RUNNING


def test_newcomers_keep_no_lost_node():
    job = JobDriver.running(3, 1, 9)
    job.give(NodeDisconnected(2), at=100.0)
    job.now = 102.0
    job.connect(3)
    pass_deadlines(job, 104.0)
    assert job.status(2) is NodeStatus.LOST


def test_a_master_without_a_journal_hears_all_while_they_come_back():
    """The fourth node reports its world after the time for that, but soon after the third."""
    machine = JobMachine()
    limits = Limits(recovery_grace=15.0)
    job = JobSpec(name="job", min_nodes=4, max_nodes=4, limits=limits)
    machine.handle(Submitted(job, "", earlier_events=9), 100.0)
    said = []
    for node in range(4):
        at = 109.0 + 2.5 * node
        while (due := machine.deadline()) is not None and due < at:
            said += machine.handle(DeadlinePassed(), due)
        world = World(
            round=3,
            restart_count=1,
            node_rank=node,
            node_count=4,
            first_rank=node,
            world_size=4,
            store_addr="a",
            store_port=1,
        )
        held = Holding(round=3, world=world, nproc=1)
        said += machine.handle(Hello(f"agent {node}", node, -1, "host", 3, held, epoch=1), at)
    assert machine.state.phase is Phase.RUNNING
    assert (machine.rendezvous.round, len(machine.rendezvous.members)) == (3, 4)
