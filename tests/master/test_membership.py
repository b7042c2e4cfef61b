"""Memberships of a job that survives losses: who takes a lost rank's place, and which reports come too late."""

import sys
from typing import Any

import msgspec
import pytest

from dlrover._util import framing
from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.membership import Membership
from dlrover.master.machine.state import Node
from dlrover.master.meeting import LEAST_VALUES, Meeting
from dlrover.rpc import wire
from dlrover.rpc.messages import Hello, Join, StartAgain, Succeeded
from dlrover.spec import events
from dlrover.spec.check import CheckReport, Component, ProbeResult, ProbeState
from dlrover.spec.failure import Failure, FailureKind, Rung
from dlrover.spec.job import Limits
from dlrover.spec.node import NodeStatus
from dlrover.spec.requests.membership import (
    MAX_VALUE,
    DivideMembers,
    FinishMembers,
    JoinMembers,
    LeaveMembers,
    Meet,
    Members,
    RenewMembers,
    checksum,
)
from dlrover.spec.world import Holding, Offer, World
from tests.support.drivers import JobDriver

SPEED = ProbeResult(component=Component.DEVICE, figure=100.0, unit="GFLOP/s")
BROKEN = ProbeResult(
    component=Component.DEVICE, state=ProbeState.FAILED, message="it computes wrongly"
)
TIME = ProbeResult(component=Component.NETWORK, figure=1.0, unit="ms")
KILLED = {"kind": FailureKind.SIGNAL, "signal": 9}


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


def checking(spares: int) -> JobDriver:
    """A job of two launched nodes that train, whose nodes are checked."""
    job = JobDriver(2, 2, managed_nodes=2, spares=spares, survive=True, node_check=True)
    for node in range(2 + spares):
        job.give(inputs.NodePlaced(node, f"process {node}"))
        job.connect(node, claims=node)
    job.join(0, 1)
    answer(job)
    return job


def answer(job: JobDriver, *results: ProbeResult) -> None:
    """Report the results of all nodes that are checked until the check is over."""
    while (run := job.machine.checks.run) is not None:
        found = results or (SPEED, TIME)
        report = CheckReport(check=run.number, round=run.round, results=found)
        job.give(*(inputs.Reported(node, report) for node in run.orders))


def test_a_spare_takes_a_lost_nodes_place_once_it_has_passed_its_check():
    job = checking(spares=1)
    job.join(2)
    assert job.machine.checks.run is not None
    job.give(inputs.NodeExited(1, "its pod was deleted"))
    assert membership(job).holes.keys() == {1}
    answer(job)
    assert job.machine.rendezvous.members == (0, 2)
    job.give(inputs.DeadlinePassed(), at=1000.0)
    assert job.machine.rendezvous.members == (0, 2)
    assert job.status(2) is NodeStatus.RUNNING


def test_a_node_in_a_lost_ones_place_is_checked_while_the_others_train():
    job = checking(spares=0)
    job.give(inputs.NodeExited(1, "its pod was deleted"))
    for node, results in ((2, (BROKEN,)), (3, ())):
        job.give(inputs.NodePlaced(node, f"process {node}"))
        job.connect(node, claims=node)
        job.join(node)
        assert job.machine.checks.run is not None
        assert job.machine.checks.run.orders.keys() == {node}
        assert membership(job).holes.keys() == {1}
        answer(job, *results)
    assert job.status(2) is NodeStatus.LOST
    assert job.machine.rendezvous.members == (0, 3)
    assert job.emitted(events.NodeCheckStarted)[1].reason == "a lost node is to be replaced"
    assert len(job.emitted(events.RoundOpened)) == 1


