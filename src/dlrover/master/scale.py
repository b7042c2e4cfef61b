"""What somebody is answered who asks for another number of nodes."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.waiting import waiting_for
from dlrover.platform.base import JobSize
from dlrover.rpc import messages
from dlrover.spec.node import NodeStatus


def refusal(machine: JobMachine, asked: inputs.ScaleAsked) -> str:
    """Why a job does not follow, as one sentence; empty if it does."""
    if machine.outcome is not None:
        return f"The job has ended: {machine.outcome.reason}"
    return machine.scaling.refusal(asked)


def changes(machine: JobMachine, asked: inputs.ScaleAsked) -> bool:
    """Whether what is asked for is new: a user's number is, if a plan could have changed it."""
    scaling = machine.scaling
    pins = asked.source == "user" and not scaling.by_user
    return asked.nodes != scaling.workers or pins


def size(machine: JobMachine, now: float) -> JobSize:
    """How many nodes a job is to have at time ``now``, and whether it has them."""
    scaling, rdzv = machine.scaling, machine.rendezvous
    running = sum(machine.nodes[i].status is NodeStatus.RUNNING for i in rdzv.members)
    whole = running == rdzv.usable(scaling.wanted) and not (rdzv.collecting or scaling.leaving)
    starting = [node for node in machine.nodes.values() if node.status is NodeStatus.PENDING]
    waits = next((f"node {node.id}: {node.waits}" for node in starting if node.waits), "")
    return JobSize(
        asked=scaling.asked,
        wanted=scaling.workers,
        complete=whole and running > 0 and machine.outcome is None,
        waits_for=waits
        or waiting_for(machine, now)
        or ("nodes are being started" * bool(starting)),
        plans=scaling.plans,
        reason=scaling.reason,
    )


def told(before: int, after: int, role: str = "") -> messages.ScaleReply:
    """What follows from a change of the number of nodes."""
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
        rest = f"{leave}, and the others go on in a new round."
    return messages.ScaleReply(f"The job is to have {count} instead of {before}: {rest}")
