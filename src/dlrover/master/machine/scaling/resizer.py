"""Changes of a running job's nodes: on request, by the auto-scaler, or because of a measurement.

A node that trains is replaced by a *migration*: it trains until the node that will replace it has joined. The
new node has the same rank. It may have more or fewer cores, and more or less memory. Then a new round opens,
and the old node leaves like any surplus node: training stops for one round, not for the start of a node. If
one of the two nodes fails before that, the other keeps the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from dlrover.master.machine import inputs
from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.scaling.scaling import Wanted
from dlrover.master.machine.state import JobState, Migration, Node
from dlrover.spec import events
from dlrover.spec.node import SERVER, WORKER, NodeStatus
from dlrover.spec.plan import ScaleDecision, ScaleKind

ResizeInput: TypeAlias = (
    inputs.RankSpeed
    | inputs.SpeedMeasured
    | inputs.MemoryForecast
    | inputs.ServersBusy
    | inputs.ScalePlanned
    | inputs.MigrationRequested
    | inputs.ScaleRequested
)


@dataclass
class Resizer:
    """Carries out changes of a job's nodes. Change it only through its methods."""

    state: JobState = field(compare=False, repr=False)
    fleet: Fleet = field(compare=False, repr=False)
    rounds: Rounds = field(compare=False, repr=False)
    #: until when joined successors wait for the others, so that they cost one round together
    places_at: float | None = None

    def handle(self, event: ResizeInput, now: float) -> None:
        """Handle a request or a measurement."""
        round_ = self.state.rendezvous.round
        match event:
            case inputs.MigrationRequested():
                self.migrate(event, now)
            case inputs.ScaleRequested():
                self.ask(event)
            case _ if event.round != round_:
                pass  # it is about an earlier world
            case inputs.RankSpeed(found=found):
                self.state.emit(found)
                if isinstance(found, events.SlowRank):
                    self._replace_slow(found, now)
            case inputs.SpeedMeasured():
                self._speed_measured(event, now)
            case inputs.ScalePlanned():
                self._scale_planned(event, now)
            case inputs.MemoryForecast():
                self._memory_forecast(event, now)
            case inputs.ServersBusy():
                self._servers_busy(event, now)

    # ---- the number of nodes

    def may_scale(self, now: float) -> bool:
        """Return whether the auto-scaler may change the number of nodes."""
        state = self.state
        whole = state.rendezvous.size == state.scaling.world and not self.fleet.migrations
        return whole and state.quiet and state.autoscaling.due(now)

    def ask(self, event: inputs.ScaleRequested) -> None:
        """Set the wanted number of nodes of a role."""
        scaling, rdzv = self.state.scaling, self.state.rendezvous
        before, after = scaling.take(event)
        rdzv.least, rdzv.most = scaling.least, scaling.most
        if event.source == "user" and event.role in scaling.roles:
            self._overrule(event.role, scaling.roles[event.role])
        if after != before:
            role = scaling.role_name(event.role)
            self.state.emit(events.JobScaled(before, after, event.source, event.reason, role))

    def _overrule(self, role: str, wanted: Wanted) -> None:
        """Keep the auto-scaler from changing what a user has set."""
        if wanted.by_user:  # else the request was refused
            what = "nodes" if role == WORKER else "servers"
            reason = f"a user requested {wanted.nodes} {what}"
            self.state.emit(*self.state.autoscaling.overruled(reason, role, wanted.nodes))

    def apply(self, bodies: list[events.EventBody], decision: ScaleDecision | None) -> None:
        """Emit the auto-scaler's events and carry out its decision."""
        self.state.emit(*bodies)
        if decision is None:
            return
        number = f"plan {self.state.autoscaling.made}"
        self.ask(inputs.ScaleRequested(decision.nodes, number, "plan"))
        if decision.servers:
            self.ask(inputs.ScaleRequested(decision.servers, number, "plan", SERVER))

    def scale(self, now: float) -> None:
        """Launch missing nodes; drain surplus ones, with a new round if they train.

        If some workers have succeeded, the world is about to end and is left alone.
        """
        state, scaling, fleet = self.state, self.state.scaling, self.fleet
        if self.rounds.is_about_to_end:
            return
        surplus = fleet.surplus()
        scaling.due = False
        busy = (NodeStatus.RUNNING, NodeStatus.SUCCEEDED)
        training = [node for node in surplus if node.status in busy and not state.is_instance(node)]
        if training and not state.rendezvous.collecting:
            self.rounds.open(f"the job will have {scaling.size.in_words()}", now)
        else:
            self._drain(surplus, now)
        there = {node.node_rank for node in fleet.staying()}
        for node_rank in scaling.ranks:
            if node_rank not in there and not state.has_ended():
                fleet.launch(node_rank, now, factors=scaling.factors(node_rank))

    def _drain(self, nodes: list[Node], now: float) -> None:
        """Let nodes leave that do not train, or while a round collects: the others store their parts with them."""
        for node in nodes:
            self.fleet.drain(node, now)
        if nodes and self.state.rendezvous.collecting:
            self.rounds.call_all("other nodes leave")

    # ---- migrations

    def migration_refusal(self, request: inputs.MigrationRequested) -> str:
        """Return why a node cannot be replaced now, as one sentence; empty if it can."""
        node = self.state.nodes.get(request.node_id)
        if node is None or not node.launched:
            return f"Node {request.node_id} is none that DLRover has started: only those can be replaced."
        if node.status is not NodeStatus.RUNNING or self.state.leaves(node.id):
            return (
                f"Node {node.id} does not train: only nodes of the running world can be replaced."
            )
        if any(migration.node == node.id for migration in self.fleet.migrations.values()):
            return f"Node {node.id} is being replaced already."
        if not self.state.quiet:
            return "The job does not train: its nodes are not replaced meanwhile."
        if min(request.cpu_factor, request.memory_factor) > 0:
            return ""
        return (
            f"Node {node.id}: {request.cpu_factor:g} times the cores and {request.memory_factor:g} times the "
            "memory were requested; both must be more than 0."
        )

    def migrate(self, event: inputs.MigrationRequested, now: float) -> None:
        """Launch a successor of a node, unless that is refused."""
        if self.migration_refusal(event):
            return
        state, fleet = self.state, self.fleet
        node = state.nodes[event.node_id]
        factors = (event.cpu_factor, self.bounded(event.memory_factor))
        successor = fleet.launch(node.node_rank, now, replaces=node, factors=factors)
        until = now + state.job.limits.join_timeout
        fleet.migrations[successor] = Migration(node.id, until)
        state.emit(events.NodeMigrates(node.id, successor, event.reason))

    def bounded(self, memory_factor: float) -> float:
        """Return the factor, limited to the memory that the platform can give."""
        most = self.state.job.most_memory_factor
        return min(memory_factor, most) if most else memory_factor

    def may_grow(self, node: Node) -> bool:
        """Return whether the platform can give a node more memory than it has."""
        most = self.state.job.most_memory_factor
        return not most or node.memory_factor < most

    def take_places(self, now: float) -> None:
        """Let the successors that have joined take over."""
        state, rdzv, fleet = self.state, self.state.rendezvous, self.fleet
        due = [
            (successor, migration.node)
            for successor, migration in fleet.migrations.items()
            if successor in rdzv.offers and migration.node not in state.scaling.leaving
        ]
        if not due or state.adoption.pending:
            return
        if rdzv.collecting:
            self._drain([state.nodes[leaves] for _, leaves in due], now)
            return
        together = rdzv.last_join_at + state.job.limits.scale_up_delay
        if fleet.coming() and now < together:
            self.places_at = together
            return
        members = [state.nodes[i] for i in rdzv.members]
        if not any(node.status is NodeStatus.SUCCEEDED for node in members):
            changes = (f"node {new} takes the place of node {old}" for new, old in due)
            self.rounds.open(", ".join(changes), now)

    def give_up_migrations(self, now: float) -> None:
        """Give up successors that did not join in time; end the wait of joined ones for the others."""
        if self.places_at is not None and self.places_at <= now:
            self.places_at = None
        fleet, limit = self.fleet, self.state.job.limits.join_timeout
        for successor in [i for i, m in fleet.coming() if m.until <= now]:
            node = self.state.nodes[successor]
            why = f"it did not come within {limit:g} s (join_timeout)"
            why = f"{why}: {node.waits}" if node.waits else why
            leaves = fleet.migrations.pop(successor).node
            self.state.emit(events.MigrationEnded(leaves, successor, why))
            fleet.drain(node, now)

    # ---- measurements

    def _speed_measured(self, event: inputs.SpeedMeasured, now: float) -> None:
        if not self.state.rendezvous.collecting:
            measured = self.state.autoscaling.measured(
                event.round, event.sample, event.profile, now, held_up=event.held_up
            )
            self.apply(*measured)

    def _scale_planned(self, event: inputs.ScalePlanned, now: float) -> None:
        decision = event.decision
        if not self.may_scale(now):
            return
        self.apply(self.state.autoscaling.planned(decision, now), decision)
        if decision is not None and decision.kind is ScaleKind.BATCH:
            self.rounds.open(f"the job will have batches of {decision.batch} samples", now)

    def _replace_slow(self, found: events.SlowRank, now: float) -> None:
        """Replace a slow node if the auto-scaler finds that worth it."""
        node = self.state.nodes[found.node]
        request = inputs.MigrationRequested(
            node.id, node.cpu_factor, node.memory_factor, "it is slow"
        )
        if self.migration_refusal(request):
            return
        made = self.state.autoscaling.slow(found, now)
        if made is None:
            return
        self.state.emit(made)
        self.fleet.exclude(node, f"rank {found.rank} is slow there", now)
        self.migrate(request, now)

    def _memory_forecast(self, event: inputs.MemoryForecast, now: float) -> None:
        """Replace a node by one with more memory before it runs out, if the platform can provide it."""
        state = self.state
        found = event.found
        node = state.nodes[found.node]
        if node.status is not NodeStatus.RUNNING:
            return
        more = (event.enough or found.needed) / found.limit
        factor = self.bounded(node.memory_factor * more)
        given = round(found.limit * factor / node.memory_factor)
        request = inputs.MigrationRequested(
            node.id, node.cpu_factor, factor, f"it is {found.need()}"
        )
        replaces = state.job.grows_memory and state.job.limits.memory_action == "replace"
        if replaces and self.may_grow(node) and not self.migration_refusal(request):
            state.emit(msgspec.structs.replace(found, ordered=True, given=given))
            self.migrate(request, now)
            return
        state.emit(found)
        if replaces and not self.may_grow(node):
            state.emit(events.MemoryBound(node.id, node.memory_factor))

    def _servers_busy(self, event: inputs.ServersBusy, now: float) -> None:
        """Relieve hot or uneven servers, if no other change is under way."""
        state, scaling = self.state, self.state.autoscaling
        moves = [self._with_cores(node_id, factor) for node_id, factor in event.migrate.items()]
        if any(self.migration_refusal(move) for move in moves) or not state.quiet:
            return
        if event.more:
            self.apply(*scaling.more_servers(event.gain, event.reason, now))
            return
        kind = ScaleKind.REBALANCE if event.rebalance else ScaleKind.MIGRATE
        made = scaling.same_size(kind, event.gain, event.reason, now)
        if made is None:
            return
        state.emit(made)
        for move in moves:
            self.migrate(move, now)
        if event.rebalance:
            self.rounds.open("the program must divide its parameters again", now)

    def _with_cores(self, node_id: int, factor: float) -> inputs.MigrationRequested:
        """Return the request to replace a server by a node with ``factor`` times its cores."""
        node = self.state.nodes[node_id]
        cores = node.cpu_factor * factor
        return inputs.MigrationRequested(node_id, cores, node.memory_factor, "it is a hot server")
