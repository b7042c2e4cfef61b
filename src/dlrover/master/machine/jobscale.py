"""A job whose number of nodes changes while it runs."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.jobnodes import JobNodes
from dlrover.spec import events
from dlrover.spec.node import NodeStatus


class JobScale(JobNodes):
    """What a job does when it is to have more or fewer nodes."""

    def _scale_asked(self, event: inputs.ScaleAsked, _now: float) -> None:
        scaling = self.scaling
        before = scaling.take(event)
        self.rendezvous.least, self.rendezvous.most = scaling.least, scaling.most
        if scaling.by_user:
            for body in self.autoscaling.overruled(f"a user asked for {scaling.workers} nodes"):
                self._emit(body)
        if scaling.workers != before:
            role = event.role if self.job.other_nodes else ""
            self._emit(events.JobScaled(before, scaling.workers, event.source, event.reason, role))

    def _scale(self, now: float) -> None:
        """Launch the nodes that are missing; call off those that are too many, by a new round.

        A world of which some nodes have succeeded is about to end: it is left alone.
        """
        rdzv, scaling = self.rendezvous, self.scaling
        surplus = self._surplus()
        members = [] if rdzv.collecting else [self.nodes[i] for i in rdzv.members]
        if any(node.status is NodeStatus.SUCCEEDED for node in members):
            return
        scaling.due = False
        if any(node.status is NodeStatus.RUNNING for node in surplus) and not rdzv.collecting:
            self._open_round(f"the job is to have {_count(scaling.wanted)}", now)
        else:
            for node in surplus:
                self._call_off(node, now)
        there = {
            node.node_rank
            for node in self.nodes.values()
            if node.launched and not node.status.final and node.id not in scaling.leaving
        }
        for node_rank in range(scaling.wanted):
            if node_rank not in there and not self._has_ended():
                self._launch(node_rank, now)


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
