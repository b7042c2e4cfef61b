"""The response to faults: incidents, the decision on a restart, and the actions beyond it.

A *fault* (a worker fails, a node of the world is lost) opens an *incident*. The first response is the same
for all faults and is ordered at once: the remaining workers stop and their nodes join a new round. The
restart policy decides whether the job continues once a conclusive failure is known. A failure that merely
echoes a peer's death (a reset connection) is not conclusive: the decision then waits for the reports of the
other nodes, which precede their joining.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dlrover.master.machine import inputs
from dlrover.master.machine.diagnosis.diagnosis import hang_verdict, root_cause
from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.instances import Instances
from dlrover.master.machine.recovery.incident import Incident
from dlrover.master.machine.recovery.ladder import Ladder
from dlrover.master.machine.recovery.restarts import (
    RestartCause,
    Stop,
    cause_of,
    hang_cause,
)
from dlrover.master.machine.recovery.survival import Survival
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.scaling.resizer import Resizer
from dlrover.master.machine.state import JobState, Node, loss_of
from dlrover.spec import events
from dlrover.spec.failure import ENDED_WELL, Action, Failure, Origin
from dlrover.spec.node import NodeStatus


@dataclass
class Recovery:
    """Responds to the faults of a job; its state is the open incident of the `JobState`."""

    state: JobState = field(compare=False, repr=False)
    fleet: Fleet = field(compare=False, repr=False)
    rounds: Rounds = field(compare=False, repr=False)
    resizer: Resizer = field(compare=False, repr=False)
    instances: Instances = field(compare=False, repr=False)
    ladder: Ladder = field(compare=False, repr=False)
    survival: Survival = field(compare=False, repr=False)

    def admitted(self, failure: Failure) -> events.WorkerFailed | None:
        """Return a reported failure as it should be journalled; None if the report changes nothing."""
        state, rdzv, incident = self.state, self.state.rendezvous, self.state.incident
        node = state.nodes.get(failure.node_id)
        given_up = node is not None and node.status.final and not rdzv.collecting
        if state.has_ended() or (given_up and state.membership.active):
            return None
        if self.instances.owns(failure.node_id):
            return self.instances.admitted(failure)
        if state.adoption.pending:
            return state.adoption.admit(failure, state.table)
        current = failure.round == rdzv.round and not rdzv.collecting
        prolongs = incident is not None and incident.survived and incident.round == failure.round
        if current and not prolongs and failure.id not in state.membership.seen:
            return state.table.failed(self._with_ended(failure).bounded())  # it opens an incident
        if incident is None or incident.round != failure.round or failure.id in incident.seen:
            return None
        return incident.admit(self._with_ended(failure), state.table)

    def _with_ended(self, failure: Failure) -> Failure:
        """Return a failure with the fact that a whole other node of the world had ended well before, if one had."""
        ended = (n for n in self.state.nodes.values() if n.status is NodeStatus.SUCCEEDED)
        other = next((n.id for n in ended if n.id != failure.node_id), None)
        if other is None:
            return failure
        fact = f"all ranks of node {other} {ENDED_WELL}"
        return msgspec.structs.replace(failure, node_facts=(fact, *failure.node_facts))

    # ---- faults

    def worker_failed(self, report: events.WorkerFailed, now: float) -> None:
        """Respond to an admitted failure of a worker."""
        state, rdzv = self.state, self.state.rendezvous
        failure, verdict = report.failure, report.verdict
        if self.instances.owns(failure.node_id):
            self._instance_failed(state.nodes[failure.node_id], report, now)
            return
        if state.adoption.pending:
            state.adoption.report(report)
            return
        current = failure.round == rdzv.round and not rdzv.collecting
        serves = failure.node_id in rdzv.servers
        if current and serves and self.rounds.is_about_to_end:
            # A worker that finished and left may be the reason; one that needs the server will fail, too.
            state.emit(report)
            return
        if current and not serves and self.survival.without_worker(report, now):
            return
        incident = self._begin(now) if current else state.incident
        if incident is None or incident.round != failure.round or failure.id in incident.seen:
            return
        incident.add(report)
        state.emit(report)
        if failure.round == rdzv.last_round and not serves:
            state.progress.steps = max(state.progress.steps, failure.steps)
        goes_on = incident.decided or verdict.echo or self.decide(incident, now)
        if goes_on and current:
            self.rounds.open(verdict.title, now)

    def hung(self, event: inputs.Hung, now: float) -> None:
        """Respond to a hang of the training."""
        rdzv, found = self.state.rendezvous, event.found
        if found.round != rdzv.round or rdzv.collecting:
            return
        self.state.emit(found)
        if event.restart:
            incident = self._begin(now)
            incident.hang = found
            if incident.decided or self.decide(incident, now):
                self.rounds.open("the training hung", now)

    def progressed(self, event: inputs.Progressed, now: float) -> None:
        """Count steps; the first new one closes the incident."""
        state, rdzv, progress = self.state, self.state.rendezvous, self.state.progress
        if event.round != rdzv.round or rdzv.collecting:
            return
        progress.steps = max(progress.steps, event.steps)
        incident = state.incident
        if incident is not None and state.awaits_step:
            before = incident.steps if incident.round == event.round else 0
            if event.steps > before:
                survived = incident.survived and incident.round == event.round
                state.emit(events.Recovered(event.round, now - incident.since, survived))
                state.incident = None
        if event.first_step >= 0 > progress.first_step:
            progress.first_step = event.first_step
            if progress.reached > progress.first_step:
                state.emit(events.StepsUndone(event.round, progress.reached, progress.first_step))

    def lose(self, node_id: int, reason: str, now: float) -> None:
        """Respond to the loss of a node, whatever it was doing."""
        state, node = self.state, self.state.nodes[node_id]
        if node.status.final:
            return
        before = node.status
        state.lost_at.pop(node_id, None)
        departs = state.departing.pop(node_id, None) is not None
        state.rendezvous.drop(node_id)
        state.adoption.forget(node_id)
        state.send(*state.checks.lose(node_id, now))
        node.connected = False
        node.reason = reason
        if state.has_ended():
            state.scaling.leaving.pop(node_id, None)
            state.spares.drop(node_id)
            state.move(node, NodeStatus.RELEASED)
            return
        if node_id in state.scaling.leaving:
            self.fleet.release(node, reason)
            return
        if before is NodeStatus.SUCCEEDED and not state.rendezvous.collecting:
            node.gone = True
            return
        self.fleet.bury(node)
        if before is NodeStatus.RUNNING and state.is_instance(node):
            self._instance_lost(node, now)
        elif before is NodeStatus.RUNNING and not (departs and self.rounds.goes_on_without(node)):
            self._node_lost(node, now)
        if not state.has_ended():
            self.fleet.replace(node, now)
            self.rounds.grow_soon(now)

    def depart(self, node: Node, reason: str, now: float) -> None:
        """Stop all workers because a node's agent shuts down, and have what is in memory stored with it.

        The node is lost once the agent has ended. Ranks that go on without lost ones do so, and nothing is stored.
        """
        state, rdzv = self.state, self.state.rendezvous
        holds = node.has_run and not (node.status.final or state.is_outside(node))
        if state.leaves(node.id) or not holds or state.job.survive or state.adoption.pending:
            return
        if not rdzv.collecting and node.status is not NodeStatus.RUNNING:
            return
        node.reason = f"{reason[:1].lower()}{reason[1:]}".rstrip(".")
        others_store = bool(rdzv.leaving)
        state.departing[node.id] = now + state.job.shutdown_timeout + state.job.limits.release_grace
        rdzv.let_go(node.id)
        why = f"node {node.id} leaves: {node.reason}"
        if not rdzv.collecting:
            self.rounds.open(why, now)
        elif not others_store:
            self.rounds.call_all(why)
        state.send(*state.checks.lose(node.id, now))

    def _node_lost(self, node: Node, now: float) -> None:
        """Respond to the loss of a node of the world."""
        if self.survival.without_node(node, now):
            return
        incident = self._begin(now)
        if incident.lost_node is None:
            incident.lost_node = self.state.table.failed(loss_of(node, incident.round, now))
        goes_on = incident.decided or self.decide(incident, now)
        if goes_on and not self.state.rendezvous.collecting:
            self.rounds.open(f"node {node.id} was lost", now)

    # ---- instances, whose faults interrupt no other instance

    def _instance_failed(self, node: Node, report: events.WorkerFailed, now: float) -> None:
        """Respond to a failure in an instance."""
        state = self.state
        if not self.instances.runs(node.id, report.failure.round):
            return
        state.emit(report)
        if self.rounds.is_about_to_end:
            return
        self._decide_alone(node, report, report, now)
        if not (state.has_ended() or node.status.final):
            self.instances.restart(node, report.verdict.title)

    def _instance_lost(self, node: Node, now: float) -> None:
        """Respond to the loss of an instance's node; another one takes its place."""
        report = self.state.table.failed(loss_of(node, self.instances.starts[node.node_rank], now))
        self._decide_alone(node, report, None, now)

    def _decide_alone(
        self, node: Node, report: events.WorkerFailed, root: events.WorkerFailed | None, now: float
    ) -> None:
        """Decide on a failed or lost instance, and do what goes beyond its restart."""
        verdict, decision = report.verdict, self.instances.decide(node, report, now)
        if isinstance(decision, Stop):
            self.state.end(decision.exit_code, decision.reason, now, root)
            return
        action = self.ladder.action(node, decision, verdict, now)
        self.ladder.act(node, action, verdict.title, now)

    def _begin(self, now: float) -> Incident:
        old, round_ = self.state.incident, self.state.rendezvous.last_round
        if old is not None and old.round == round_ and not old.survived:
            return old
        # A fault before the first step after another fault prolongs the interruption.
        since = now if old is None or old.survived else old.since
        self.state.incident = Incident(since=since, round=round_)
        return self.state.incident

    # ---- the decision

    def decide(self, incident: Incident, now: float) -> bool:
        """Ask the restart policy about an incident, once; return whether the job continues."""
        incident.decided = True
        # A report before the loss of a node can only echo the loss; otherwise it would be decided by now.
        if incident.lost_node is not None:
            return self._decide_failure(incident, incident.lost_node, None, now)
        if incident.hang is not None:
            verdict = hang_verdict(incident.hang)
            cause = hang_cause(verdict, self.state.progress.steps)
            decision = self.ladder.ask(cause, None, now, verdict)
            if decision is None:
                return False
            self.state.emit(
                events.RestartDecided(self.state.restarts.count, decision.reason, "hang")
            )
            return True
        root = root_cause(incident.reports)
        return self._goes_back(incident, root, now) or self._decide_failure(
            incident, root, root, now
        )

    def _decide_failure(
        self,
        incident: Incident,
        report: events.WorkerFailed,
        root: events.WorkerFailed | None,
        now: float,
    ) -> bool:
        """Decide on a failed worker, the ``root``, or on a lost node."""
        state, failure, verdict = self.state, report.failure, report.verdict
        node = state.nodes.get(failure.node_id)
        decision = self.ladder.ask(self._cause_of(incident, report, node, now), root, now)
        if decision is None:
            return False
        action = Action.RESTART
        if node is not None:
            action = self.ladder.action(node, decision, verdict, now)
        self.ladder.emit(decision, report, action, now)
        if node is not None:
            self.ladder.act(node, action, verdict.title, now)
        if verdict.origin is Origin.INFRASTRUCTURE:
            state.checks.doubt({other.failure.node_id for other in incident.reports})
        return True

    def _cause_of(
        self, incident: Incident, report: events.WorkerFailed, node: Node | None, now: float
    ) -> RestartCause:
        progress, failure = self.state.progress, report.failure
        first = max(progress.first_step, *(r.failure.first_step for r in incident.reports), -1)
        reached = first + progress.steps if first >= 0 else -1
        seconds = now - self.rounds.since
        cause = cause_of(failure, report.verdict, progress.steps, seconds, reached)
        if node is not None and node.hostname:
            cause = msgspec.structs.replace(cause, host=node.hostname)
        return cause

    def _goes_back(self, incident: Incident, root: events.WorkerFailed, now: float) -> bool:
        """Return whether a trial of the auto-scaler failed, which costs no restart."""
        verdict, scaling = root.verdict, self.state.autoscaling
        if verdict.origin is not Origin.USER:
            return False
        size = self.state.rendezvous.size
        back = scaling.failed(size, incident.round, verdict.title, now)
        self.resizer.apply(*back)
        if not (back[0] or scaling.returning(size)):
            return False
        restarts, node_id = self.state.restarts, root.failure.node_id
        reason = restarts.after_trial(verdict.title).reason
        self.state.emit(events.RestartDecided(restarts.count, reason, verdict.cause, node=node_id))
        return True
