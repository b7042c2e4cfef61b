"""Nodes of a job: how they are identified, launched, replaced, excluded and called to a round."""

from __future__ import annotations

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.jobleaving import JobLeaving
from dlrover.master.machine.rendezvous import UNRANKED
from dlrover.master.machine.state import Node, given_up
from dlrover.spec import events
from dlrover.spec.node import FoundNode, LaunchNode, NodeStatus
from dlrover.spec.roles import is_server

_USAGE = (ExitCode.USAGE, 126, 127)
"""Exit codes by which an agent, or the shell that starts it, reports that its command is wrong."""


class JobNodes(JobLeaving):
    """A job that manages its nodes."""

    def _add_node(self, node_rank: int, node_id: int | None = None) -> Node:
        node = Node(id=self.next_id if node_id is None else node_id, node_rank=node_rank)
        self.next_id = max(self.next_id, node.id + 1)
        self.nodes[node.id] = node
        if self.job.servers and is_server(node_rank):
            self.rendezvous.servers.add(node.id)
        return node

    def _add_found(self, found: FoundNode, now: float) -> None:
        """Take over a node that the platform started for an earlier master."""
        node = self._add_node(found.node_rank, found.node_id)
        node.launched, node.handle = True, found.handle
        node.memory_factor, node.cpu_factor = found.memory_factor, found.cpu_factor
        self.lost_at[node.id] = now + self.job.limits.recovery_grace

    def _node_of(self, event: inputs.NodeConnected) -> Node:
        """Return the node of an agent process, if necessary a new one.

        An unknown process is a new node unless it names a node that awaits its agent. So is one whose node is
        lost, unless the platform had launched that node. While a round may be adopted, a new node keeps the
        id that an earlier master gave it, if that is free.
        """
        known = self.by_uid.get(event.uid)
        if known is None and event.node_id in self.nodes and not self.nodes[event.node_id].uid:
            known = event.node_id
        node = self.nodes.get(known) if known is not None else None
        if node is None or (node.status.final and not node.launched):
            claims = event.held is not None and not self.adoption.over
            free = 0 <= event.node_id < UNRANKED and event.node_id not in self.nodes
            node = self._add_node(event.node_rank, event.node_id if claims and free else None)
        node.uid = event.uid
        self.by_uid[event.uid] = node.id
        return node

    def _launch(
        self,
        node_rank: int,
        now: float,
        replaces: Node | None = None,
        factors: tuple[float, float] | None = None,
    ) -> int:
        """Launch a node and return its id; by default it has the resources of the node that it replaces."""
        node = self._add_node(node_rank)
        node.launched = True
        if replaces is not None:
            node.cpu_factor, node.memory_factor = replaces.cpu_factor, replaces.memory_factor
        if factors is not None:
            node.cpu_factor, node.memory_factor = factors
        replaced = replaces.id if replaces is not None else -1
        role = self.told_role(node.id)
        self._emit(
            events.NodeLaunched(node.id, replaced, node.cpu_factor, node.memory_factor, role)
        )
        self._order(node, now)
        return node.id

    def _order(self, node: Node, now: float) -> None:
        avoid = self.faults.excluded(now)
        self._send(LaunchNode(node.id, node.node_rank, avoid, node.memory_factor, node.cpu_factor))

    def _replace(self, node: Node, now: float) -> None:
        """Launch another node in place of a lost one that the platform had launched."""
        if self._forget_migration(node):
            return
        if not node.launched or not self.scaling.wants(node.node_rank):
            return
        if node.refused:
            if not self._enough_nodes():
                self._end(ExitCode.USAGE, f"node {node.id} cannot be made: {node.reason}.", now)
            return
        if not node.has_run:
            attempts = self.failed_starts.get(node.node_rank, 0) + 1
            self.failed_starts[node.node_rank] = attempts
            if attempts >= self.job.limits.node_start_attempts:
                if node.excluded and self._enough_nodes():
                    return  # every replacement is at fault, too; the others train on
                self._end(
                    ExitCode.USAGE if node.exit_code in _USAGE else ExitCode.INFRASTRUCTURE,
                    f"node {node.id} could not be started in {attempts} attempts: {node.reason}.",
                    now,
                )
                return
        self._launch(node.node_rank, now, replaces=node)

    def _bury(self, node: Node) -> None:
        self._move(node, NodeStatus.LOST)
        self._emit(events.NodeLost(node.id, node.reason, self.told_role(node.id)))
        if node.handle:
            self._send(inputs.KillNode(node.id))

    def _give_up(self, node: Node, reason: str, now: float) -> None:
        """Continue without a node that is still there; replace it if the platform had launched it."""
        self.faults.forget(node.id)
        if node.status.final or node.id in self.scaling.leaving:
            return
        node.reason = reason
        self.lost_at.pop(node.id, None)
        self.rendezvous.drop(node.id)
        if node.connected and not node.launched:
            self._send(inputs.Dismiss(node.id, given_up(node)))
        node.connected = False
        self._bury(node)
        self._replace(node, now)

    def _exclude(self, node: Node, reason: str, now: float) -> None:
        if node.hostname and not self.job.one_host:
            seconds = self.job.limits.exclusion_cooldown
            self.faults.exclude(node.hostname, reason, now)
            self._emit(events.HostExcluded(node.hostname, seconds, reason))

    def _refuse(self, node: Node, now: float) -> bool:
        """Dismiss a newcomer from an excluded host if the job can do without it; return whether it did so."""
        refusal = self.faults.refusal(node.hostname, now)
        newcomer = node.status is NodeStatus.PENDING and not node.launched
        if not refusal or not newcomer or self.outcome is not None or not self._can_spare(node):
            return False
        node.reason = refusal.rstrip(".")
        self._bury(node)
        self._send(inputs.Dismiss(node.id, given_up(node)))
        return True

    def _open_round(self, reason: str, now: float) -> None:
        """Call every living node to a new round."""
        self.grow_at = None
        for node in self._surplus():
            self._call_off(node, now)
        for node in [n for n in self.nodes.values() if n.gone and not n.status.final]:
            self._bury(node)
            self._replace(node, now)
        living = [n for n in self.nodes.values() if not n.status.final]
        awaited = [n.id for n in living if n.status is not NodeStatus.PENDING]
        self.rendezvous.open(awaited, fixed=True, now=now)
        self._emit_round_opened(reason)
        for node in living:
            busy = node.status in (NodeStatus.RUNNING, NodeStatus.SUCCEEDED)
            if busy and node.id not in self.scaling.leaving:
                self._call(node, reason)
