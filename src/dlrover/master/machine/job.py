"""The job machine: nodes, rounds, incidents and the job's end, composed from the smaller machines.

A *fault* (a worker fails, a node of the world is lost) opens an *incident*. The first response is the same
for all faults and is ordered at once: the remaining workers stop and their nodes join a new round. The
restart policy decides whether the job continues once a conclusive failure is known. A failure that merely
echoes a peer's death (a reset connection) is not conclusive: the decision then waits for the reports of the
other nodes, which precede their joining.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs, invariants, reports
from dlrover.master.machine.checks.checking import told
from dlrover.master.machine.checks.evidence import Finding
from dlrover.master.machine.diagnosis.diagnosis import Table
from dlrover.master.machine.jobauto import JobAuto
from dlrover.master.machine.restarts import Stop, cause_of, hang_cause
from dlrover.master.machine.state import (
    Incident,
    Node,
    excluded,
    given_up,
    loss_of,
    released,
)
from dlrover.master.machine.waiting import too_few
from dlrover.spec import events
from dlrover.spec.failure import Action, Origin, Verdict
from dlrover.spec.node import NodeStatus
from dlrover.spec.words import counted
from dlrover.spec.world import Holding

MEMORY_GROWTH = 2.0
"""Memory multiplier for the successor of a node killed for lack of memory, if the platform supports it."""


class JobMachine(JobAuto):
    """A job's response to each input. `handle` is the only way to change it."""

    # ---- inputs

    def handle(self, event: inputs.Input, now: float) -> list[inputs.Command]:
        """Handle one input at time ``now`` (seconds since the epoch); return the resulting commands.

        Inputs may be repeated and may come late. An input that no longer applies changes nothing.
        """
        self._out = []
        if self.outcome is None or isinstance(event, _AFTER_THE_END):
            _HANDLERS[type(event)](self, event, now)
        self._advance(now)
        return self._out

    def _submitted(self, event: inputs.Submitted, now: float) -> None:
        self.job, self.job_dir = event.job, event.job_dir
        own = self.job.diagnosis_rules
        self.table = Table((*own, *event.rules), own=len(own))
        self.submitted_at = now
        self._compose()
        if not event.earlier_events:
            job = self.job
            bounds = (job.min_nodes, job.max_nodes, job.min_servers, job.max_servers)
            self._emit(events.JobSubmitted(job.name, *bounds))
        if self.job.first_size and not event.earlier_events:
            self._emit(events.FirstSize(self.job.managed_nodes, self.job.first_size))
        found = {node.node_rank for node in event.found}
        self.scaling.keep(found)
        self.scaling.due = len(found) < len(event.found)
        self.rendezvous.least, self.rendezvous.most = self.scaling.least, self.scaling.most
        for node in event.found:
            self._add_found(node, now)
        for node_rank in self.scaling.ranks:
            if node_rank not in found:
                self._launch(node_rank, now)
        if event.found or (event.earlier_events and not self.job.managed_nodes):
            ids = [node.node_id for node in event.found]
            self.adoption.begin(ids, now, now + self.job.limits.recovery_grace)
        else:
            self._open_first_round(now)

    def _master_started(self, event: inputs.MasterStarted, now: float) -> None:
        if not event.replayed:
            return
        for node in self.nodes.values():
            node.connected = False
            if self.outcome is not None or node.status.final or node.gone:
                continue
            if node.status is NodeStatus.PENDING:
                if node.id in self.lost_at:
                    self.lost_at[node.id] = now + self.job.limits.recovery_grace
                if not node.handle:
                    self._order(node, now)
                continue
            self.rendezvous.withdraw(node.id)
            grace = now + self.job.limits.recovery_grace
            self.lost_at[node.id] = self.scaling.leaving.get(node.id, grace)
        if self.outcome is None:
            self.rendezvous.resume(now)
            if self.adoption.pending:
                self.adoption.deadline = now + self.job.limits.recovery_grace
            for migration in self.migrations.values():
                migration.until = now + self.job.limits.join_timeout
            self._emit(events.MasterRecovered(event.replayed))

    def _node_placed(self, event: inputs.NodePlaced, now: float) -> None:
        node = self.nodes[event.node_id]
        node.handle = event.handle
        if node.status.final or (self.outcome is not None and not node.connected):
            self._send(inputs.KillNode(node.id))

    def _node_waits(self, event: inputs.NodeWaits, _now: float) -> None:
        node = self.nodes[event.node_id]
        if node.status is NodeStatus.PENDING and node.waits != event.reason:
            node.waits = event.reason
            if event.reason:
                self._emit(events.NodeWaits(node.id, event.reason))

    def _node_exited(self, event: inputs.NodeExited, now: float) -> None:
        node = self.nodes[event.node_id]
        node.exit_code, node.refused = event.exit_code, event.refused
        self._lose(event.node_id, event.reason, now)

    def _node_connected(self, event: inputs.NodeConnected, now: float) -> None:
        node = self._node_of(event)
        self._send(inputs.Welcome(event.uid, node.id, self.rendezvous.next_round))
        if node.status.final:
            left = released if node.status is NodeStatus.RELEASED else given_up
            self._send(inputs.Dismiss(node.id, self.outcome or left(node)))
            return
        node.hostname = event.hostname
        if self._refuse(node, now):
            return
        node.connected = True
        node.gone = False
        self.lost_at.pop(node.id, None)
        arrived = node.status is NodeStatus.PENDING
        if arrived:
            self._move(node, NodeStatus.READY)
        if self.outcome is not None:
            self._send(inputs.Dismiss(node.id, self.outcome))
            return
        if node.id in self.scaling.leaving:
            self._send(inputs.Dismiss(node.id, self._released(node)))
            return
        if arrived:
            self._emit(events.NodeConnected(node.id, event.hostname))
        if not self._hear(node, event.held, now):
            self._catch_up(node, event.round, now)

    def _hear(self, node: Node, held: Holding | None, now: float) -> bool:
        """Note what a node holds; return whether a running round may have to be adopted."""
        adoption, rdzv = self.adoption, self.rendezvous
        if adoption.over or held is None:
            return False
        if not adoption.pending:
            if held.world is None and held.round <= rdzv.round:
                return False
            rdzv.suspend()
            adoption.begin((), now, now + self.job.limits.recovery_grace)
        adoption.hear(node.id, held)
        return True

    def _catch_up(self, node: Node, running_round: int, now: float) -> None:
        """Send a node what it missed while it was disconnected."""
        rdzv = self.rendezvous
        if rdzv.collecting:
            rdzv.expect(node.id)
            if running_round:
                self._call(node, "a new round is open")
        elif node.id in self.worlds:
            if running_round > rdzv.round:
                # A crash of the master's machine may lose the journal's last moments.
                self._open_round("the master has lost a round", now)
            elif running_round < rdzv.round and node.status is NodeStatus.RUNNING:
                self._assign(node.id)
        elif running_round:
            self._call(node, "the world went on without this node")

    def _node_disconnected(self, event: inputs.NodeDisconnected, now: float) -> None:
        node = self.nodes[event.node_id]
        node.connected = False
        if not (node.status.final or node.gone):
            self.rendezvous.withdraw(node.id)
            grace = now + self.job.limits.reconnect_grace
            self.lost_at[node.id] = self.scaling.leaving.get(node.id, grace)

    def _node_silent(self, event: inputs.NodeSilent, now: float) -> None:
        self._lose(event.node_id, f"it sent no heartbeat for {event.seconds:.0f} s", now)

    def _node_joined(self, event: inputs.NodeJoined, now: float) -> None:
        node = self.nodes[event.node_id]
        rdzv = self.rendezvous
        if node.id in self.scaling.leaving:
            return
        if not node.connected or (not rdzv.collecting and node.id in self.worlds):
            return
        if event.round != rdzv.next_round:
            self._call(node, f"round {event.round} is over")
            return
        if node.status in (NodeStatus.RUNNING, NodeStatus.SUCCEEDED):
            self._move(node, NodeStatus.READY)
        if self.adoption.pending:
            known = self.adoption.held.get(node.id, Holding())
            self.adoption.hear(node.id, Holding(round=max(known.round, event.round)))
        if rdzv.join(node.id, event.offer, now) and not rdzv.collecting and self._can_grow():
            self.grow_at = now + self.job.limits.scale_up_delay
        self._out += self.checks.again(node.id)

    def _node_checked(self, event: inputs.NodeChecked, now: float) -> None:
        self._out += self.checks.take(event.node_id, event.report, now)

    def _worker_failed(self, event: inputs.WorkerFailed, now: float) -> None:
        if self.adoption.pending:
            self.adoption.report(event)
            return
        failure, rdzv = event.failure, self.rendezvous
        current = failure.round == rdzv.round and not rdzv.collecting
        if current and self.is_server(failure.node_id) and self._is_about_to_end():
            # A worker that finished and left may be the reason; one that needs the server will fail, too.
            verdict = self.table.diagnose(failure)
            self._emit(events.WorkerFailed(failure, verdict))
            return
        incident = self._begin_incident(now) if current else self.incident
        if incident is None or incident.round != failure.round or failure.id in incident.seen:
            return
        failure = reports.admitted(incident, failure, self.table)
        verdict = self.table.diagnose(failure)
        reports.add(incident, failure, echo=verdict.echo)
        self._emit(events.WorkerFailed(failure, verdict))
        if failure.round == rdzv.last_round and not self.is_server(failure.node_id):
            self.steps = max(self.steps, failure.steps)
        goes_on = incident.decided or verdict.echo or self._decide(incident, now)
        if goes_on and current:
            self._open_round(verdict.title, now)

    def _node_succeeded(self, event: inputs.NodeSucceeded, now: float) -> None:
        if self.adoption.pending:
            self.adoption.report(event)
            return
        node = self.nodes[event.node_id]
        if event.round != self.rendezvous.round or node.status is not NodeStatus.RUNNING:
            return
        self._move(node, NodeStatus.SUCCEEDED)
        self._emit(events.NodeSucceeded(node.id, self.told_role(node.id)))

    def _progressed(self, event: inputs.Progressed, now: float) -> None:
        if event.round != self.rendezvous.round or self.rendezvous.collecting:
            return
        self.steps = max(self.steps, event.steps)
        if self.incident is not None and event.steps > 0:
            self._emit(events.Recovered(event.round, now - self.incident.since))
            self.incident = None
        if event.first_step >= 0 > self.first_step:
            self.first_step = event.first_step
            if self.reached > self.first_step:
                self._emit(events.StepsUndone(event.round, self.reached, self.first_step))

    def _hung(self, event: inputs.Hung, now: float) -> None:
        if event.found.round != self.rendezvous.round or self.rendezvous.collecting:
            return
        self._emit(event.found)
        if event.restart:
            incident = self._begin_incident(now)
            incident.hang = event.found.place or event.found.groups
            if incident.decided or self._decide(incident, now):
                self._open_round("the training hung", now)

    def _stop_requested(self, event: inputs.StopRequested, now: float) -> None:
        self._end(event.exit_code, event.reason, now)

    def _deadline_passed(self, event: inputs.DeadlinePassed, now: float) -> None:
        for node_id in [i for i, at in self.lost_at.items() if at <= now]:
            self._lose(node_id, "its connection did not come back", now)
        for node_id in [i for i, at in self.scaling.leaving.items() if at <= now]:
            self._lose(node_id, "it did not leave in time", now)
        self._out += self.checks.time_out(now)
        self._rescale(*self.autoscaling.expired(now), now)
        if self.grow_at is not None and self.grow_at <= now:
            self.grow_at = None
            if self._can_grow():
                self._open_round(f"{counted(len(self.rendezvous.offers), 'more node')} joined", now)
        self._give_up_migrations(now)

    # ---- steps that several inputs share

    def _advance(self, now: float) -> None:
        """Do what the state now allows, such as completing a round or ending the job."""
        largest = self.rendezvous.usable(self.rendezvous.most).nodes
        if self.outcome is None and self.adoption.pending and self.adoption.due(now, largest):
            self._settle(now)
        if self.outcome is not None or self.adoption.pending:
            return
        rdzv = self.rendezvous
        if self.scaling.due:
            self._scale(now)
        self._take_places(now)
        if self._checking(now) or self._has_ended():
            return
        if rdzv.expired(now):
            self._end(ExitCode.INFRASTRUCTURE, too_few(self), now)
        elif rdzv.ready(now):
            self._complete_round(now)
        elif not rdzv.collecting and rdzv.members and self._all_succeeded():
            self._end(ExitCode.SUCCESS, "All workers succeeded.", now)

    def _settle(self, now: float) -> None:
        """Adopt the round that the nodes report, or open a new one."""
        adoption, rdzv = self.adoption, self.rendezvous
        adoption.over = True
        held_back, adoption.reports = adoption.reports, {}
        members = adoption.members()
        # A world that is now too large is adopted; its surplus nodes then leave it in order.
        size = rdzv.count(members)
        surplus = self.scaling.due and rdzv.exceeds(size)
        if members and (surplus or rdzv.usable(size) == size):
            self._adopt(members, now)
            for report in held_back.values():
                if self.outcome is None:
                    _HANDLERS[type(report)](self, report, now)
        elif adoption.highest:
            rdzv.round = adoption.highest
            self.restarts.count = adoption.restart_count
            self.incident = Incident(since=adoption.began_at, round=rdzv.round, decided=True)
            self._open_round(f"the master has lost its journal, and {adoption.told()}", now)
            self._call_others("a new round is open")
        else:
            self._open_first_round(now)

    def _adopt(self, members: dict[int, Holding], now: float) -> None:
        """Continue a running round."""
        self.worlds = {i: held.world for i, held in members.items() if held.world is not None}
        some_world = next(iter(self.worlds.values()))
        self.rendezvous.adopt(some_world.round, tuple(self.worlds))
        self.restarts.count = some_world.restart_count
        self.autoscaling.batch = some_world.global_batch
        self.world_since = now
        self.steps = max(held.steps for i, held in members.items() if not self.is_server(i))
        for node_id, held in members.items():
            node = self.nodes[node_id]
            node.has_run = True
            self._move(node, NodeStatus.RUNNING)
            if held.succeeded:
                self._move(node, NodeStatus.SUCCEEDED)
        self._emit(events.MasterAdopted(some_world.round, len(members)))
        self._call_others("the world went on without this node")
        if self._can_grow():
            self.grow_at = now + self.job.limits.scale_up_delay

    def _call_others(self, reason: str) -> None:
        """Call the nodes whose workers belong to no round of this master."""
        for node_id, held in self.adoption.held.items():
            if held.world is not None and node_id not in self.worlds:
                self._call(self.nodes[node_id], reason)

    def _checking(self, now: float) -> bool:
        """Check nodes that are due before their world is formed; return whether a check is under way.

        After a check, the job continues without the nodes that it names, or it ends.
        """
        if self._has_ended():
            return False
        rdzv, checks = self.rendezvous, self.checks
        if checks.run is None:
            incident = self.incident
            ready = rdzv.ready(now)
            if ready and incident is not None and not incident.decided:
                # The decision may exclude one of the nodes.
                ready = self._decide(incident, now) and rdzv.ready(now)
            due = checks.due(rdzv.offers) if ready else set()
            if due:
                again = (
                    "it is new, or had a fault" if len(due) == 1 else "they are new, or had faults"
                )
                reason = again if rdzv.members else "the job starts"
                self._emit(events.NodeCheckStarted(len(due), reason))
                ranks = {i: self.nodes[i].node_rank for i in rdzv.offers}
                self._out += checks.begin(rdzv.in_order(ranks), rdzv.offers, now)
            return bool(due)
        run, conclusion = checks.run, checks.conclude(now)
        if conclusion is None:
            return True
        found, out = conclusion
        for body in told(found, out):
            self._emit(body)
        count = len(run.evidence.nodes)
        self._emit(events.NodeCheckFinished(count, len(out), run.round, now - run.began))
        rdzv.settle(now)
        for node_id, finding in out.items():
            self._leave_out(self.nodes[node_id], finding, now)
        return self._checking(now)

    def _leave_out(self, node: Node, finding: Finding, now: float) -> None:
        """Continue without a node that the check named."""
        if self._has_ended() or node.status.final:
            return
        reason = f"the node check names its {finding.component.value}: {finding.message}"
        node.excluded = True
        self._exclude(node, reason, now)
        if node.connected:
            self._send(inputs.Dismiss(node.id, excluded(node, reason)))
        self._lose(node.id, reason, now)
        if not (self._has_ended() or node.launched or self._enough_nodes()):
            living = sum(not n.status.final for n in self.nodes.values())
            self._end(
                ExitCode.INFRASTRUCTURE,
                f"node {node.id} is left out ({reason}), and only {living} of at least "
                f"{self.rendezvous.least.nodes} nodes remain.",
                now,
            )

    def _complete_round(self, now: float) -> None:
        rdzv = self.rendezvous
        for node_id in rdzv.missing:  # late; they are called to the next round when they join
            if self.nodes[node_id].status in (NodeStatus.RUNNING, NodeStatus.SUCCEEDED):
                self._move(self.nodes[node_id], NodeStatus.READY)
        ranks = {i: self.nodes[i].node_rank for i in rdzv.offers}
        self.worlds = rdzv.complete(ranks, self.restarts.count, self.autoscaling.batch)
        self.autoscaling.world_formed()
        self.adoption.over = True
        if self.steps or self.first_step >= 0:
            self.reached = self.first_step + self.steps if self.first_step >= 0 else -1
        self.earlier_steps += self.steps
        self.steps, self.first_step = 0, -1
        self.world_since = now
        for node_id in self.worlds:
            node = self.nodes[node_id]
            self._move(node, NodeStatus.RUNNING)
            node.has_run = True
            self.failed_starts.pop(node.node_rank, None)
            self._assign(node_id)
        some_world = next(iter(self.worlds.values()))
        self._emit(
            events.RoundCompleted(
                rdzv.round,
                some_world.node_count,
                some_world.world_size,
                now - rdzv.opened_at,
                some_world.servers,
            )
        )

    def _open_first_round(self, now: float) -> None:
        """Collect the nodes that come by themselves, or those that the platform starts."""
        launched = [n.id for n in self.nodes.values() if n.launched and not n.status.final]
        self.rendezvous.open(launched, fixed=bool(launched), now=now)
        self._emit_round_opened("the job starts")

    def _lose(self, node_id: int, reason: str, now: float) -> None:
        node = self.nodes[node_id]
        if node.status.final:
            return
        was_running = node.status is NodeStatus.RUNNING
        succeeded = node.status is NodeStatus.SUCCEEDED
        self.lost_at.pop(node_id, None)
        self.rendezvous.drop(node_id)
        self.adoption.forget(node_id)
        self._out += self.checks.lose(node_id, now)
        node.connected = False
        node.reason = reason
        if self.outcome is not None:
            self.scaling.leaving.pop(node_id, None)
            self._move(node, NodeStatus.RELEASED)
            return
        if node_id in self.scaling.leaving:
            self._release(node, reason)
            return
        if succeeded and not self.rendezvous.collecting:
            node.gone = True
            return
        self._bury(node)
        if was_running:
            self._node_fault(node, now)
        if self.outcome is None:
            self._replace(node, now)

    def _node_fault(self, node: Node, now: float) -> None:
        """Respond to the loss of a node of the world."""
        incident = self._begin_incident(now)
        incident.lost_nodes.append(loss_of(node, incident.round, now))
        goes_on = incident.decided or self._decide(incident, now)
        if goes_on and not self.rendezvous.collecting:
            self._open_round(f"node {node.id} was lost", now)

    def _begin_incident(self, now: float) -> Incident:
        old, round_ = self.incident, self.rendezvous.last_round
        if old is not None and old.round == round_:
            return old
        # A fault before the first step after another fault prolongs the interruption.
        self.incident = Incident(since=now if old is None else old.since, round=round_)
        return self.incident

    def _decide(self, incident: Incident, now: float) -> bool:
        """Ask the restart policy about an incident, once; return whether the job continues."""
        incident.decided = True
        # A report before the loss of a node can only echo the loss; otherwise it would be decided by now.
        if incident.hang and not incident.lost_nodes:
            return self._decide_hang(incident.hang, now)
        root = None if incident.lost_nodes else self.table.root_cause(incident.failures)
        failure = root if root is not None else incident.lost_nodes[0]
        verdict = self.table.diagnose(failure)
        first = max(self.first_step, *(f.first_step for f in incident.failures), -1)
        if root is not None and verdict.origin is Origin.USER:
            size = self.rendezvous.size
            back = self.autoscaling.failed(size, incident.round, verdict.title, now)
            self._rescale(*back, now)
            if back[0] or self.autoscaling.returning(size):
                reason = self.restarts.after_trial(verdict.title).reason
                self._emit(
                    events.RestartDecided(
                        self.restarts.count, reason, verdict.cause, Action.RESTART, root.node_id
                    )
                )
                return True
        node = self.nodes.get(failure.node_id)
        reached = first + self.steps if first >= 0 else -1
        cause = cause_of(failure, verdict, self.steps, now - self.world_since, reached)
        if node is not None and node.hostname:
            cause = msgspec.structs.replace(cause, host=node.hostname)
        decision = self.restarts.decide(cause, now)
        if isinstance(decision, Stop):
            self._end(decision.exit_code, decision.reason, now, root)
            return False
        if node is not None and decision.suspect == node.id:
            verdict = msgspec.structs.replace(verdict, action=Action.RELAUNCH)
        action = Action.RESTART if node is None else self._action(node, verdict, now)
        self._emit(
            events.RestartDecided(
                self.restarts.count, decision.reason, verdict.cause, action, failure.node_id
            )
        )
        if node is not None:
            self._act(node, action, verdict, now)
        if verdict.origin is Origin.INFRASTRUCTURE:
            self.checks.doubt({failure.node_id for failure in incident.failures})
        return True

    def _decide_hang(self, place: str, now: float) -> bool:
        decision = self.restarts.decide(hang_cause(place, self.steps), now)
        if isinstance(decision, Stop):
            self._end(decision.exit_code, decision.reason, now)
            return False
        self._emit(events.RestartDecided(self.restarts.count, decision.reason, "hang"))
        return True

    def _action(self, node: Node, verdict: Verdict, now: float) -> Action:
        """Return the action for a failure: what its verdict or its repetition asks for, if possible."""
        if node.status.final:
            return verdict.action
        action = self.faults.action(node.id, verdict, now)
        stays = not node.launched and not self._can_spare(node)
        return Action.RESTART if action is Action.RELAUNCH and stays else action

    def _act(self, node: Node, action: Action, verdict: Verdict, now: float) -> None:
        """Do what goes beyond a restart of all workers."""
        if action is Action.RESTART_FRESH:
            self.fresh = (node.id, self.rendezvous.last_round + 1)
        elif action is Action.RELAUNCH:
            self._exclude(node, verdict.title, now)
            self._give_up(node, verdict.title, now)
        elif action is Action.MORE_MEMORY and node.launched and self.job.grows_memory:
            if not self._may_grow(node):
                self._emit(events.MemoryBound(node.id, node.memory_factor))
                return
            node.memory_factor = self._bounded(MEMORY_GROWTH * node.memory_factor)
            self._give_up(node, verdict.title, now)

    # ---- invariants

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        invariants.check(self)


