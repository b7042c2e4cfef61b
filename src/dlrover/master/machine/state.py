"""State of a job: its nodes, its phase, its steps, and the machines that its parts share."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.adoption import Adoption
from dlrover.master.machine.checks.checking import Checks
from dlrover.master.machine.deadlines import Deadlines
from dlrover.master.machine.diagnosis.diagnosis import RuleTable, other_failures
from dlrover.master.machine.membership import Membership
from dlrover.master.machine.recovery.faults import Faults
from dlrover.master.machine.recovery.incident import Incident
from dlrover.master.machine.recovery.restarts import RestartPolicy
from dlrover.master.machine.rendezvous import Rendezvous
from dlrover.master.machine.scaling.autoscale import AutoScaling
from dlrover.master.machine.scaling.scaling import Scaling
from dlrover.master.machine.spares import Spares
from dlrover.rpc.messages import Dismiss
from dlrover.spec import events
from dlrover.spec.failure import Failure, FailureKind, Verdict
from dlrover.spec.job import JobSpec
from dlrover.spec.node import TRANSITIONS, NodeStatus, is_spare
from dlrover.spec.outcome import Outcome


@dataclass
class Reconnections:
    """Connections that break and come back, which show that nodes without one may be on their way back.

    Where the network or the master itself was away, thousands of nodes return one after the other. Who has not come
    yet is given up only once nothing has happened for a while; a connection that never comes to rest cannot
    prevent this for longer than a silent node is waited for.
    """

    job: JobSpec
    #: when the latest break or return was
    latest: float = -math.inf
    #: when the present series of breaks and returns began
    began: float = -math.inf

    def note(self, now: float) -> None:
        """Note that a connection broke or came back."""
        if now - self.latest > self.job.limits.reconnect_grace:
            self.began = now
        self.latest = now

    @property
    def until(self) -> float:
        """Time before which no node is given up."""
        limits = self.job.limits
        return min(self.latest + limits.reconnect_grace, self.began + limits.heartbeat_timeout)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert self.began <= self.latest, "the latest return is not of the present series"


class Phase(str, enum.Enum):
    """Phase of a job. Users see the value."""

    WAITING = "waiting for nodes"
    """The first round collects nodes."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A later round collects nodes."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Node:
    """One node of the job. Change ``status`` only through `JobState.move`."""

    id: int
    node_rank: int
    status: NodeStatus = NodeStatus.PENDING
    #: id of the agent process that last connected; another process is another node
    uid: str = ""
    hostname: str = ""
    #: handle by which the platform finds the node again; empty for nodes that come by themselves
    handle: str = ""
    #: True if the platform was asked for it; such a node is replaced when lost
    launched: bool = False
    #: True while its stream is open
    connected: bool = False
    #: True once it has been part of a world
    has_run: bool = False
    #: True if its agent ended after its workers had succeeded; it is missed only when a new round opens
    gone: bool = False
    #: True if the node check named it
    excluded: bool = False
    #: True if the platform can make neither this node nor another one in its place
    refused: bool = False
    #: True if its agent did not end by itself, for instance because of a preemption
    removed: bool = False
    #: exit code of its agent, if its platform knows it
    exit_code: int = 0
    #: what keeps it from starting, according to its platform
    waits: str = ""
    #: why it is lost
    reason: str = ""
    #: memory that it was launched with, as a multiple of the job's request
    memory_factor: float = 1.0
    #: cores that it was launched with, as a multiple of the job's request
    cpu_factor: float = 1.0


@dataclass
class Migration:
    """Replacement of a node by another one, which is its key in ``Fleet.migrations``."""

    #: the node that is replaced; it trains until the new one takes over
    node: int
    #: when the new node is given up if it has not joined
    until: float


@dataclass
class StepProgress:
    """The job's optimizer steps."""

    #: steps of the last completed round
    steps: int = 0
    #: steps of all rounds before it
    earlier_steps: int = 0
    #: number of the step that the last completed round began with; -1 while unknown
    first_step: int = -1
    #: number of the step that the round before had come to, its first if it completed none; -1 if unknown
    reached: int = -1

    @property
    def total_steps(self) -> int:
        """Optimizer steps since the job began, repeated ones included."""
        return self.earlier_steps + self.steps

    def next_round(self) -> None:
        """Begin to count the steps of another round."""
        if self.steps or self.first_step >= 0:
            self.reached = self.first_step + self.steps if self.first_step >= 0 else -1
        self.earlier_steps += self.steps
        self.steps, self.first_step = 0, -1


