"""The state of a job, what can be asked of it, and the elementary changes that every decision is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dlrover.master.diagnosis import Table
from dlrover.master.machine import inputs, reports
from dlrover.master.machine.adoption import Adoption
from dlrover.master.machine.autoscale import AutoScaling
from dlrover.master.machine.checking import Checks
from dlrover.master.machine.faults import Faults
from dlrover.master.machine.rendezvous import Rendezvous
from dlrover.master.machine.restarts import RestartPolicy
from dlrover.master.machine.scaling import Scaling
from dlrover.master.machine.state import Incident, Migration, Node, Phase, phase_after
from dlrover.spec import events
from dlrover.spec.failure import Failure
from dlrover.spec.job import JobSpec
from dlrover.spec.node import TRANSITIONS, NodeStatus
from dlrover.spec.outcome import Outcome
from dlrover.spec.roles import Size, role_of
from dlrover.spec.world import World


@dataclass
class JobState:
    """All state of one job. `JobMachine.handle` is the only way to change it."""

    job: JobSpec = field(default_factory=lambda: JobSpec(name=""))
    job_dir: str = ""
    #: what failures look like, and what they mean
    table: Table = field(default_factory=Table)
    nodes: dict[int, Node] = field(default_factory=dict)
    #: agent process -> node; every node whose agent ever connected
    by_uid: dict[str, int] = field(default_factory=dict)
    rendezvous: Rendezvous = field(init=False)
    restarts: RestartPolicy = field(init=False)
    adoption: Adoption = field(default_factory=Adoption)
    #: the id of the next new node: above all that ever were
    next_id: int = 0
    faults: Faults = field(init=False)
    #: a node, and the round that its workers begin from processes that have loaded nothing
    fresh: tuple[int, int] | None = None
    checks: Checks = field(init=False)
    autoscaling: AutoScaling = field(init=False)
    scaling: Scaling = field(init=False)
    #: set once, when the job ends
    outcome: Outcome | None = None
    incident: Incident | None = None
    #: what each member of the last completed round was told
    worlds: dict[int, World] = field(default_factory=dict)
    submitted_at: float = 0.0
    #: when the world of the last completed round was formed
    world_since: float = 0.0
    #: steps of the last completed round
    steps: int = 0
    #: steps of all rounds before it
    earlier_steps: int = 0
    #: the number of the step that it began with, -1 while that is not known
    first_step: int = -1
    #: the number of the last step of the round before, or of the one that it began with; -1 if that is not known
    reached: int = -1
    #: when a connectionless node counts as lost; only for nodes that are not connected nor final
    lost_at: dict[int, float] = field(default_factory=dict)
    #: when the running world is interrupted to take in newcomers
    grow_at: float | None = None
    #: nodes that are to take another one's place, by id
    migrations: dict[int, Migration] = field(default_factory=dict)
    #: until when those that have joined wait for the others: together they cost one round
    places_at: float | None = None
    #: by wanted rank: how often in a row a launched node ended before it was part of a world
    failed_starts: dict[int, int] = field(default_factory=dict)
    _out: list[inputs.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compose()

    def _compose(self) -> None:
        """Make the smaller machines, for the job as it is known now."""
        self.rendezvous = Rendezvous(self.job)
        self.restarts = RestartPolicy(self.job)
        self.faults = Faults(self.job)
        self.checks = Checks(self.job)
        self.autoscaling = AutoScaling(self.job)
        self.scaling = Scaling(self.job)

    # ---- queries

    @property
    def phase(self) -> Phase:
        """Where the job stands."""
        if self.outcome is not None:
            return phase_after(self.outcome.exit_code)
        if self.adoption.pending:
            return Phase.WAITING
        if not self.rendezvous.collecting:
            return Phase.RUNNING
        return Phase.RESTARTING if self.rendezvous.members else Phase.WAITING

    @property
    def world_size(self) -> int:
        """Processes of the last completed round, servers included; 0 before the first."""
        return next(iter(self.worlds.values())).world_size if self.worlds else 0

    @property
    def workers(self) -> int:
        """The same without servers."""
        return next(iter(self.worlds.values())).workers if self.worlds else 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps done since the job began, repeated ones included."""
        return self.earlier_steps + self.steps

    def admitted(self, failure: Failure) -> Failure | None:
        """A reported failure as it is to be journalled; None if the report changes nothing."""
        rdzv, incident = self.rendezvous, self.incident
        if self.outcome is not None:
            return None
        if self.adoption.pending:
            return self.adoption.admitted(failure)
        if failure.round == rdzv.round and not rdzv.collecting:
            return failure.bounded()  # it opens an incident
        if incident is None or incident.round != failure.round or failure.id in incident.seen:
            return None
        return reports.admitted(incident, failure, self.table)

    def deadline(self) -> float | None:
        """When `DeadlinePassed` is due, unless another input changes that; None for never."""
        if self.outcome is not None:
            return None
        checked = self.checks.deadline()  # a round does not go on while its nodes are checked
        times = [checked or self.rendezvous.deadline(), self.grow_at, *self.lost_at.values()]
        times.append(self.autoscaling.deadline())
        times += self.scaling.leaving.values()
        times += (migration.until for _, migration in self._coming())
        times.append(self.places_at)
        if self.adoption.pending:
            times.append(self.adoption.deadline)
        return min((t for t in times if t is not None), default=None)

    def may_scale(self, now: float) -> bool:
        """Whether the auto-scaler may change the number of nodes."""
        whole = self.rendezvous.size == self.scaling.size and not self.migrations
        return whole and self.is_quiet() and self.autoscaling.due(now)

    def is_quiet(self) -> bool:
        """Whether a world trains, and nothing is the matter with it."""
        rdzv = self.rendezvous
        away = rdzv.collecting or self.adoption.pending or not rdzv.members
        return self.incident is None and self.outcome is None and not away

    def _coming(self) -> list[tuple[int, Migration]]:
        """The nodes that are to take another one's place, and have not joined."""
        joined = self.rendezvous.offers
        return [(i, migration) for i, migration in self.migrations.items() if i not in joined]

    def _has_ended(self) -> bool:
        return self.outcome is not None

    def training(self) -> list[int]:
        """The nodes of the running world whose workers train."""
        rdzv, running = self.rendezvous, NodeStatus.RUNNING
        return [
            i for i in rdzv.members if i not in rdzv.servers and self.nodes[i].status is running
        ]

    def is_server(self, node_id: int) -> bool:
        """Whether a node is a parameter server."""
        return node_id in self.rendezvous.servers

    def told_role(self, node_id: int) -> str:
        """A node's role as users are told it; empty in a job without servers."""
        return role_of(self.nodes[node_id].node_rank) if self.job.servers else ""

    def _enough_nodes(self) -> bool:
        living = {
            node.id
            for node in self.nodes.values()
            if not (node.status.final or node.id in self.scaling.leaving)
        }
        return self.rendezvous.can_form(living)

    def _can_spare(self, node: Node) -> bool:
        """Whether the other nodes are enough for a world."""
        others = {
            n.id
            for n in self.nodes.values()
            if n is not node and not (n.status.final or n.gone or n.id in self.scaling.leaving)
        }
        return self.rendezvous.can_form(others)

    def _can_grow(self) -> bool:
        """Whether a new round would form a larger world than the running one."""
        rdzv = self.rendezvous
        if self.adoption.pending or self._is_about_to_end():
            return False
        running, joined = rdzv.size, rdzv.joined
        larger = Size(running.workers + joined.workers, running.servers + joined.servers)
        return rdzv.usable(larger).nodes > running.nodes

    def _workers_succeeded(self) -> Iterator[bool]:
        """Whether each worker's node of the world has finished; servers do not end by themselves."""
        for node_id in self.rendezvous.members:
            if not self.is_server(node_id):
                yield self.nodes[node_id].status is NodeStatus.SUCCEEDED

    def _is_about_to_end(self) -> bool:
        """Whether some workers of the running world have finished."""
        return not self.rendezvous.collecting and any(self._workers_succeeded())

    def _all_succeeded(self) -> bool:
        return all(self._workers_succeeded())

    # ---- elementary changes

    def _assign(self, node_id: int) -> None:
        world = self.worlds[node_id]
        self._send(inputs.AssignWorld(node_id, world, self.fresh == (node_id, world.round)))

    def _end(self, exit_code: int, reason: str, now: float, root: Failure | None = None) -> None:
        """End the job and dismiss every node; one that may come back is dismissed when it does."""
        failures = self.incident.failures if self.incident is not None else []
        self.outcome = Outcome(
            exit_code=int(exit_code),
            reason=reason,
            failure=root,
            verdict=self.table.diagnose(root) if root is not None else None,
            others=self.table.other_failures(failures, root),
            restarts=self.restarts.count,
            steps=self.total_steps,
            seconds=now - self.submitted_at,
            job_dir=self.job_dir,
        )
        self._emit(events.JobEnded(int(exit_code), reason))
        for node in self.nodes.values():
            if node.status.final:
                continue
            if node.connected:
                self._send(inputs.Dismiss(node.id, self.outcome))
            elif node.handle and node.id not in self.lost_at:
                self._send(inputs.KillNode(node.id))
        self._send(inputs.EndJob(self.outcome))

    def _call(self, node: Node, reason: str) -> None:
        if node.connected:
            self._send(inputs.CallToRound(node.id, self.rendezvous.next_round, reason))

    def _move(self, node: Node, status: NodeStatus) -> None:
        assert status in TRANSITIONS[node.status], f"{node.id}: {node.status} -> {status}"
        node.status = status

    def _emit_round_opened(self, reason: str) -> None:
        rdzv = self.rendezvous
        awaited = len(rdzv.missing) + len(rdzv.offers)
        self._emit(events.RoundOpened(rdzv.round, reason, awaited))

    def _emit(self, body: events.EventBody) -> None:
        self._send(inputs.Emit(body))

    def _send(self, command: inputs.Command) -> None:
        self._out.append(command)
