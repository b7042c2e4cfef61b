"""The ladder of responses: which rung for which facts, and what the event says in a whole job."""

from __future__ import annotations

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.ladder import LADDER, Facts, choose
from dlrover.rpc.messages import Join
from dlrover.spec import events
from dlrover.spec.failure import Action, Rung
from dlrover.spec.node import FIRST_SPARE
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
    assert choose(Facts(**facts)) is rung


def test_the_ladder_has_every_rung_but_the_end() -> None:
    assert [step.rung for step in LADDER] == [rung for rung in Rung if rung is not Rung.END]


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
        "Restart 1: node 1 was lost: its pod was deleted; another node is to take the place of node 1."
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
