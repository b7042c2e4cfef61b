"""What somebody is answered who asks for another number of nodes."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.rpc import messages


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
