"""The job machine: it routes each input to the part that responds, and completes what the state then allows.

Each part uses only those before it: `JobState` (what all share), `Fleet` (nodes), `Rounds`, `Resizer` (changes of
the nodes), `Instances` (nodes outside the world), `Ladder` (responses), `Survival` (losses that stop no other rank),
`Recovery` (faults) and `Screening` (node checks).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.checks.screening import Screening
from dlrover.master.machine.diagnosis.diagnosis import RuleTable
from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.instances import Instances
from dlrover.master.machine.recovery.incident import Incident
from dlrover.master.machine.recovery.ladder import Ladder
from dlrover.master.machine.recovery.recovery import Recovery
from dlrover.master.machine.recovery.survival import Survival
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.scaling.resizer import ResizeInput, Resizer
from dlrover.master.machine.state import JobState, Node, given_up, released
from dlrover.master.machine.waiting import too_few
from dlrover.rpc.messages import Hello, Join, Leaving, StopRequest, Succeeded, Welcome
from dlrover.spec import events
from dlrover.spec.check import CheckReport
from dlrover.spec.job import JobSpec
from dlrover.spec.node import NodeStatus
from dlrover.spec.outcome import Outcome
from dlrover.spec.words import counted
from dlrover.spec.world import Holding


@dataclass
class JobMachine:
    """A job's response to each input. `handle` is the only way to change it."""

    state: JobState = field(default_factory=lambda: JobState(JobSpec(name="")))
    fleet: Fleet = field(init=False)
    rounds: Rounds = field(init=False)
    resizer: Resizer = field(init=False)
    instances: Instances = field(init=False)
    survival: Survival = field(init=False)
    recovery: Recovery = field(init=False)
    screening: Screening = field(init=False)

    def __post_init__(self) -> None:
        self._compose()

    def _compose(self) -> None:
        state = self.state
        self.fleet = Fleet(state)
        self.rounds = Rounds(state, self.fleet)
        self.resizer = Resizer(state, self.fleet, self.rounds)
        self.instances = Instances(state, self.fleet)
        ladder = Ladder(state, self.fleet, self.rounds, self.resizer, self.instances)
        self.survival = Survival(state, self.rounds, ladder)
        self.recovery = Recovery(
            state, self.fleet, self.rounds, self.resizer, self.instances, ladder, self.survival
        )
        self.screening = Screening(state, self.fleet, self.rounds, self.survival, self.recovery)
        # What readers of the state ask for most.
        self.job, self.nodes, self.progress = state.job, state.nodes, state.progress
        self.rendezvous, self.restarts = state.rendezvous, state.restarts
        self.adoption, self.faults, self.checks = state.adoption, state.faults, state.checks
        self.autoscaling, self.scaling = state.autoscaling, state.scaling
        self.spares = state.spares

    # ---- queries

    @property
    def outcome(self) -> Outcome | None:
        """Outcome of the job; None until it ends."""
        return self.state.outcome

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self.state.incident

    def deadline(self) -> float | None:
        """Return when `DeadlinePassed` is due, unless another input changes that; None for never."""
        if self.state.has_ended():
            return None
        checked = self.checks.deadline()  # a round pauses while its nodes are checked
        times = [checked or self.rendezvous.deadline(), self.autoscaling.deadline()]
        times += [self.rounds.grow_at, self.resizer.places_at, self.spares.deadline()]
        state = self.state
        times += [of.earliest() for of in (state.lost_at, state.departing, state.scaling.leaving)]
        times += (migration.until for _, migration in self.fleet.coming())
        if self.adoption.pending:
            times.append(self.adoption.deadline)
        return min((t for t in times if t is not None), default=None)

    # ---- inputs

    def handle(self, event: inputs.Input, now: float) -> list[inputs.Command]:
        """Handle one input at time ``now`` (seconds since the epoch); return the resulting commands.

        Inputs may be repeated and may come late. An input that no longer applies changes nothing.
        """
        self.state.commands = []
        self.spares.count(0 if self.rendezvous.collecting else len(self.rendezvous.members), now)
        # Some inputs still count after the job's end, since they show which nodes have yet to leave.
        if not self.state.has_ended() or isinstance(event, _AFTER_THE_END):
            self._dispatch(event, now)
        self._advance(now)
        return self.state.commands

    def _dispatch(self, event: inputs.Input, now: float) -> None:
        match event:
            case inputs.Submitted():
                self._submitted(event, now)
            case inputs.MasterStarted(replayed) if replayed:
                self._master_started(replayed, now)
            case events.WorkerFailed():
                self.recovery.worker_failed(event, now)
            case inputs.Progressed():
                self.recovery.progressed(event, now)
            case inputs.Hung():
                self.recovery.hung(event, now)
            case inputs.MemberReported(change):
                self.survival.report(change, now)
            case StopRequest(reason, exit_code):
                self.state.end(exit_code, reason, now)
            case inputs.DeadlinePassed():
                self._deadline_passed(now)
            case _ if isinstance(event, ResizeInput):
                self.resizer.handle(event, now)
            case _:
                self._handle_node(event, now)

    def _handle_node(self, event: inputs.Input, now: float) -> None:
        """Handle an input about one node, or one that is only recorded."""
        match event:
            case events.StepStored():
                self.state.emit(event)
            case inputs.NodePlaced():
                self._node_placed(event)
            case events.NodeWaits():
                self._node_waits(event)
            case inputs.NodeExited(node_id, reason):
                node = self.nodes[node_id]
                node.exit_code, node.refused, node.removed = (
                    event.exit_code,
                    event.refused,
                    event.removed,
                )
                self.recovery.lose(node_id, reason, now)
            case Hello():
                self._node_connected(event, now)
            case inputs.NodeDisconnected(node_id):
                self._node_disconnected(node_id, now)
            case inputs.NodeSilent(node_id, seconds):
                self.recovery.lose(node_id, f"it sent no heartbeat for {seconds:.0f} s", now)
            case inputs.Reported():
                self._reported(event, now)

    def _reported(self, event: inputs.Reported, now: float) -> None:
        node = self.nodes[event.node_id]
        alone = self.state.is_instance(node)
        match event.message:
            case Join() as join:
                self._node_joined(node, join, now)
            case CheckReport() as report:
                self.state.send(*self.checks.take(node.id, report, now))
            case Leaving(reason):
                self.recovery.depart(node, reason, now)
            case Succeeded() if self.adoption.pending and not alone:
                self.adoption.report(event)
            case Succeeded(round_):
                self._node_succeeded(node, round_)

    def _submitted(self, event: inputs.Submitted, now: float) -> None:
        job, own = event.job, event.job.diagnosis_rules
        table = RuleTable((*own, *event.rules), own=len(own))
        self.state = state = JobState(job, event.job_dir, now, table)
        self._compose()
        if not event.earlier_events:
            bounds = (job.min_nodes, job.max_nodes, job.min_servers, job.max_servers)
            state.emit(events.JobSubmitted(job.name, *bounds))
        if job.first_size and not event.earlier_events:
            state.emit(events.FirstSize(job.managed_nodes, job.first_size))
        self.fleet.decide_spares(now)
        found = {node.node_rank for node in event.found}
        self.scaling.keep(found)
        self.scaling.due = len(found) < len(event.found)
        self.rendezvous.least, self.rendezvous.most = self.scaling.least, self.scaling.most
        for node in event.found:
            self.fleet.add_found(node, now)
        found |= self.fleet.fill_places()
        for node_rank in self.scaling.ranks:
            if node_rank not in found:
                self.fleet.launch(node_rank, now)
        if job.instances:
            return  # each starts by itself
        if event.found or (event.earlier_events and not job.managed_nodes):
            ids = [node.node_id for node in event.found if not self.instances.owns(node.node_id)]
            self.adoption.begin(ids, now, now + job.limits.recovery_grace)
        else:
            self.rounds.open_first(now)

    def _master_started(self, replayed: int, now: float) -> None:
        state = self.state
        grace = now + self.job.limits.recovery_grace
        state.reconnections.note(now)
        for node in self.nodes.values():
            node.connected = False
            state.spares.drop(node.id)
            if state.has_ended() or node.status.final or node.gone:
                continue
            if node.status is NodeStatus.PENDING:
                if node.id in state.lost_at:
                    state.lost_at[node.id] = grace
                if not node.handle:
                    self.fleet.order(node, now)
                continue
            self.rendezvous.withdraw(node.id)
            state.lost_at[node.id] = self.scaling.leaving.get(node.id, grace)
        if not state.has_ended():
            self.rendezvous.resume(now)
            if self.adoption.pending:
                self.adoption.deadline = grace
            for migration in self.fleet.migrations.values():
                migration.until = now + self.job.limits.join_timeout
            state.emit(events.MasterRecovered(replayed))

    def _node_placed(self, event: inputs.NodePlaced) -> None:
        node = self.nodes[event.node_id]
        node.handle = event.handle
        if node.status.final or (self.state.has_ended() and not node.connected):
            self.state.send(inputs.KillNode(node.id))

    def _node_waits(self, event: events.NodeWaits) -> None:
        node = self.nodes[event.node]
        if node.status is NodeStatus.PENDING and node.waits != event.reason:
            node.waits = event.reason
            if event.reason:
                self.state.emit(event)

    def _node_connected(self, event: Hello, now: float) -> None:
        state, node = self.state, self.fleet.node_of(event)
        if event.epoch:
            state.reconnections.note(now)  # others come for the first time
        interval = self.job.limits.heartbeat_interval
        alone = state.is_instance(node)
        lost = self._has_lost_round(node, event)
        round_ = self.instances.next_round(node) if alone else self.rendezvous.next_round
        welcome = Welcome(node.id, round_, interval)
        state.send(inputs.Greet(event.uid, welcome))
        if node.status.final:
            left = released if node.status is NodeStatus.RELEASED else given_up
            dismissal = state.dismissal if state.has_ended() else left(node)
            state.send(inputs.Say(node.id, dismissal))
            return
        node.hostname = event.hostname
        if self.fleet.refuse(node, now):
            return
        node.connected = True
        node.gone = False
        state.lost_at.pop(node.id, None)
        arrived = node.status is NodeStatus.PENDING
        if arrived:
            state.move(node, NodeStatus.READY)
            state.spares.arrived(node.id, now)
            self.fleet.decide_spares(now)
        if state.has_ended():
            state.send(inputs.Say(node.id, state.dismissal))
            return
        if node.id in self.scaling.leaving:
            state.send(inputs.Say(node.id, self.fleet.farewell(node)))
            return
        if arrived:
            state.emit(events.NodeConnected(node.id, event.hostname))
        if alone:
            self.instances.connected(node, event.round, event.held)
        elif not self._hear(node, event.held, now):
            self._catch_up(node, event, lost, now)

    def _has_lost_round(self, node: Node, hello: Hello) -> bool:
        """Take in which rounds a node knows; return whether the journal has lost the end of the present one.

        A crash of the master's machine may lose the journal's last moments. What nodes know of later rounds counts.
        """
        rdzv, worlds, held = self.rendezvous, self.rounds.worlds, hello.held
        if self.state.is_instance(node) or not self.adoption.over:
            return False
        later = rdzv.hear(hello.round, hello.round if held is None else held.round)
        if rdzv.collecting or node.id not in worlds:
            return later and rdzv.collecting
        world = worlds[node.id]
        if held is None or held.world is None:
            left = (held.left, held.left_attempt) if held is not None else (0, 0)
            return hello.round > rdzv.round or left >= (rdzv.round, world.attempt)
        if held.world.round < rdzv.round:
            return False  # it was said before this round
        called = held.stopping and held.round > rdzv.round  # otherwise it leaves by itself
        return called or held.world.as_attempt(0) != world.as_attempt(0)

    def _hear(self, node: Node, held: Holding | None, now: float) -> bool:
        """Note what a node holds; return whether a running round may have to be adopted."""
        adoption, rdzv = self.adoption, self.rendezvous
        if adoption.over or held is None:
            return False
        if not adoption.pending:
            if held.world is None and held.round <= rdzv.round:
                return False
            rdzv.suspend()
            self.checks.cancel()
            adoption.begin((), now, now + self.job.limits.recovery_grace)
        adoption.hear(node.id, held)
        adoption.extend(self.state.reconnections.until)
        return True

    def _catch_up(self, node: Node, hello: Hello, lost: bool, now: float) -> None:
        """Send a node what it missed while it was disconnected; ``lost``: the journal has lost the end of its round."""
        rdzv, rounds, running_round = self.rendezvous, self.rounds, hello.round
        if lost:
            rounds.open("the master has lost a round", now)
            if node.status is not NodeStatus.READY:
                return  # it was called
        if rdzv.collecting and not self.state.is_spare(node):
            rdzv.expect(node.id)
            if running_round:
                rounds.call(node, "a new round is open")
        elif node.id in rounds.worlds:
            if running_round < rdzv.round and node.status is NodeStatus.RUNNING:
                rounds.assign(node.id)
            elif running_round == rdzv.round:
                if hello.held is not None:
                    self.survival.learn(node, hello.held, now)
                self.survival.catch_up(node)
        elif running_round:
            self.state.membership.pass_over(hello.held or Holding())
            rounds.call(node, "the world went on without this node")

    def _node_disconnected(self, node_id: int, now: float) -> None:
        node = self.nodes[node_id]
        node.connected = False
        if node_id in self.state.departing and not node.handle:
            self.recovery.lose(node_id, node.reason, now)
        elif not (node.status.final or node.gone):
            self.state.reconnections.note(now)
            self.rendezvous.withdraw(node.id)
            self.spares.drop(node.id)
            grace = now + self.job.limits.reconnect_grace
            self.state.lost_at[node.id] = self.scaling.leaving.get(node.id, grace)

    def _node_joined(self, node: Node, join: Join, now: float) -> None:
        rdzv, rounds = self.rendezvous, self.rounds
        if self.state.is_instance(node):
            self.instances.join(node, join, now)
            return
        if self.state.leaves(node.id):
            return
        if self.state.is_spare(node):
            if node.connected:
                self.fleet.failed_starts.pop(node.node_rank, None)
                self.fleet.stand_by(node, join.offer)
                self.state.send(*self.checks.again(node.id))
            return
        if not node.connected or (not rdzv.collecting and node.id in rounds.worlds):
            return
        if join.round != rdzv.next_round:
            rounds.call(node, f"round {join.round} is over")
            return
        if node.status in (NodeStatus.RUNNING, NodeStatus.SUCCEEDED):
            self.state.move(node, NodeStatus.READY)
        if self.adoption.pending:
            known = self.adoption.held.get(node.id, Holding())
            self.adoption.hear(node.id, Holding(round=max(known.round, join.round)))
        if rdzv.join(node.id, join.offer, now) and not rdzv.collecting and rounds.can_grow:
            rounds.grow_at = now + self.job.limits.scale_up_delay
        rounds.stand_by()
        self.state.send(*self.checks.again(node.id))

    def _node_succeeded(self, node: Node, round_: int) -> None:
        alone = self.state.is_instance(node)
        current = self.instances.runs(node.id, round_) if alone else round_ == self.rendezvous.round
        if not current or node.status is not NodeStatus.RUNNING:
            return
        self.state.move(node, NodeStatus.SUCCEEDED)
        self.state.emit(events.NodeSucceeded(node.id, self.fleet.role(node.id)))
        self.survival.succeed(node.id)

    def _deadline_passed(self, now: float) -> None:
        rounds, lost_at = self.rounds, self.state.lost_at
        patience = self.state.reconnections.until
        for node_id in [i for i, at in lost_at.items() if at <= now]:
            if patience > now:
                lost_at[node_id] = patience
            else:
                self.recovery.lose(node_id, "its connection did not come back", now)
        for leaving in (self.scaling.leaving, self.state.departing):
            for node_id in [i for i, at in leaving.items() if at <= now]:
                self.recovery.lose(node_id, "it did not leave in time", now)
        self.state.send(*self.checks.time_out(now))
        if self.spares.retry_at is not None and self.spares.retry_at <= now:
            self.spares.retry_at, self.scaling.due = None, True
        if self.spares.review_at is not None and self.spares.review_at <= now:
            self.fleet.decide_spares(now)
        self.resizer.apply(*self.autoscaling.expired(now))
        if rounds.grow_at is not None and rounds.grow_at <= now:
            rounds.grow_at = None
            if rounds.can_grow:
                rounds.open(f"{counted(len(self.rendezvous.offers), 'more node')} joined", now)
        self.resizer.give_up_migrations(now)

    # ---- what the state allows after an input

    def _advance(self, now: float) -> None:
        """Do what the state now allows, such as completing a round or ending the job."""
        state, rdzv = self.state, self.rendezvous
        if not state.has_ended() and self.adoption.pending:
            self._settle(now)
        if state.has_ended() or self.adoption.pending:
            return
        if self.scaling.due:
            self.resizer.scale(now)
        self.resizer.take_places(now)
        self.survival.fill_holes()
        if self.screening.run(now) or state.has_ended():
            return
        if rdzv.expired(now):
            state.end(ExitCode.INFRASTRUCTURE, too_few(self), now)
        elif rdzv.ready(now):
            self.rounds.complete(now)
        elif self.rounds.has_succeeded and state.membership.lacks_first:
            self.rounds.open(
                "rank 0 was lost before its end, which commonly stores the result", now
            )
        elif self.rounds.has_succeeded:
            state.end(ExitCode.SUCCESS, "All workers succeeded.", now)
        elif self.instances.have_succeeded:
            state.end(ExitCode.SUCCESS, "All instances succeeded.", now)

    def _settle(self, now: float) -> None:
        """Adopt the round that the nodes report, or open a new one, once it is time."""
        held_back = self.rounds.settle(now)
        if held_back is None:
            return
        for node_id in self.rounds.worlds:
            self.survival.catch_up(self.nodes[node_id])
        for report in held_back:
            if not self.state.has_ended():
                self._dispatch(report, now)

    # ---- invariants

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        self.state.validate()
        self.fleet.validate()
        self.rounds.validate()
        self.instances.validate()


_AFTER_THE_END = (
    inputs.MasterStarted
    | inputs.NodePlaced
    | inputs.NodeExited
    | Hello
    | inputs.NodeDisconnected
    | events.StepStored
)
