"""State of a job, queries on it, and the elementary changes behind every decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dlrover.master.machine import inputs, reports
from dlrover.master.machine.adoption import Adoption
from dlrover.master.machine.checks.checking import Checks
from dlrover.master.machine.diagnosis.diagnosis import Table
from dlrover.master.machine.faults import Faults
from dlrover.master.machine.rendezvous import Rendezvous
from dlrover.master.machine.restarts import RestartPolicy
from dlrover.master.machine.scaling.autoscale import AutoScaling
from dlrover.master.machine.scaling.scaling import Scaling
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
    #: patterns of failures, and their meaning
    table: Table = field(default_factory=Table)
    nodes: dict[int, Node] = field(default_factory=dict)
    #: node by agent process, for all agents that ever connected
    by_uid: dict[str, int] = field(default_factory=dict)
    rendezvous: Rendezvous = field(init=False)
    restarts: RestartPolicy = field(init=False)
    adoption: Adoption = field(default_factory=Adoption)
    #: id of the next new node, higher than all before it
    next_id: int = 0
    faults: Faults = field(init=False)
    #: a node, and the round in which its workers start from processes that have loaded nothing
    fresh: tuple[int, int] | None = None
    checks: Checks = field(init=False)
    autoscaling: AutoScaling = field(init=False)
    scaling: Scaling = field(init=False)
    #: set once, when the job ends
    outcome: Outcome | None = None
    incident: Incident | None = None
    #: world sent to each member of the last completed round
    worlds: dict[int, World] = field(default_factory=dict)
    submitted_at: float = 0.0
    #: when the world of the last completed round was formed
    world_since: float = 0.0
    #: steps of the last completed round
    steps: int = 0
    #: steps of all rounds before it
    earlier_steps: int = 0
    #: number of the step that the last completed round began with; -1 while unknown
    first_step: int = -1
    #: number of the step that the round before had come to, its first if it completed none; -1 if unknown
    reached: int = -1
    #: when a disconnected node counts as lost; only for nodes that are neither connected nor final
    lost_at: dict[int, float] = field(default_factory=dict)
    #: when the running world is interrupted to include newcomers
    grow_at: float | None = None
    #: migrations by id of the new node
    migrations: dict[int, Migration] = field(default_factory=dict)
    #: until when joined successors wait for the others, so that they cost one round together
    places_at: float | None = None
    #: by wanted rank: consecutive launched nodes that ended before they were part of a world
    failed_starts: dict[int, int] = field(default_factory=dict)
    _out: list[inputs.Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compose()

    def _compose(self) -> None:
        """Create the smaller machines for the job as it is known now."""
        self.rendezvous = Rendezvous(self.job)
        self.restarts = RestartPolicy(self.job)
        self.faults = Faults(self.job)
        self.checks = Checks(self.job)
        self.autoscaling = AutoScaling(self.job)
        self.scaling = Scaling(self.job)

    # ---- queries

    @property
    def phase(self) -> Phase:
        """Current phase of the job."""
        if self.outcome is not None:
            return phase_after(self.outcome.exit_code)
        if self.adoption.pending:
            return Phase.WAITING
        if not self.rendezvous.collecting:
            return Phase.RUNNING
        return Phase.RESTARTING if self.rendezvous.members else Phase.WAITING

    @property
    def world_size(self) -> int:
        """Number of processes of the last completed round, servers included; 0 before the first."""
        return next(iter(self.worlds.values())).world_size if self.worlds else 0

    @property
    def workers(self) -> int:
        """Number of processes of the last completed round without servers; 0 before the first."""
        return next(iter(self.worlds.values())).workers if self.worlds else 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps since the job began, repeated ones included."""
        return self.earlier_steps + self.steps

    def admitted(self, failure: Failure) -> Failure | None:
        """Return a reported failure as it should be journalled; None if the report changes nothing."""
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
        """Return when `DeadlinePassed` is due, unless another input changes that; None for never."""
        if self.outcome is not None:
            return None
        checked = self.checks.deadline()  # a round pauses while its nodes are checked
        times = [checked or self.rendezvous.deadline(), self.grow_at, *self.lost_at.values()]
        times.append(self.autoscaling.deadline())
        times += self.scaling.leaving.values()
        times += (migration.until for _, migration in self._coming())
        times.append(self.places_at)
        if self.adoption.pending:
            times.append(self.adoption.deadline)
        return min((t for t in times if t is not None), default=None)

    def may_scale(self, now: float) -> bool:
        """Return whether the auto-scaler may change the number of nodes."""
        whole = self.rendezvous.size == self.scaling.size and not self.migrations
        return whole and self.is_quiet() and self.autoscaling.due(now)

    def is_quiet(self) -> bool:
        """Return whether a world trains and no incident is open."""
        rdzv = self.rendezvous
        away = rdzv.collecting or self.adoption.pending or not rdzv.members
        return self.incident is None and self.outcome is None and not away

    def _coming(self) -> list[tuple[int, Migration]]:
        """Return the successors that have not joined yet, with their migrations."""
        joined = self.rendezvous.offers
        return [(i, migration) for i, migration in self.migrations.items() if i not in joined]

    def _has_ended(self) -> bool:
        return self.outcome is not None

    def training(self) -> list[int]:
        """Return the nodes of the running world whose workers train."""
        rdzv, running = self.rendezvous, NodeStatus.RUNNING
        return [
            i for i in rdzv.members if i not in rdzv.servers and self.nodes[i].status is running
        ]

    def is_server(self, node_id: int) -> bool:
        """Return whether a node is a parameter server."""
        return node_id in self.rendezvous.servers

    def told_role(self, node_id: int) -> str:
        """Return a node's role as users see it; empty in a job without servers."""
        return role_of(self.nodes[node_id].node_rank) if self.job.servers else ""

    def _enough_nodes(self) -> bool:
        living = {
            node.id
            for node in self.nodes.values()
            if not (node.status.final or node.id in self.scaling.leaving)
        }
        return self.rendezvous.can_form(living)

    def _can_spare(self, node: Node) -> bool:
        """Return whether the other nodes are enough for a world."""
        others = {
            n.id
            for n in self.nodes.values()
            if n is not node and not (n.status.final or n.gone or n.id in self.scaling.leaving)
        }
        return self.rendezvous.can_form(others)

    def _can_grow(self) -> bool:
        """Return whether a new round would form a larger world than the running one."""
        rdzv = self.rendezvous
        if self.adoption.pending or self._is_about_to_end():
            return False
        running, joined = rdzv.size, rdzv.joined
        larger = Size(running.workers + joined.workers, running.servers + joined.servers)
        return rdzv.usable(larger).nodes > running.nodes

    def _workers_succeeded(self) -> Iterator[bool]:
        """Yield for each worker node of the world whether it has finished; servers never end alone."""
        for node_id in self.rendezvous.members:
            if not self.is_server(node_id):
                yield self.nodes[node_id].status is NodeStatus.SUCCEEDED

    def _is_about_to_end(self) -> bool:
        """Return whether some workers of the running world have finished."""
        return not self.rendezvous.collecting and any(self._workers_succeeded())

    def _all_succeeded(self) -> bool:
        return all(self._workers_succeeded())

    # ---- elementary changes

    def _assign(self, node_id: int) -> None:
        world = self.worlds[node_id]
        self._send(inputs.AssignWorld(node_id, world, self.fresh == (node_id, world.round)))

    def _end(self, exit_code: int, reason: str, now: float, root: Failure | None = None) -> None:
        """End the job and dismiss every node; a node that comes back later is dismissed then."""
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