def test_a_node_that_comes_by_itself_and_is_broken_does_not_end_a_job_that_trains():
    job = JobDriver(2, 2, survive=True, node_check=True)
    for node in range(2):
        job.connect(node)
    job.join(0, 1)
    answer(job)
    job.give(inputs.NodeSilent(1, 60.0))
    for node, results in ((2, (BROKEN,)), (3, ())):
        job.connect(node)
        job.join(node)
        answer(job, *results)
    assert job.machine.rendezvous.members == (0, 3)
    assert len(job.emitted(events.RoundOpened)) == 1


def test_a_node_that_is_checked_for_a_lost_ones_place_opens_no_round_to_grow():
    job = JobDriver(1, 3, survive=True, node_check=True)
    for node in range(2):
        job.connect(node)
    job.join(0, 1)
    job.give(inputs.DeadlinePassed(), at=job.machine.deadline())
    answer(job)
    job.give(inputs.NodeSilent(1, 60.0))
    job.connect(2)
    job.join(2)
    assert job.machine.rounds.grow_at is None
    answer(job)
    assert job.machine.rendezvous.members == (0, 2)


def test_a_rank_of_a_lost_node_that_asks_too_late_does_not_join():
    job = JobDriver.launched(3, 3, survive=True)
    job.give(inputs.NodeExited(2, "its pod was deleted"))
    job.give(inputs.MemberReported(JoinMembers(1, rank=4, attempt=0)))
    assert membership(job).attempts.keys() == {0, 1, 2, 3}
    job.give(inputs.NodePlaced(3, "process 3"))
    job.connect(3, claims=3)
    job.join(3)
    assert membership(job).ranks[3] == range(4, 6)
    job.give(inputs.MemberReported(JoinMembers(1, rank=4, attempt=1)))
    assert membership(job).attempts[4] == 1


def test_only_a_node_with_as_many_workers_takes_a_lost_ones_place():
    job = JobDriver.running(2, 1, 2, survive=True)
    job.give(inputs.NodeSilent(0, 60.0))
    for node, nproc in ((2, 1), (3, 3), (4, 2)):
        job.connect(node)
        round_ = job.machine.rendezvous.next_round
        job.give(inputs.Reported(node, Join(round_, Offer(nproc, f"host{node}", 29400))))
    assert membership(job).ranks == {1: range(2, 4), 4: range(2)}


def held(node: int, **facts: object) -> Holding:
    """What a node with two workers holds of round 5 of two nodes."""
    world = World(5, 1, node, 2, 2 * node, 4, "host0", 29400)
    return msgspec.structs.replace(Holding(round=5, world=world, nproc=2, steps=7), **facts)


def adopted(*holdings: Holding) -> JobDriver:
    job = JobDriver(2, 2, survive=True)
    for node, holding in enumerate(holdings):
        job.give(Hello(f"agent {node}", node, -1, f"host{node}", 5, holding))
    assert job.emitted(events.MasterAdopted)
    return job


def test_an_adopted_round_has_its_membership_so_that_a_loss_opens_no_round():
    job = adopted(held(0), held(1))
    assert membership(job).attempts == dict.fromkeys(range(4), 0)
    job.fail(1, {"kind": FailureKind.SIGNAL, "signal": 9, "rank": 2})
    assert (membership(job).attempts.keys(), membership(job).number) == ({0, 1, 3}, 1)
    assert not job.machine.rendezvous.collecting


def test_a_rank_that_only_the_lost_master_knew_to_have_joined_joins_when_it_connects_anew():
    job = adopted(held(0), held(1, attempts={0: 1, 1: 0}))
    for late in (RenewMembers(5, 2, 0, 7), RenewMembers(5, 2, 1, 0), RenewMembers(5, 2, 1, 2**40)):
        job.give(inputs.MemberReported(late))
    assert membership(job).lacks_ranks
    job.give(inputs.MemberReported(RenewMembers(5, 2, 1, 7)))
    assert membership(job).members() == Members(5, 8, {0: 0, 1: 0, 2: 1, 3: 0})


