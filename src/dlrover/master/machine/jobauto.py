"""A job that adapts to measurements: auto-scaling, and replacement of slow or overloaded nodes."""

from __future__ import annotations

import msgspec

from dlrover.master.machine import inputs
from dlrover.master.machine.jobmigrate import JobMigrate
from dlrover.spec import events
from dlrover.spec.node import NodeStatus
from dlrover.spec.roles import SERVER
from dlrover.spec.speed import ScaleDecision, ScaleKind


class JobAuto(JobMigrate):
    """A job that responds to its measured speed and load."""

    def _rank_speed(self, event: inputs.RankSpeed, now: float) -> None:
        if event.round != self.rendezvous.round:
            return
        self._emit(event.found)
        if isinstance(event.found, events.SlowRank):
            self._replace_slow(event.found, now)

    def _replace_slow(self, found: events.SlowRank, now: float) -> None:
        """Replace a slow node if the auto-scaler finds that worth it."""
        node = self.nodes[found.node]
        asked = inputs.MigrateAsked(node.id, node.cpu_factor, node.memory_factor, "it is slow")
        if self.migration_refusal(asked):
            return
        made = self.autoscaling.slow(found, now)
        if made is None:
            return
        self._emit(made)
        self._exclude(node, f"rank {found.rank} is slow there", now)
        self._migrate_asked(asked, now)

    def _memory_forecast(self, event: inputs.MemoryForecast, now: float) -> None:
        """Replace a node by one with more memory before it runs out, if the platform can provide it."""
        node = self.nodes[event.node_id]
        if event.round != self.rendezvous.round or node.status is not NodeStatus.RUNNING:
            return
        more = (event.memory or event.needed) / event.limit
        factor = self._bounded(node.memory_factor * more)
        given = round(event.limit * factor / node.memory_factor)
        told = events.MemoryGrows(
            node.id, event.needed, event.limit, event.seconds, ordered=True, given=given
        )
        asked = inputs.MigrateAsked(node.id, node.cpu_factor, factor, f"it is {told.need()}")
        replaces = self.job.grows_memory and self.job.limits.memory_action == "replace"
        ordered = replaces and self._may_grow(node) and not self.migration_refusal(asked)
        if not ordered:
            told = msgspec.structs.replace(told, ordered=False, given=0)
        self._emit(told)
        if ordered:
            self._migrate_asked(asked, now)
        elif replaces and not self._may_grow(node):
            self._emit(events.MemoryBound(node.id, node.memory_factor))

    def _servers_busy(self, event: inputs.ServersBusy, now: float) -> None:
        """Relieve hot or uneven servers, if no other change is under way."""
        scaling = self.autoscaling
        moves = [self._with_cores(node_id, factor) for node_id, factor in event.migrate.items()]
        refused = any(self.migration_refusal(move) for move in moves)
        if event.round != self.rendezvous.round or refused or not self.is_quiet():
            return
        if event.more:
            self._rescale(*scaling.more_servers(event.gain, event.reason, now), now)
            return
        kind = ScaleKind.REBALANCE if event.rebalance else ScaleKind.MIGRATE
        made = scaling.same_size(kind, event.gain, event.reason, now)
        if made is None:
            return
        self._emit(made)
        for move in moves:
            self._migrate_asked(move, now)
        if event.rebalance:
            self._open_round("the program is to divide its parameters anew", now)

    def _with_cores(self, node_id: int, factor: float) -> inputs.MigrateAsked:
        """Return the request to replace a server by a node with ``factor`` times its cores."""
        node = self.nodes[node_id]
        cores = node.cpu_factor * factor
        return inputs.MigrateAsked(node_id, cores, node.memory_factor, "it is a hot server")

    def _speed_measured(self, event: inputs.SpeedMeasured, now: float) -> None:
        if event.round == self.rendezvous.round and not self.rendezvous.collecting:
            found = self.autoscaling.measured(
                event.round, event.sample, event.profile, now, held_up=event.held_up
            )
            self._rescale(*found, now)

    def _scale_planned(self, event: inputs.ScalePlanned, now: float) -> None:
        decision = event.decision
        if not self.may_scale(now) or event.round != self.rendezvous.round:
            return
        self._rescale(self.autoscaling.planned(decision, now), decision, now)
        if decision is not None and decision.kind is ScaleKind.BATCH:
            self._open_round(f"the job is to have batches of {decision.batch} samples", now)

    def _rescale(
        self, told: list[events.EventBody], decision: ScaleDecision | None, now: float
    ) -> None:
        """Emit the auto-scaler's events and carry out its decision."""
        for body in told:
            self._emit(body)
        if decision is None:
            return
        number = f"plan {self.autoscaling.made}"
        self._scale_asked(inputs.ScaleAsked(decision.nodes, number, "plan"), now)
        if decision.servers:
            self._scale_asked(inputs.ScaleAsked(decision.servers, number, "plan", SERVER), now)
