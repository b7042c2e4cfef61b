"""A platform's view of the nodes requested from it, and its requests to replace one."""

from __future__ import annotations

from typing import Literal

from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.state import Node
from dlrover.platform.base import PlacedNode
from dlrover.spec.node import NodeStatus

_UNKNOWN = -1


def placed(machine: JobMachine) -> dict[str, PlacedNode]:
    """Return the nodes of a job that have a handle, by handle."""
    leaving = {migration.node for migration in machine.fleet.migrations.values()}
    leaving |= machine.scaling.leaving.keys()
    return {
        node.handle: PlacedNode(
            node_id=node.id,
            node_rank=node.node_rank,
            standing=_standing(machine, node, leaves=node.id in leaving),
            cpu_factor=node.cpu_factor,
            memory_factor=node.memory_factor,
            why=": ".join(filter(None, (node.reason, node.waits))),
        )
        for node in machine.nodes.values()
        if node.handle
    }


def _standing(
    machine: JobMachine, node: Node, *, leaves: bool
) -> Literal["idle", "trains", "leaves", "gone"]:
    if node.status.final:
        return "gone"
    if leaves:
        return "leaves"
    between = node.status is NodeStatus.READY and node.has_run and machine.rendezvous.collecting
    unknown = machine.adoption.pending  # without its journal, a master asks what the node trains
    return "trains" if node.status is NodeStatus.RUNNING or between or unknown else "idle"


def requested(
    machine: JobMachine, handle: str, factors: tuple[float, float], reason: str
) -> inputs.MigrationRequested:
    """Return the input that asks the machine to replace the node with a handle.

    ``factors`` are the CPU and memory multipliers of the replacement, relative to the job's request.
    """
    ids = (node.id for node in machine.nodes.values() if node.handle == handle)
    return inputs.MigrationRequested(next(ids, _UNKNOWN), *factors, reason)
