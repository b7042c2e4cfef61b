"""The job as its platform sees it, and the platform that makes its nodes; requests for other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from dlrover.errors import InfrastructureError
from dlrover.master.machine import inputs
from dlrover.master.machine.goodput.ledger import Ledger
from dlrover.master.machine.job import JobMachine
from dlrover.master.machine.scaling.scaling import Wanted
from dlrover.master.machine.state import Node
from dlrover.master.machine.waiting import waiting_for
from dlrover.master.streams import Heartbeats
from dlrover.master.views.status import status_of
from dlrover.platform.base import PlacedNode, Platform, Progress, RoleSize, scaled_by
from dlrover.rpc import messages
from dlrover.spec.events import NodeWaits
from dlrover.spec.node import SERVER, WORKER, LaunchNode, NodeStatus

REASON_LIMIT = 500
"""Maximum length of the reason for another number of nodes, in characters."""
_UNKNOWN = -1


class PlatformSide:
    """One job, as a `PlatformJob`, with its platform.

    Args:
        machine: the job; read only.
        ledger: the job's goodput.
        heartbeats: how far the training is.
        submit: journals and handles an input that is judged by the latest steps.
        report: journals and handles an input that no peer will resend.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        machine: JobMachine,
        ledger: Ledger,
        heartbeats: Heartbeats,
        submit: Callable[[inputs.Input], None],
        report: Callable[[inputs.Input], None],
        clock: Callable[[], float],
    ) -> None:
        self._machine = machine
        self._ledger = ledger
        self._heartbeats = heartbeats
        self._submit = submit
        self._report = report
        self._clock = clock
        self._platform: Platform | None = None

    # ---- the platform

    def use(self, platform: Platform | None) -> None:
        """Launch nodes on a platform; take over nodes that an earlier master process launched."""
        self._platform = platform
        for node in self._machine.nodes.values():
            if platform is not None and node.handle and not node.status.final:
                platform.adopt(node.id, node.handle)

    def launch(self, command: LaunchNode) -> None:
        """Ask the platform for a node."""
        loop = asyncio.get_running_loop()
        if self._platform is None:
            return
        try:
            handle = self._platform.launch(command)
        except InfrastructureError as error:
            loop.call_soon(self.on_node_exit, command.node_id, str(error))
        else:
            loop.call_soon(self._report, inputs.NodePlaced(command.node_id, handle))

    def kill(self, nodes: Iterable[Node]) -> None:
        """Kill those of some nodes that the platform made."""
        for node in nodes:
            if self._platform is not None and node.handle:
                self._platform.kill(node.handle)

    def on_node_exit(
        self,
        node_id: int,
        reason: str,
        /,
        *,
        exit_code: int = 0,
        refused: bool = False,
        removed: bool = False,
    ) -> None:
        """Process the platform's report of a node's end."""
        self._report(inputs.NodeExited(node_id, reason, exit_code, refused, removed))

    def on_node_wait(self, node_id: int, reason: str) -> None:
        """Process the platform's report of what keeps a node from starting; empty: nothing any more."""
        self._report(NodeWaits(node_id, reason))

    # ---- the job

    def progress(self) -> Progress:
        """Return how far the training is."""
        now = self._clock()
        status = status_of(self._machine, now, self._heartbeats.steps)
        goodput = self._ledger.goodput(now).goodput_ratio
        left = self._heartbeats.activities.seconds_left()
        return Progress(status.total_steps, status.restarts, goodput, left)

    def size(self, role: str) -> RoleSize:
        """Return how many nodes of a role the job wants, and whether it has them."""
        return size(self._machine, self._clock(), role)

    def placed(self) -> dict[str, PlacedNode]:
        """Return the nodes that the platform was requested to make, by handle."""
        return placed(self._machine)

    # ---- requests

    def scale(self, request: messages.ScaleRequest) -> messages.ScaleReply:
        """Change the number of nodes, as a user asks for."""
        command = scaled_by(self._platform)
        if command:
            return messages.ScaleReply(f"The job's nodes are scaled by: {command}.", refused=True)
        return self.ask_scale(request.nodes, request.reason, "user", request.role)

    def ask_scale(
        self,
        nodes: int,
        reason: str,
        source: Literal["user", "plan"],
        role: str = WORKER,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> messages.ScaleReply:
        """Change the number of nodes of a role if that is possible; return what follows."""
        machine = self._machine
        request = inputs.ScaleRequested(nodes, reason[:REASON_LIMIT], source, role, factors)
        refused = refusal(machine, request)
        if refused:
            return messages.ScaleReply(refused, refused=True)
        wanted = machine.scaling.roles[role]
        before = wanted.nodes
        if changes(machine, request):
            self._submit(request)
        alone = role == SERVER and machine.job.server_failover == "instance"
        return reply(before, wanted.nodes, machine.scaling.role_name(role), alone=alone)

    def drain(self, request: messages.DrainRequest) -> messages.ScaleReply:
        """Put another node in the place of one, as a user asks for."""
        node = self._machine.nodes.get(request.node)
        factors = (node.cpu_factor, node.memory_factor) if node is not None else (1.0, 1.0)
        reason = request.reason[:REASON_LIMIT]
        refused = self._migrate(inputs.MigrationRequested(request.node, *factors, reason))
        sentence = f"Node {request.node} trains on until another one takes its place."
        return messages.ScaleReply(refused or sentence, refused=bool(refused))

    def ask_migrate(self, handle: str, cpu_factor: float, memory_factor: float, reason: str) -> str:
        """Replace a node that trains; return why that is not possible now, else an empty text."""
        factors = (cpu_factor, memory_factor)
        return self._migrate(migration(self._machine, handle, factors, reason[:REASON_LIMIT]))

    def _migrate(self, request: inputs.MigrationRequested) -> str:
        refused = self._machine.resizer.migration_refusal(request)
        if not refused:
            self._submit(request)
        return refused


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
        return messages.ScaleReply(f"The job is set to {count} already; nothing changes.")
    number = abs(after - before)
    if after > before:
        come = "1 is being started" if number == 1 else f"{number} are being started"
        rest = f"{come}, and training goes on until they are there."
    else:
        leave = "the last one leaves" if number == 1 else f"the last {number} leave"
        rest = f"{leave}, and the others go on{'' if alone else ' in a new round'}."
    return messages.ScaleReply(f"The job will have {count} instead of {before}: {rest}")


def placed(machine: JobMachine) -> dict[str, PlacedNode]:
    """Return the nodes of a job that have a handle, by handle."""
    leaving = {migration.node for migration in machine.fleet.migrations.values()}
    leaving |= machine.scaling.leaving.keys() | machine.state.departing.keys()
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


def migration(
    machine: JobMachine, handle: str, factors: tuple[float, float], reason: str
) -> inputs.MigrationRequested:
    """Return the input that asks the machine to replace the node with a handle.

    ``factors`` are the CPU and memory multipliers of the replacement, relative to the job's request.
    """
    ids = (node.id for node in machine.nodes.values() if node.handle == handle)
    return inputs.MigrationRequested(next(ids, _UNKNOWN), *factors, reason)
