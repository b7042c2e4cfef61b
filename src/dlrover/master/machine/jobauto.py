"""A job that finds its number of nodes by itself, and replaces slow ones."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.jobscale import JobScale
from dlrover.master.machine.state import Node
from dlrover.spec import events
from dlrover.spec.node import NodeStatus
from dlrover.spec.roles import SERVER
from dlrover.spec.speed import ScaleDecision, ScaleKind


class JobAuto(JobScale):
    """What a job does about its speed."""

    def _rank_speed(self, event: inputs.RankSpeed, now: float) -> None:
        if event.round != self.rendezvous.round:
            return
        self._emit(event.found)
        if isinstance(event.found, events.SlowRank):
            self._replace_slow(event.found, now)

    def _replace_slow(self, found: events.SlowRank, now: float) -> None:
        """Go on with another node in place of a slow one, if the auto-scaler finds that worth it."""
        node = self.nodes[found.node]
        if not (node.launched and node.status is NodeStatus.RUNNING and self.is_quiet()):
            return
        made = self.autoscaling.slow(found, now)
        if made is None:
            return
        self._emit(made)
        self._exclude(node, f"rank {found.rank} is slow there", now)
        self._exchange(node, "which is slow", now)

    def _memory_forecast(self, event: inputs.MemoryForecast, now: float) -> None:
        """Order more memory before a node runs out of it, where the platform can and the job lets it."""
        node = self.nodes[event.node_id]
        if event.round != self.rendezvous.round or node.status is not NodeStatus.RUNNING:
            return
        free = self.job.auto_scale and self.job.grows_memory and self.autoscaling.change is None
        ordered = free and node.launched and self.is_quiet()
        self._emit(events.MemoryGrows(node.id, event.needed, event.limit, event.seconds, ordered))
        if ordered:
            node.memory_factor *= event.needed / event.limit
            self._exchange(node, "which needs more memory", now)

    def _servers_busy(self, event: inputs.ServersBusy, now: float) -> None:
        """Do something about hot or uneven servers, if nothing else is being changed."""
        scaling = self.autoscaling
        if event.round != self.rendezvous.round or not self.is_quiet():
            return
        if event.more:
            self._rescale(*scaling.more_servers(event.gain, event.reason, now), now)
            return
        kind = ScaleKind.REBALANCE if event.rebalance else ScaleKind.MIGRATE
        made = scaling.same_size(kind, event.gain, event.reason, now)
        if made is None:
            return
        self._emit(made)
        if event.rebalance:
            self._open_round("the program is to divide its parameters anew", now)
        for node_id, factor in event.migrate.items():
            self._migrate_asked(inputs.MigrateAsked(node_id, factor, 1.0, event.reason), now)

    def _exchange(self, node: Node, why: str, now: float) -> None:
        """Call off a node of the world, and launch another one with its rank."""
        self._call_off(node, now)
        self._launch(node.node_rank, now, replaces=node)
        self._open_round(f"node {node.id} is replaced, {why}", now)

    def _speed_measured(self, event: inputs.SpeedMeasured, now: float) -> None:
        if event.round == self.rendezvous.round and not self.rendezvous.collecting:
            self._rescale(
                *self.autoscaling.measured(event.round, event.sample, event.profile, now), now
            )

    def _scale_planned(self, event: inputs.ScalePlanned, now: float) -> None:
        if self.may_scale(now) and event.round == self.rendezvous.round:
            self._rescale(self.autoscaling.planned(event.decision, now), event.decision, now)

    def _rescale(
        self, told: list[events.EventBody], decision: ScaleDecision | None, now: float
    ) -> None:
        """Tell of the auto-scaler's decision, and do as it says."""
        for body in told:
            self._emit(body)
        if decision is None:
            return
        number = f"plan {self.autoscaling.made}"
        self._scale_asked(inputs.ScaleAsked(decision.nodes, number, "plan"), now)
        if decision.servers:
            self._scale_asked(inputs.ScaleAsked(decision.servers, number, "plan", SERVER), now)
