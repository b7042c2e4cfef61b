"""Answers to requests for another number of nodes."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.scaling.scaling import Wanted
from dlrover.master.machine.waiting import waiting_for
from dlrover.platform.base import RoleSize
from dlrover.rpc import messages
from dlrover.spec.node import WORKER, NodeStatus


def refusal(machine: JobMachine, request: inputs.ScaleRequested) -> str:
    """Return why a job refuses a request, as one sentence; empty if it accepts."""
    if machine.outcome is not None:
        return f"The job has ended: {machine.outcome.reason}"
    return machine.scaling.refusal(request)


def changes(machine: JobMachine, request: inputs.ScaleRequested) -> bool:
    """Return whether a request changes the number or, as a user's first, keeps plans from changing it."""
    of_role = machine.scaling.roles[request.role]
    pins = request.source == "user" and not of_role.by_user
    return request.nodes != of_role.nodes or pins


def size(machine: JobMachine, now: float, role: str = WORKER) -> RoleSize:
    """Return how many nodes of a role a job wants at time ``now``, and whether it has all its nodes.

    The number is 0 for a role whose number cannot change.
    """
    scaling, rdzv = machine.scaling, machine.rendezvous
    of_role = scaling.roles.get(role) or Wanted(0, 0, 0)
    running = {
        i
        for i in rdzv.members
        if machine.nodes[i].status is NodeStatus.RUNNING or i in machine.rendezvous.servers
    }
    at_work = rdzv.count(running)
    whole = at_work == rdzv.usable(scaling.world) and not (rdzv.collecting or scaling.leaving)
    starting = [
        node
        for node in machine.nodes.values()
        if node.status is NodeStatus.PENDING and not machine.state.is_spare(node)
    ]
    waits = next((f"node {node.id}: {node.waits}" for node in starting if node.waits), "")
    return RoleSize(
        requested=of_role.requested,
        wanted=of_role.nodes,
        complete=whole and at_work.workers > 0 and machine.outcome is None,
        waits_for=waits
        or waiting_for(machine, now)
        or ("nodes are being started" * bool(starting)),
        plans=of_role.plans,
        reason=of_role.reason,
    )


def reply(before: int, after: int, role: str = "", *, alone: bool = False) -> messages.ScaleReply:
    """Return the answer to a change of the number of nodes; ``alone``: each is a world by itself."""
    kind = f"{role} nodes" if role else "nodes"
    count = f"{after} {kind}" if after != 1 else f"1 {kind[:-1]}"
    if before == after:
        return messages.ScaleReply(f"The job is to have {count} already; nothing changes.")
    number = abs(after - before)
    if after > before:
        come = "1 is being started" if number == 1 else f"{number} are being started"
        rest = f"{come}, and training goes on until they are there."
    else:
        leave = "the last one leaves" if number == 1 else f"the last {number} leave"
        rest = f"{leave}, and the others go on{'' if alone else ' in a new round'}."
    return messages.ScaleReply(f"The job is to have {count} instead of {before}: {rest}")
