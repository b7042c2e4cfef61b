"""A job whose number of nodes changes while it runs."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.jobnodes import JobNodes
from dlrover.master.machine.scaling.scaling import Wanted
from dlrover.spec import events
from dlrover.spec.node import NodeStatus
from dlrover.spec.roles import WORKER


class JobScale(JobNodes):
    """A job that gets more or fewer nodes on request."""

    def _scale_asked(self, event: inputs.ScaleAsked, _now: float) -> None:
        scaling = self.scaling
        before, after = scaling.take(event)
        self.rendezvous.least, self.rendezvous.most = scaling.least, scaling.most
        if event.source == "user" and event.role in scaling.roles:
            self._overrule(event.role, scaling.roles[event.role])
        if after != before:
            role = scaling.role_name(event.role)
            self._emit(events.JobScaled(before, after, event.source, event.reason, role))

    def _overrule(self, role: str, wanted: Wanted) -> None:
        """Keep the auto-scaler from changing what a user has set."""
        if not wanted.by_user:
            return  # the request was refused
        what = "nodes" if role == WORKER else "servers"
        reason = f"a user asked for {wanted.nodes} {what}"
        for body in self.autoscaling.overruled(reason, role, wanted.nodes):
            self._emit(body)

    def _scale(self, now: float) -> None:
        """Launch missing nodes; call off surplus ones, with a new round if they train.

        If some workers have succeeded, the world is about to end and is left alone.
        """
        rdzv, scaling = self.rendezvous, self.scaling
        surplus = self._surplus()
        if self._is_about_to_end():
            return
        scaling.due = False
        busy = (NodeStatus.RUNNING, NodeStatus.SUCCEEDED)
        if any(node.status in busy for node in surplus) and not rdzv.collecting:
            size = scaling.size
            count = size.sentence_part() if size.servers else _count(size.workers)
            self._open_round(f"the job is to have {count}", now)
        else:
            for node in surplus:
                self._call_off(node, now)
        there = {
            node.node_rank
            for node in self.nodes.values()
            if node.launched and not node.status.final and node.id not in scaling.leaving
        }
        for node_rank in scaling.ranks:
            if node_rank not in there and not self._has_ended():
                self._launch(node_rank, now, factors=scaling.factors(node_rank))


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