def test_the_adopted_membership_is_the_newest_that_an_agent_was_told():
    older = Members(5, 3, {0: 0, 1: 0, 3: 0})
    newest = Members(5, 4, {0: 0, 1: 0, 2: 1, 3: 0})
    job = adopted(held(0, members=newest), held(1, members=older, attempts={0: 1, 1: 0}))
    assert membership(job).members() == newest
    assert not membership(job).lacks_ranks


def test_a_rank_that_was_started_again_before_the_journal_was_lost_joins_the_adopted_round():
    job = adopted(held(0), held(1, attempts={0: 1, 1: 0}))
    assert (membership(job).attempts.keys(), membership(job).number) == ({0, 1, 3}, 1)
    job.give(inputs.MemberReported(JoinMembers(5, rank=2, attempt=0)))
    assert membership(job).lacks_ranks
    job.give(inputs.MemberReported(JoinMembers(5, rank=2, attempt=1)))
    assert not membership(job).lacks_ranks


def test_a_world_with_a_node_in_a_lost_ones_place_is_adopted():
    world = held(1).world
    assert world is not None
    again = {"world": world.as_attempt(1), "attempts": {0: 1, 1: 1}}
    job = adopted(held(0, members=Members(5, 2, {0: 0, 1: 0, 2: 1, 3: 1})), held(1, **again))
    assert membership(job).attempts == {0: 0, 1: 0, 2: 1, 3: 1}


def test_what_nodes_know_beyond_the_journal_counts():
    """A crash of the master's machine may take the end of its journal."""
    job = JobDriver.running(2, 2, 2, survive=True)

    def connect(node: int, **facts: object) -> Members:
        known = Holding(round=1, world=job.machine.rounds.worlds[node], nproc=2)
        known = msgspec.structs.replace(known, **facts)
        job.give(Hello(f"agent {node}", node, -1, f"host{node}", 1, known))
        return membership(job).members()

    told = Members(1, 5, {0: 0, 1: 0, 2: 1})
    assert connect(0, members=told) == Members(1, 6, told.attempts)
    assert connect(0, members=Members(1, 6, told.attempts)).number == 6
    assert connect(1, members=Members(1, 6, {0: 0, 1: 0})) == Members(1, 7, told.attempts)
    assert connect(1, attempts={0: 2, 1: 3}).attempts == {0: 0, 1: 0}
    job.give(inputs.MemberReported(JoinMembers(1, rank=3, attempt=2)))
    assert membership(job).attempts == {0: 0, 1: 0}
    for attempt in (3, 4):
        job.give(inputs.MemberReported(JoinMembers(1, rank=3, attempt=attempt)))
        assert membership(job).attempts == {0: 0, 1: 0, 3: attempt}
    assert connect(0, members=Members(1, 9, {0: 0}, over=True)).over


def test_a_round_opens_if_all_ranks_that_the_journal_knows_to_train_are_lost():
    job = JobDriver.running(1, 1, 1, survive=True)
    world = job.machine.rounds.worlds[0]
    again = Holding(round=1, world=world, nproc=2, attempts={0: 1, 1: 1})
    job.give(Hello("agent 0", 0, -1, "host0", 1, again))
    assert (job.machine.rendezvous.round, job.machine.rendezvous.collecting) == (2, True)


def test_the_keys_by_which_ranks_meet_have_a_size_in_all():
    job = JobDriver.running(2, 2, 2, survive=True)
    meeting, value = Meeting(), bytes(MAX_VALUE)

    def put(number: int, value: bytes) -> str:
        request = Meet(1, 0, checksum(dict.fromkeys(range(4), 0)), {f"key {number}": value})
        return meeting.handle(request, 7, membership(job)).refused

    numbers = range(LEAST_VALUES - 1)
    assert not any(put(number, value) for number in (*numbers, *numbers))
    assert "at most 67108864 bytes" in put(LEAST_VALUES, value)
    assert not put(0, b"")
    assert not put(LEAST_VALUES, value)
    assert "at most 65536 bytes" in put(0, value + b"x")
    job.give(inputs.NodeSilent(1, 60.0))
    assert "is over" in put(0, b"")