_AFTER_THE_END = (
    inputs.MasterStarted
    | inputs.NodePlaced
    | inputs.NodeExited
    | inputs.NodeConnected
    | inputs.NodeDisconnected
)
"""Inputs that still count after the job's end, since they show which nodes have yet to leave."""

_HANDLERS: dict[type, Callable[[JobMachine, Any, float], None]] = {
    inputs.Submitted: JobMachine._submitted,  # noqa: SLF001
    inputs.MasterStarted: JobMachine._master_started,  # noqa: SLF001
    inputs.NodePlaced: JobMachine._node_placed,  # noqa: SLF001
    inputs.NodeWaits: JobMachine._node_waits,  # noqa: SLF001
    inputs.NodeExited: JobMachine._node_exited,  # noqa: SLF001
    inputs.NodeConnected: JobMachine._node_connected,  # noqa: SLF001
    inputs.NodeDisconnected: JobMachine._node_disconnected,  # noqa: SLF001
    inputs.NodeSilent: JobMachine._node_silent,  # noqa: SLF001
    inputs.NodeJoined: JobMachine._node_joined,  # noqa: SLF001
    inputs.NodeChecked: JobMachine._node_checked,  # noqa: SLF001
    inputs.WorkerFailed: JobMachine._worker_failed,  # noqa: SLF001
    inputs.NodeSucceeded: JobMachine._node_succeeded,  # noqa: SLF001
    inputs.Progressed: JobMachine._progressed,  # noqa: SLF001
    inputs.Hung: JobMachine._hung,  # noqa: SLF001
    inputs.RankSpeed: JobMachine._rank_speed,  # noqa: SLF001
    inputs.SpeedMeasured: JobMachine._speed_measured,  # noqa: SLF001
    inputs.MemoryForecast: JobMachine._memory_forecast,  # noqa: SLF001
    inputs.ServersBusy: JobMachine._servers_busy,  # noqa: SLF001
    inputs.ScalePlanned: JobMachine._scale_planned,  # noqa: SLF001
    inputs.MigrateAsked: JobMachine._migrate_asked,  # noqa: SLF001
    inputs.StopRequested: JobMachine._stop_requested,  # noqa: SLF001
    inputs.ScaleAsked: JobMachine._scale_asked,  # noqa: SLF001
    inputs.DeadlinePassed: JobMachine._deadline_passed,  # noqa: SLF001
}
