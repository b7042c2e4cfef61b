"""Migrations: a node trains while the node that will replace it starts.

The new node has the same rank. It may have more or fewer cores, and more or less memory. Once it has joined,
a new round opens, and the old node leaves like any surplus node: training stops for one round, not for the
start of a node. If one of the two nodes fails before that, the other keeps the rank.
"""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.jobscale import JobScale
from dlrover.master.machine.state import Migration, Node
from dlrover.spec import events
from dlrover.spec.node import NodeStatus


class JobMigrate(JobScale):
    """A job that can replace a training node."""

    def migration_refusal(self, asked: inputs.MigrateAsked) -> str:
        """Return why a node cannot be replaced now, as one sentence; empty if it can."""
        node = self.nodes.get(asked.node_id)
        if node is None or not node.launched:
            return f"Node {asked.node_id} is none that DLRover has started: only those can be replaced."
        if node.status is not NodeStatus.RUNNING or node.id in self.scaling.leaving:
            return (
                f"Node {node.id} does not train: only nodes of the running world can be replaced."
            )
        if any(migration.node == node.id for migration in self.migrations.values()):
            return f"Node {node.id} is being replaced already."
        if not self.is_quiet():
            return "The job does not train: its nodes are not replaced meanwhile."
        if min(asked.cpu_factor, asked.memory_factor) > 0:
            return ""
        return (
            f"Node {node.id}: {asked.cpu_factor:g} times the cores and {asked.memory_factor:g} times the "
            "memory were asked for; both must be more than 0."
        )

    def _migrate_asked(self, event: inputs.MigrateAsked, now: float) -> None:
        if self.migration_refusal(event):
            return
        node = self.nodes[event.node_id]
        factors = (event.cpu_factor, self._bounded(event.memory_factor))
        successor = self._launch(node.node_rank, now, replaces=node, factors=factors)
        self.migrations[successor] = Migration(node.id, now + self.job.limits.join_timeout)
        self._emit(events.NodeMigrates(node.id, successor, event.reason))

    def _bounded(self, memory_factor: float) -> float:
        """Return the factor, limited to the memory that the platform can give."""
        most = self.job.most_memory_factor
        return min(memory_factor, most) if most else memory_factor

    def _may_grow(self, node: Node) -> bool:
        """Return whether the platform can give a node more memory than it has."""
        most = self.job.most_memory_factor
        return not most or node.memory_factor < most

    def _take_places(self, now: float) -> None:
        """Let the successors that have joined take over."""
        rdzv = self.rendezvous
        due = [
            (successor, migration.node)
            for successor, migration in self.migrations.items()
            if successor in rdzv.offers and migration.node not in self.scaling.leaving
        ]
        if not due or self.adoption.pending:
            return
        if rdzv.collecting:
            for _, leaves in due:
                self._call_off(self.nodes[leaves], now)
            return
        together = rdzv.last_join_at + self.job.limits.scale_up_delay
        if self._coming() and now < together:
            self.places_at = together
            return
        members = [self.nodes[i] for i in rdzv.members]
        if not any(node.status is NodeStatus.SUCCEEDED for node in members):
            told = ", ".join(f"node {new} takes the place of node {old}" for new, old in due)
            self._open_round(told, now)

    def _give_up_migrations(self, now: float) -> None:
        """Give up successors that did not join in time; end the wait of joined ones for the others."""
        if self.places_at is not None and self.places_at <= now:
            self.places_at = None
        limit = self.job.limits.join_timeout
        for successor in [i for i, m in self._coming() if m.until <= now]:
            node = self.nodes[successor]
            why = f"it did not come within {limit:g} s (join_timeout)"
            why = f"{why}: {node.waits}" if node.waits else why
            self._emit(events.MigrationEnded(self.migrations.pop(successor).node, successor, why))
            self._call_off(node, now)
