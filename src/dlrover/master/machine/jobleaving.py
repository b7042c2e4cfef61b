"""Nodes that leave a job that goes on: it is to have fewer.

A node that is called off stops its workers and stores what they have in memory, if the job saves at
breakpoint. It takes part in the end of the running world as all others do: the next round waits for its
leaving, so that the workers of that round find the step. It is not lost: no fault, no restart, no
replacement.
"""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.jobstate import JobState
from dlrover.master.machine.state import Node, released
from dlrover.spec import events
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Outcome


class JobLeaving(JobState):
    """What a job does with nodes that it no longer needs."""

    def _surplus(self) -> list[Node]:
        """The nodes beyond the wanted number that were not called off yet.

        Of two with the same rank the older one leaves, unless it waits for the other to take its place. A
        master without a journal may find two, too.
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
        """Ask a node to leave; one whose agent never came, or has ended, is released at once."""
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
        """What a node is told that was called off."""
        replaced = any(migration.node == node.id for migration in self.migrations.values())
        return released(node, replaced=replaced)

    def _release(self, node: Node, how: str) -> None:
        """A node has left that the job does not need."""
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
        """A node is gone. Whether the other one has its rank: the one for its place, or whose place it was for."""
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