@dataclass
class JobState:
    """What the parts of the job machine share: the smaller machines, the nodes, and the job's end."""

    job: JobSpec
    job_dir: str = ""
    submitted_at: float = 0.0
    #: patterns of failures, and their meaning
    table: RuleTable = field(default_factory=RuleTable)
    nodes: dict[int, Node] = field(default_factory=dict)
    #: number of nodes whose workers have succeeded; after each input, a search would take too long
    succeeded: int = 0
    #: when a disconnected node counts as lost; only for nodes that are neither connected nor final
    lost_at: Deadlines = field(default_factory=Deadlines)
    #: nodes whose agents shut down by themselves, as on SIGTERM, and when they count as lost in any case
    departing: Deadlines = field(default_factory=Deadlines)
    progress: StepProgress = field(default_factory=StepProgress)
    incident: Incident | None = None
    #: set once, when the job ends
    outcome: Outcome | None = None
    #: True if nodes of the last world were lost when the job ended
    partial: bool = False
    #: commands of the input that is being handled
    commands: list[inputs.Command] = field(default_factory=list)
    rendezvous: Rendezvous = field(init=False)
    restarts: RestartPolicy = field(init=False)
    adoption: Adoption = field(init=False)
    faults: Faults = field(init=False)
    checks: Checks = field(init=False)
    autoscaling: AutoScaling = field(init=False)
    scaling: Scaling = field(init=False)
    membership: Membership = field(init=False)
    spares: Spares = field(init=False)
    reconnections: Reconnections = field(init=False)

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous(self.job)
        self.restarts = RestartPolicy(self.job)
        self.adoption = Adoption()
        self.faults = Faults(self.job)
        self.checks = Checks(self.job)
        self.autoscaling = AutoScaling(self.job)
        self.scaling = Scaling(self.job)
        self.membership = Membership(self.job)
        self.spares = Spares(self.job)
        self.reconnections = Reconnections(self.job)

    def has_ended(self) -> bool:
        """Return whether the job has ended; a method, since most calls may end it."""
        return self.outcome is not None

    def is_instance(self, node: Node) -> bool:
        """Return whether a node belongs to no common world: it starts, fails and returns by itself."""
        return self.job.is_instance(node.node_rank)

    def is_spare(self, node: Node) -> bool:
        """Return whether a node was launched as a spare and is one still."""
        return node.launched and is_spare(node.node_rank)

    def is_outside(self, node: Node) -> bool:
        """Return whether no round awaits a node: an instance or a spare."""
        return self.is_instance(node) or self.is_spare(node)

    def leaves(self, node_id: int) -> bool:
        """Return whether a node is on its way out: it is drained, or its agent shuts down."""
        return node_id in self.departing or node_id in self.scaling.leaving

    @property
    def quiet(self) -> bool:
        """True while a world trains and no incident is open."""
        rdzv = self.rendezvous
        away = rdzv.collecting or self.adoption.pending or not rdzv.members
        return self.incident is None and self.outcome is None and not away

    @property
    def awaits_step(self) -> bool:
        """True if the next new step ends an incident."""
        return self.incident is not None and not self.membership.lacks_ranks

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

    def send(self, *commands: inputs.Command) -> None:
        """Add commands to those of the input."""
        self.commands += commands

    def emit(self, *bodies: events.EventBody) -> None:
        """Record events."""
        self.commands += map(inputs.Emit, bodies)

    def move(self, node: Node, status: NodeStatus) -> None:
        """Change a node's status."""
        assert status in TRANSITIONS[node.status], f"{node.id}: {node.status} -> {status}"
        done = NodeStatus.SUCCEEDED
        self.succeeded += (status is done) - (node.status is done)
        node.status = status

    def end(
        self,
        exit_code: int,
        reason: str,
        now: float,
        root: events.WorkerFailed | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        """End the job and dismiss every node; a node that comes back later is dismissed then."""
        reports = self.incident.reports if self.incident is not None else []
        self.outcome = Outcome(
            exit_code=int(exit_code),
            reason=reason,
            failure=root.failure if root is not None else None,
            verdict=root.verdict if root is not None else verdict,
            others=other_failures(reports, root),
            restarts=self.restarts.count,
            steps=self.progress.total_steps,
            seconds=now - self.submitted_at,
            job_dir=self.job_dir,
        )
        members = (self.nodes[i] for i in self.rendezvous.members)
        self.partial = any(node.status is NodeStatus.LOST for node in members)
        self.emit(events.JobEnded(int(exit_code), reason))
        for node in self.nodes.values():
            if node.status.final:
                continue
            if node.connected:
                self.send(inputs.Say(node.id, self.dismissal))
            elif node.handle and node.id not in self.lost_at:
                self.send(inputs.KillNode(node.id))
        self.send(inputs.EndJob(self.outcome))

    @property
    def dismissal(self) -> Dismiss:
        """Order for a node to leave an ended job; unless that succeeded, what is in memory is stored first."""
        assert self.outcome is not None
        return Dismiss(
            self.outcome, store=self.outcome.exit_code != ExitCode.SUCCESS, partial=self.partial
        )

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        rdzv, adopting = self.rendezvous, self.adoption.pending
        for part in (rdzv, self.restarts, self.adoption, self.faults, self.checks):
            part.validate()
        self.autoscaling.validate()
        self.scaling.validate()
        self.membership.validate()
        self.reconnections.validate()
        assert not (self.membership.round and rdzv.collecting), (
            "a membership while a round collects"
        )
        self.spares.validate(self.nodes)
        run = self.checks.run
        assert run is None or rdzv.collecting or run.aside, "a check beside a world"
        assert not (adopting and (rdzv.collecting or rdzv.members)), "two rounds at once"
        assert (rdzv.least, rdzv.most) == (self.scaling.least, self.scaling.most), (
            "a world of another size"
        )
        leaving = {i for i in self.scaling.leaving if not self.is_outside(self.nodes[i])}
        assert rdzv.leaving == leaving | self.departing.keys(), (
            "a node leaves unknown to the rounds"
        )
        for node in self.nodes.values():
            assert not (node.status.final and node.connected), "lost but connected"
            assert node.status is not NodeStatus.PENDING or not node.connected, "pending, connected"
            away = not (node.connected or node.gone or node.status is NodeStatus.PENDING)
            if self.outcome is None and away and not node.status.final:
                assert node.id in self.lost_at, "a disconnected node has no deadline"
        for node_id in self.lost_at:
            assert not self.nodes[node_id].connected, "a connected node is being given up"
            assert not self.nodes[node_id].status.final, "a lost node is being given up"
        done = sum(node.status is NodeStatus.SUCCEEDED for node in self.nodes.values())
        assert self.succeeded == done, "a node has succeeded unnoticed"
        assert self.progress.steps >= 0
        assert self.progress.earlier_steps >= 0
        if self.incident is not None:
            self.incident.validate()
            assert self.incident.decided or rdzv.collecting or self.outcome is not None


def phase_after(exit_code: int) -> Phase:
    """Return the phase of a job that ended with ``exit_code``."""
    if exit_code == ExitCode.SUCCESS:
        return Phase.SUCCEEDED
    stopped = exit_code == ExitCode.STOPPED or exit_code > ExitCode.SIGNAL_BASE
    return Phase.STOPPED if stopped else Phase.FAILED


def given_up(node: Node) -> Dismiss:
    """Return the order to leave for a node that the job has given up."""
    reason = f"node {node.id} was given up ({node.reason})."
    if node.launched:
        reason = f"node {node.id} was given up ({node.reason}) and replaced."
    return Dismiss(Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason))


def released(node: Node, *, replaced: bool = False) -> Dismiss:
    """Return the order to leave for a node that the job no longer needs: the others need what it stores."""
    why = "another node takes its place" if replaced else "the job goes on with fewer nodes"
    reason = f"node {node.id} was released: {why}."
    return Dismiss(Outcome(exit_code=ExitCode.SUCCESS, reason=reason), store=True)


def loss_of(node: Node, round_: int, now: float) -> Failure:
    """Return the record of a lost node, for the diagnosis."""
    return Failure(
        id=f"node {node.id}",
        kind=FailureKind.NODE,
        node_id=node.id,
        rank=-1,
        local_rank=-1,
        round=round_,
        time=now,
        message=node.reason,
        hostname=node.hostname,
    )


def excluded(node: Node, reason: str) -> Dismiss:
    """Return the order to leave for a node that the job excludes because of ``reason``."""
    reason = f"node {node.id} is left out: {reason}."
    return Dismiss(Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason))