def test_the_keys_of_a_thousand_ranks_are_read_in_messages_of_a_bounded_size():
    job = JobDriver.running(2, 2, 2, survive=True)
    meeting, values = Meeting(), {f"0/{rank}": bytes(8000) for rank in range(1000)}
    ranks = checksum(membership(job).attempts)
    for key, value in values.items():
        meeting.handle(Meet(1, 0, ranks, {key: value}), 7, membership(job))
    read: dict[str, bytes] = {}
    while found := meeting.handle(Meet(1, 0, ranks, {}, len(read)), 7, membership(job)):
        assert len(wire.encode(found)) < framing.MAX_FRAME
        if not found.values:
            break
        assert not read.keys() & found.values.keys()
        read |= found.values
    assert read == values


def in_rows() -> JobDriver:
    """Two nodes of two ranks each, in two rows."""
    job = JobDriver.running(2, 2, 2, survive=True)
    for row in (3, 2, 4):  # 3 divides no world of 4 ranks; the first that does counts
        job.give(inputs.MemberReported(DivideMembers(1, rank=0, attempt=0, row=row)))
    assert membership(job).members() == Members(1, 1, dict.fromkeys(range(4), 0), row=2)
    return job


def test_a_row_is_lost_starts_again_and_joins_as_a_whole():
    job = in_rows()
    for attempt, rank in ((1, 3), (2, 2)):
        job.fail(1, KILLED | {"rank": rank, "local_rank": rank - 2})
        assert membership(job).attempts == {0: 0, 1: 0}
        assert membership(job).out_of(1) == {0: attempt, 1: attempt}
        assert not job.machine.rendezvous.collecting
    for ready, attempts in (((2, 1), 2), ((2, 2), 2), ((2, 2), 2), ((3, 2), 4)):
        job.give(inputs.MemberReported(JoinMembers(1, *ready)))
        assert len(membership(job).attempts) == attempts
    assert membership(job).attempts == {0: 0, 1: 0, 2: 2, 3: 2}


def test_a_row_that_cannot_join_within_a_step_leaves_the_others_until_it_asks_again():
    job = in_rows()
    job.fail(1, KILLED | {"rank": 3, "local_rank": 1})

    def report(kind: type, *ranks: int) -> set[int]:
        number = membership(job).number
        job.give(*(inputs.MemberReported(kind(1, rank, 1)) for rank in ranks))
        assert membership(job).number == number + 1
        return set(membership(job).attempts)

    assert report(JoinMembers, 2, 3) == {0, 1, 2, 3}
    assert report(LeaveMembers, 2, 3) == {0, 1}
    job.give(inputs.MemberReported(LeaveMembers(1, 0, 0)))
    assert set(membership(job).attempts) == {0, 1}  # nobody else trains
    assert membership(job).out_of(1) == {0: 1, 1: 1}  # in the same processes
    assert report(JoinMembers, 3, 2) == {0, 1, 2, 3}


def test_a_round_opens_if_each_row_has_lost_a_rank():
    job = in_rows()
    job.fail(1, KILLED | {"rank": 3, "local_rank": 1})
    job.fail(0, KILLED | {"rank": 0})
    assert job.machine.rendezvous.collecting


def test_the_rows_of_a_lost_master_are_known_from_its_nodes():
    trains = Members(5, 2, dict.fromkeys(range(4), 0), row=2)
    # One rank of the second row was started again: as soon as the master hears of it, the row does as a whole.
    job = adopted(held(0, members=trains), held(1, attempts={0: 1, 1: 0}))
    assert membership(job).attempts == {0: 0, 1: 0}
    assert membership(job).out_of(1) == {0: 1, 1: 1}
    job.give(*(inputs.MemberReported(JoinMembers(5, rank, 1)) for rank in (2, 3)))
    assert membership(job).attempts == {0: 0, 1: 0, 2: 1, 3: 1}


