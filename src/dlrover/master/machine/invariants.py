"""Invariants of a job's state after every input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.spec.node import NodeStatus

if TYPE_CHECKING:
    from dlrover.master.machine.job import JobMachine


def check(machine: JobMachine) -> None:
    """Raise AssertionError on the first broken invariant."""
    machine.rendezvous.validate()
    machine.restarts.validate()
    machine.adoption.validate()
    machine.faults.validate()
    machine.checks.validate()
    machine.autoscaling.validate()
    _check_scaling(machine)
    assert machine.checks.run is None or machine.rendezvous.collecting, "a check beside a world"
    rdzv = machine.rendezvous
    adopting = machine.adoption.pending
    assert not (adopting and (rdzv.collecting or rdzv.members)), "two rounds at once"
    assert machine.next_id > max(machine.nodes, default=-1), "an id would be given twice"
    for node in machine.nodes.values():
        assert not (node.status.final and node.id in rdzv.offers), "a lost node has an offer"
        assert not (node.status.final and node.connected), "lost but connected"
        assert node.status is not NodeStatus.PENDING or not node.connected, "pending, connected"
        busy = node.status in (NodeStatus.RUNNING, NodeStatus.SUCCEEDED)
        assert not busy or node.id in machine.worlds, "workers outside of the world"
        away = not (node.connected or node.gone or node.status is NodeStatus.PENDING)
        if machine.outcome is None and away and not node.status.final:
            assert node.id in machine.lost_at, "a node without connection is waited for without end"
    assert tuple(machine.worlds) == rdzv.members, "the members were told of another world"
    for node_id in rdzv.offers:
        assert machine.nodes[node_id].status is NodeStatus.READY, "an offer from a busy node"
        if machine.outcome is None:
            assert machine.nodes[node_id].connected, "an offer from a node without connection"
    for node_id in rdzv.missing:
        assert not machine.nodes[node_id].status.final, "a lost node is awaited"
    if machine.outcome is None and not rdzv.collecting:
        for node_id in rdzv.members:
            status = machine.nodes[node_id].status
            assert status in (NodeStatus.RUNNING, NodeStatus.SUCCEEDED), "a hole in the world"
    for node_id in machine.lost_at:
        node = machine.nodes[node_id]
        assert not node.connected, "a connected node is being given up"
        assert not node.status.final, "a lost node is being given up"
    assert all(node_id in machine.nodes for node_id in machine.by_uid.values())
    if machine.incident is not None:
        assert machine.incident.seen == {failure.id for failure in machine.incident.failures}
        assert machine.incident.decided or rdzv.collecting or machine.outcome is not None
    assert machine.steps >= 0
    assert machine.earlier_steps >= 0


def _check_scaling(machine: JobMachine) -> None:
    scaling, rdzv = machine.scaling, machine.rendezvous
    scaling.validate()
    assert (rdzv.least, rdzv.most) == (scaling.least, scaling.most), "a world of another size"
    assert rdzv.leaving == scaling.leaving.keys(), "a node leaves that the rounds do not know of"
    for node_id in scaling.leaving:
        node = machine.nodes[node_id]
        assert node.launched, "a node is called off that came by itself"
        assert node.status not in (NodeStatus.PENDING, NodeStatus.LOST), "nothing is to leave"
    _check_migrations(machine)
    ranks = [
        node.node_rank
        for node in machine.nodes.values()
        if node.launched
        and not (node.status.final or node.id in scaling.leaving or node.id in machine.migrations)
    ]
    settled = machine.outcome is None and not scaling.due
    assert not settled or len(ranks) == len(set(ranks)), "two nodes are to have the same rank"
    assert not settled or all(scaling.wants(rank) for rank in ranks), "a node too many"


def _check_migrations(machine: JobMachine) -> None:
    leave = [migration.node for migration in machine.migrations.values()]
    assert len(leave) == len(set(leave)), "two nodes are to take the same place"
    assert not machine.migrations.keys() & set(leave), "a node comes and goes"
    if machine.outcome is not None:
        return
    for successor, migration in machine.migrations.items():
        pair = machine.nodes[successor], machine.nodes[migration.node]
        assert not any(node.status.final for node in pair), "a place is kept for nobody"
        assert pair[0].node_rank == pair[1].node_rank, "another place is taken"
