"""Nodes that leave a continuing job because it needs fewer.

A node that is called off stops its workers and, if the job saves at breakpoint, persists what they have in
memory. It takes part in the end of the running world like all others: the next round waits until it has left,
so that the new workers find the step. The node is not lost: there is no fault, no restart and no replacement.
"""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.jobstate import JobState
from dlrover.master.machine.state import Node, released
from dlrover.spec import events
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Outcome


class JobLeaving(JobState):
    """A job that releases the nodes that it no longer needs."""

    def _surplus(self) -> list[Node]:
        """Return the nodes beyond the wanted number that were not called off yet.

        Of two nodes with the same rank the older one leaves, unless it waits for the other to take its place.
        A master without a journal may find two such nodes, too.
        """
        scaling, leaving = self.scaling, self.scaling.leaving
        kept = {migration.node for _, migration in self._coming()}
        staying = [
            node
            for node in self.nodes.values()
            if node.launched and not node.status.final and node.id not in leaving
        ]
        latest = {node.node_rank: node for node in sorted(staying, key=lambda node: node.id)}
        return [
            node
            for node in staying
            if not scaling.wants(node.node_rank)
            or (latest[node.node_rank] is not node and node.id not in kept)
        ]

    def _call_off(self, node: Node, now: float) -> None:
        """Ask a node to leave; release it at once if its agent never came or has ended."""
        if node.status is NodeStatus.PENDING or node.gone:
            self._release(node, "it had not started" if not node.gone else "its workers had ended")
            return
        limits = self.job.limits
        until = now + self.job.shutdown_timeout + limits.release_grace
        self.scaling.leaving[node.id] = until
        self.rendezvous.let_go(node.id)
        if node.connected:
            self._send(inputs.Dismiss(node.id, self._released(node)))
        else:
            self.lost_at[node.id] = until
        self._out += self.checks.lose(node.id, now)

    def _released(self, node: Node) -> Outcome:
        """Return the outcome for a node that was called off."""
        replaced = any(migration.node == node.id for migration in self.migrations.values())
        return released(node, replaced=replaced)

    def _release(self, node: Node, how: str) -> None:
        """Complete the release of a node that the job does not need."""
        self.scaling.leaving.pop(node.id, None)
        self.lost_at.pop(node.id, None)
        self.rendezvous.drop(node.id)
        self.failed_starts.pop(node.node_rank, None)
        self.faults.forget(node.id)
        node.connected = False
        node.reason = how
        self._forget_migration(node)
        self._move(node, NodeStatus.RELEASED)
        self._emit(events.NodeReleased(node.id, how, self.told_role(node.id)))
        if node.handle:
            self._send(inputs.KillNode(node.id))

    def _forget_migration(self, node: Node) -> bool:
        """Drop the lost node's migration; return True if its counterpart keeps the rank."""
        migration = self.migrations.pop(node.id, None)
        if migration is not None:
            other = self.nodes[migration.node]
            stays = not (other.status.final or other.id in self.scaling.leaving)
            if stays:
                self._emit(events.MigrationEnded(other.id, node.id, node.reason))
            return stays
        for successor in [i for i, m in self.migrations.items() if m.node == node.id]:
            del self.migrations[successor]
            return True
        return False