def test_nobody_is_started_again_beside_ranks_that_have_ended_well():
    """A rank that joined would wait for them: the master that heard of the end may have lost its journal."""
    job = adopted(held(0), held(1))
    job.give(inputs.Reported(1, Succeeded(5)))
    assert membership(job).members() == Members(5, 1, dict.fromkeys(range(4), 0), over=True)
    assert membership(adopted(held(0), held(1, succeeded=True))).over
    job.fail(0, {"kind": FailureKind.SIGNAL, "signal": 9})
    assert job.machine.rendezvous.collecting


@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_whose_rank_0_was_lost_at_its_end_does_not_end_without_it(lost: int):
    job = JobDriver.running(2, 1, 2, survive=True)
    job.give(inputs.NodeSilent(lost, 60.0))
    job.give(inputs.MemberReported(FinishMembers(1, rank=2 * (1 - lost), attempt=0)))
    job.give(inputs.Reported(1 - lost, Succeeded(1)))
    if lost == 0:
        assert job.machine.outcome is None
        assert job.machine.rendezvous.collecting
    else:
        assert job.machine.outcome is not None
        assert job.machine.outcome.exit_code == ExitCode.SUCCESS


def test_a_rank_that_cannot_join_the_others_lets_all_start_again():
    job = JobDriver.running(2, 2, 2, survive=True)
    error = "dlrover.errors.InfrastructureError"
    frame = 'File "/env/dlrover/training/replicas/unchanged.py", line 7, in _ask\n    raise x\n'
    for message, opened in (("no answer.", False), ("x; all ranks start again.", True)):
        trace = f"Traceback (most recent call last):\n  {frame}{error}: {message}\n"
        facts = {"kind": FailureKind.EXCEPTION, "exception": error, "traceback": trace}
        job.fail(1, facts | {"message": message})
        assert job.machine.rendezvous.collecting is opened


def kill(job: JobDriver, node: int, attempt: int, **facts: object) -> list[inputs.Command]:
    """Kill the first worker of a node; it asks to join again."""
    commands = job.fail(node, KILLED | facts, id=f"node {node}, {attempt}")
    job.give(inputs.MemberReported(JoinMembers(1, rank=2 * node, attempt=attempt)))
    return commands


def lose(job: JobDriver, attempt: int, steps: int, rank: int = 2) -> None:
    """Lose a rank of node 1 again; ``steps`` are those that it has made, and the others make more."""
    job.give(inputs.Progressed(job.machine.rendezvous.round, 10 * (attempt + 2)))
    job.fail(1, KILLED, id=f"{rank} {attempt}", attempt=attempt, steps=steps, rank=rank, local_rank=rank - 2)  # fmt: skip


def test_a_rank_that_is_lost_again_and_again_on_its_way_ends_the_job_although_the_others_train():
    """Before, it was started again a hundred times."""
    job = JobDriver.running(2, 1, 2, survive=True, limits=Limits(node_fault_limit=0))
    lose(job, 0, steps=11)
    for attempt in range(1, 9):
        lose(job, attempt, steps=0)
    assert job.machine.outcome is None
    lose(job, 9, steps=0)
    assert job.machine.outcome is not None
    assert job.machine.outcome.exit_code == ExitCode.NO_PROGRESS
    assert "the last 9 restarts ended in the same way at step 11" in job.machine.outcome.reason


def test_ranks_that_come_to_the_others_and_are_lost_later_do_not_end_the_job():
    job = JobDriver.running(2, 1, 2, survive=True, limits=Limits(node_fault_limit=0))
    for number in range(30):  # on its way, then beyond it
        lose(job, number, steps=0 if number % 2 else 10 * number + 1)
    assert job.machine.outcome is None
    for attempt in range(20):
        lose(job, 30 + attempt, steps=0)
        lose(job, attempt + 1, steps=0, rank=3)
    assert job.machine.outcome is None


