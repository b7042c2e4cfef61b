"""The ladder of responses: which rung for which facts, and what the event says in a whole job."""

from __future__ import annotations

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.recovery.ladder import LADDER, FaultFacts, choose
from dlrover.rpc.messages import Join
from dlrover.spec import events
from dlrover.spec.failure import Action, FailureKind, Rung
from dlrover.spec.node import FIRST_SPARE
from dlrover.spec.requests.membership import JoinMembers
from dlrover.spec.world import Offer
from tests.support.drivers import JobDriver

LOST = {"action": Action.RESTART, "leaves": True}
STAYS = {"action": Action.RESTART, "leaves": False}


@pytest.mark.parametrize(
    ("facts", "rung"),
    [
        (STAYS | {"survives": True}, Rung.IN_PROCESS),
        (STAYS, Rung.PROCESS),
        (STAYS | {"spare": True}, Rung.PROCESS),
        (STAYS | {"action": Action.RESTART_FRESH}, Rung.NODE),
        (LOST | {"survives": True}, Rung.IN_PROCESS),
        (LOST | {"spare": True}, Rung.SPARE),
        (LOST | {"spare": True, "launched": False, "enough": True}, Rung.SPARE),
        (LOST, Rung.ELSEWHERE),
        (LOST | {"enough": True}, Rung.ELSEWHERE),
        (LOST | {"launched": False}, Rung.ELSEWHERE),
        (LOST | {"launched": False, "enough": True}, Rung.SMALLER),
    ],
)
def test_the_first_rung_that_applies_is_taken(facts: dict, rung: Rung) -> None:
    assert choose(FaultFacts(**facts)) is rung


def test_the_ladder_has_every_rung_but_the_end() -> None:
    assert list(LADDER) == [rung for rung in Rung if rung is not Rung.END]


def decided(job: JobDriver) -> events.RestartDecided:
    (event,) = job.emitted(events.RestartDecided)
    return event


def managed(**options: object) -> JobDriver:
    """A job of two launched nodes that train."""
    job = JobDriver(2, 2, managed_nodes=2, **options)
    for node in range(2 + job.machine.scaling.spares):
        job.give(inputs.NodePlaced(node, f"process {node}"))
        job.connect(node, claims=node)
    job.join(0, 1)
    return job


def test_a_lost_node_says_where_its_successor_comes_from() -> None:
    job = managed()
    job.give(inputs.NodeExited(1, "its pod was deleted"))
    assert decided(job).rung is Rung.ELSEWHERE
    assert decided(job).sentence() == (
        "Restart 1: node 1 was lost: its pod was deleted; another node will replace node 1."
    )


def test_a_lost_node_is_replaced_by_a_spare_in_one_line() -> None:
    job = managed(spares=1)
    assert job.machine.nodes[2].node_rank == FIRST_SPARE
    job.give(inputs.Reported(2, Join(1, Offer(2, "host 2", 29402))))
    assert job.emitted(events.SpareReady) == [events.SpareReady(2)]
    job.give(inputs.NodeExited(1, "its pod was deleted"))
    assert (decided(job).rung, decided(job).successor) == (Rung.SPARE, 2)
    assert decided(job).sentence() == (
        "Restart 1: node 1 was lost: its pod was deleted; spare node 2 takes the place of node 1."
    )
    assert job.machine.nodes[2].node_rank == 1
    assert job.machine.nodes[3].node_rank == FIRST_SPARE
    job.join(0)
    assert job.machine.rendezvous.members == (0, 2)
    job.machine.validate()


def test_a_lost_node_that_came_by_itself_makes_the_world_smaller_or_is_awaited() -> None:
    job = JobDriver.running(2, 1, 2)
    job.give(inputs.NodeSilent(1, 60.0))
    assert decided(job).rung is Rung.SMALLER
    job = JobDriver.running(2, 2, 2)
    job.give(inputs.NodeSilent(1, 60.0))
    assert decided(job).rung is Rung.ELSEWHERE


def killed(job: JobDriver, node: int, local_rank: int = 0, **facts: object) -> None:
    rank = 2 * node + local_rank
    kill = {"kind": FailureKind.SIGNAL, "signal": 9, "rank": rank, "local_rank": local_rank}
    job.fail(node, kill | facts)


def test_where_the_others_go_on_one_line_says_so_and_the_incident_lasts_until_all_train() -> None:
    job = managed(survive=True)
    job.give(inputs.Progressed(1, 5))
    job.now = 10.0
    killed(job, 1, time=9.5)
    assert decided(job).rung is Rung.IN_PROCESS
    assert decided(job).sentence() == (
        "Restart 1: rank 2 was killed by SIGKILL (signal 9) on node 1; "
        "the others go on in their processes; rank 2 is started again."
    )
    job.give(inputs.Progressed(1, 9), at=12.0)
    assert job.machine.incident is not None, "one rank is away"
    job.give(inputs.MemberReported(JoinMembers(1, rank=2, attempt=1)), at=14.0)
    job.give(inputs.Progressed(1, 9), at=14.0)
    assert job.machine.incident is not None, "no step is new"
    job.give(inputs.Progressed(1, 10), at=15.0)
    (recovered,) = job.emitted(events.Recovered)
    assert recovered.sentence() == "All ranks train again, 5.00 s after the fault was seen."
    (incident,) = job.ledger.goodput(15.0).incidents
    assert (incident.node, incident.steps_lost, incident.over) == (1, 0, True)
    assert (incident.since, incident.until) == (9.5, 15.0)
    assert incident.title.startswith("rank 2 was killed by SIGKILL")
    assert incident.seconds == {"degraded": 2.0}, "a fourth of two nodes' time from 10 to 14"


def test_a_fault_that_stops_all_is_another_incident_and_is_decided() -> None:
    job = managed(survive=True, max_restarts=1)
    job.give(inputs.Progressed(1, 5), at=10.0)
    killed(job, 1)
    job.now = 20.0
    mistake = {"kind": FailureKind.EXCEPTION, "exception": "ValueError", "message": "no"}
    job.fail(0, mistake, time=20.0, steps=8)
    assert job.machine.rendezvous.collecting
    assert [event.rung for event in job.emitted(events.RestartDecided)] == [
        Rung.IN_PROCESS,
        Rung.PROCESS,
    ]
    job.join(0, 1, at=21.0)
    job.give(inputs.Progressed(2, 1), at=25.0)
    first, second = job.ledger.goodput(25.0).incidents
    assert (first.since, first.until, second.since, second.until) == (10.0, 20.0, 20.0, 25.0)
    assert second.title.startswith("rank 0 raised ValueError")
    assert [event.survived for event in job.emitted(events.Recovered)] == [False]


def test_a_lost_node_and_a_lost_rank_are_one_incident() -> None:
    job = managed(survive=True)
    job.give(inputs.NodeExited(1, "its pod was deleted"), at=10.0)
    assert decided(job).sentence() == (
        "Restart 1: node 1 was lost: its pod was deleted; the others go on in their processes; "
        "ranks 2, 3 are started again."
    )
    killed(job, 0, time=12.0)
    assert len(job.emitted(events.RestartDecided)) == 2
    (incident,) = job.ledger.goodput(12.0).incidents
    assert (incident.node, incident.over) == (1, False)