def test_a_worker_that_may_have_broken_its_process_starts_from_a_fresh_one():
    job = JobDriver.launched(2, 2, survive=True)
    says = [c.message for c in kill(job, 1, 1, signal=11) if isinstance(c, inputs.Say)]
    assert StartAgain(1, {0: 1}, fresh=True) in says
    assert StartAgain(1, {0: 2}) in [
        c.message for c in kill(job, 1, 2) if isinstance(c, inputs.Say)
    ]


def test_a_node_with_too_many_faults_is_given_up_while_the_others_train():
    job = JobDriver.launched(2, 2, survive=True, limits=Limits(node_fault_limit=2))
    kill(job, 1, 1)
    assert job.status(1) is NodeStatus.RUNNING
    kill(job, 1, 2)
    assert job.status(1) is NodeStatus.LOST
    (_, decided) = job.emitted(events.RestartDecided)
    assert (decided.rung, decided.ranks) == (Rung.IN_PROCESS, (2, 3))
    assert "the job goes on without node 1; the others go on" in decided.sentence()
    assert membership(job).attempts == {0: 0, 1: 0}
    other = Failure(
        id="its other worker", kind=FailureKind.SIGNAL, node_id=1, rank=3, local_rank=1, round=1
    )
    assert job.machine.recovery.admitted(other) is None
    job.give(inputs.NodePlaced(2, "process 2"))
    job.connect(2, claims=2)
    job.join(2)
    assert job.machine.rendezvous.members == (0, 2)
    assert len(job.emitted(events.RoundOpened)) == 1


def test_a_node_with_too_many_faults_is_given_up_although_no_other_one_trains():
    job = JobDriver.launched(1, 1, survive=True, limits=Limits(node_fault_limit=2))
    kill(job, 0, 1)
    kill(job, 0, 2)
    assert job.status(0) is NodeStatus.LOST
    assert job.emitted(events.RestartDecided)[-1].rung is Rung.ELSEWHERE
    assert job.machine.rendezvous.collecting
    job.give(inputs.NodePlaced(1, "process 1"))
    job.connect(1, claims=1)
    job.join(1)
    job.give(inputs.Progressed(2, 1))
    assert job.machine.incident is None


def test_a_node_that_needs_more_memory_gets_it_while_the_others_train():
    job = JobDriver.launched(2, 2, survive=True, grows_memory=True, most_memory_factor=2.0)
    kill(job, 1, 1, oom_killed=True)
    assert job.status(1) is NodeStatus.LOST
    assert job.machine.nodes[2].memory_factor == 2.0
    job.give(inputs.NodePlaced(2, "process 2"))
    job.connect(2, claims=2)
    job.join(2)
    assert job.machine.rendezvous.members == (0, 2)
    job.fail(2, KILLED, oom_killed=True, rank=2)
    assert job.emitted(events.MemoryBound) == [events.MemoryBound(2, 2.0)]
    assert job.status(2) is NodeStatus.RUNNING
    assert len(job.emitted(events.RoundOpened)) == 1


def test_nodes_that_are_lost_at_once_are_one_fault_and_cost_one_restart():
    """Before, the tenth node of a rack ended the job: its restarts had led to no new step."""
    job = JobDriver.running(20, 1, 20, survive=True)
    job.give(inputs.Progressed(1, 500), at=100.0)
    job.give(*(inputs.NodeSilent(node, 60.0) for node in range(1, 16)))
    assert job.machine.outcome is None
    assert job.machine.restarts.count == 1
    assert len(job.emitted(events.RestartDecided)) == 15
    job.connect(20)
    job.join(20)  # in the place of node 1, and lost again
    assert membership(job).ranks[20] == range(2, 4)
    job.give(inputs.NodeSilent(20, 60.0))
    assert job.machine.restarts.count == 2


@pytest.mark.parametrize("steps", [0, 500])
def test_workers_that_are_ended_at_once_from_outside_are_one_fault(steps: int):
    """Before, the fourth of a node that was stopped before the first step ended the job."""
    job = JobDriver.running(120, 1, 120, survive=True)
    job.give(inputs.Progressed(1, steps), at=30.0)
    for number in range(110):
        place = {"rank": 2 * number, "local_rank": 0, "attempt": 0, "steps": steps}
        job.fail(number, {"kind": FailureKind.SIGNAL, "signal": 15}, id=f"{number}", **place)
    assert job.machine.outcome is None
    assert job.machine.restarts.count == 1


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("row", [1, 4])
def test_nodes_that_end_their_workers_before_they_are_lost_are_one_fault(row: int, stops: bool):
    """Before, the tenth node that was stopped ended the job, as did the tenth lost one beside others of its row."""
    job = JobDriver.running(40, 1, 40, survive=True)
    job.give(inputs.MemberReported(DivideMembers(1, rank=0, attempt=0, row=row)))
    job.give(inputs.Progressed(1, 500), at=100.0)
    for node in range(1, 31):
        for rank in (2 * node, 2 * node + 1) if stops else ():
            place = {"rank": rank, "local_rank": rank % 2, "attempt": 0, "steps": 500}
            job.fail(node, {"kind": FailureKind.SIGNAL, "signal": 15}, id=f"{rank}", **place)
    job.give(*(inputs.NodeSilent(node, 60.0) for node in range(1, 31)))
    assert job.machine.outcome is None
    assert job.machine.restarts.count == 1


def test_losses_of_a_long_round_are_one_fault_though_the_same_ranks_were_lost_before():
    job = JobDriver.running(40, 1, 40, survive=True)
    nodes = range(1, 31)
    for count in (1, 2):
        job.give(inputs.Progressed(1, 500 * count), at=100.0 * count)
        job.give(*(inputs.NodeSilent(node, 60.0) for node in nodes))
        assert job.machine.outcome is None
        assert job.machine.restarts.count == count
        nodes = range(10 + 30 * count, 40 + 30 * count)
        for node in nodes:
            job.connect(node)
            job.join(node)
        ranks = [rank for node in nodes for rank in membership(job).ranks[node]]
        job.give(*(inputs.MemberReported(JoinMembers(1, rank, count)) for rank in ranks))
        job.give(inputs.Progressed(1, 500 * count + 1))
        assert job.machine.incident is None


def test_the_loss_of_a_node_looks_at_no_other_node(monkeypatch: pytest.MonkeyPatch):
    """Before, each of thousands that were lost at once took time, and a message, for each other one."""
    job = JobDriver.running(20, 1, 20, survive=True)
    job.give(inputs.NodeSilent(1, 60.0))
    judged = []
    cause = Ledger._cause

    def noted(ledger: Ledger, node: Node, *args: Any) -> int:
        judged.append(node.id)
        return cause(ledger, node, *args)

    monkeypatch.setattr(Ledger, "_cause", noted)
    assert job.give(inputs.NodeSilent(2, 60.0)) == [inputs.TellMembers()]
    assert judged == []


def lines_of_a_replacement(nodes: int) -> int:
    """How many lines the machine runs through when a node takes a lost one's place, and half of them are lost."""
    job = JobDriver.running(nodes, 1, nodes, survive=True)
    job.give(*(inputs.NodeSilent(node, 60.0) for node in range(nodes // 2, nodes)))
    job.connect(nodes)
    join = inputs.Reported(nodes, Join(2, Offer(2, "new", 29400)))
    count = 0

    def trace(_frame: object, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        job.machine.handle(join, job.now)
    finally:
        sys.settrace(None)
    assert nodes in membership(job).ranks
    return count


def test_a_replacement_takes_no_longer_than_the_number_of_nodes_and_of_lost_ones():
    """Before, it took their product: 1 s with 500 lost ones of 5,000."""
    assert lines_of_a_replacement(120) < 6 * lines_of_a_replacement(30)
