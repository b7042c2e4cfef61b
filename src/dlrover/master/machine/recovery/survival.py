"""The response to losses that stop no other rank: the ranks that are left go on, the lost ones start again.

The world, its round and its ranks stay; a node that is given up because of its faults is lost with all its ranks.
Where no other rank trains, after a mistake of the program, and in a job without ``survive``, the loss is an incident
like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover.master.machine import inputs
from dlrover.master.machine.recovery.incident import Incident
from dlrover.master.machine.recovery.ladder import Ladder
from dlrover.master.machine.recovery.restarts import Restart, Stop, cause_of
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.state import JobState, Node, loss_of
from dlrover.rpc.messages import StartAgain
from dlrover.spec import events
from dlrover.spec.failure import Action, Origin
from dlrover.spec.requests.membership import Members, MembershipChange
from dlrover.spec.world import Holding


@dataclass
class Survival:
    """Goes on without lost ranks; its state is the `Membership` of the `JobState`."""

    state: JobState = field(compare=False, repr=False)
    rounds: Rounds = field(compare=False, repr=False)
    ladder: Ladder = field(compare=False, repr=False)

    # ---- losses

    def without_worker(self, report: events.WorkerFailed, now: float) -> bool:
        """Go on without a failed worker and start it again; return False if that is not possible."""
        state, failure, verdict = self.state, report.failure, report.verdict
        membership = state.membership
        if not membership.survives_worker(failure.node_id, failure.local_rank):
            return False
        if verdict.hopeless or (verdict.origin is Origin.USER and not verdict.echo):
            return False  # the others run the same program
        if verdict.cause == "cannot_join":
            return False  # another attempt would come to the same place
        state.emit(report)
        incident = self._incident(now)
        incident.add(report)
        decision = self._decide(report, now)
        if decision is None:
            return True
        node = state.nodes[failure.node_id]
        action = self.ladder.action(node, decision, verdict, now)
        if self.ladder.leaves(node, action):
            self._give_up(node, decision, report, action, now)
            return True
        attempt = membership.lose_worker(failure.id, failure.node_id, failure.local_rank)
        self.ladder.emit(decision, report, action, now, (failure.rank,))
        self.ladder.act(node, action, verdict.title, now)
        fresh = action is Action.RESTART_FRESH
        self._say(failure.node_id, StartAgain(failure.round, {failure.local_rank: attempt}, fresh))
        self._tell()
        return True

    def _give_up(
        self,
        node: Node,
        decision: Restart,
        report: events.WorkerFailed,
        action: Action,
        now: float,
    ) -> None:
        """Go on without a node that is still there; open a round if no other node's rank trains."""
        state, membership, title = self.state, self.state.membership, report.verdict.title
        if membership.survives_node(node.id):
            ranks = tuple(membership.ranks[node.id])
            membership.lose_node(node.id, self.rounds.worlds[node.id])
            self.ladder.emit(decision, report, action, now, ranks)
            self.ladder.act(node, action, title, now)
            self._tell()
            return
        state.incident = Incident(since=now, round=membership.round, decided=True)
        state.incident.add(report)
        self.ladder.emit(decision, report, action, now)
        self.ladder.act(node, action, title, now)
        if not state.has_ended():
            self.rounds.open(title, now)

    def without_node(self, node: Node, now: float) -> bool:
        """Go on without a lost node; return False if that is not possible."""
        membership = self.state.membership
        if not membership.survives_node(node.id):
            return False
        report = self.state.table.failed(loss_of(node, membership.round, now))
        incident = self._incident(now)
        if incident.lost_node is None:
            incident.lost_node = report
        decision = self._decide(report, now)
        if decision is None:
            return True
        ranks = tuple(membership.ranks[node.id])
        membership.lose_node(node.id, self.rounds.worlds[node.id])
        self.ladder.emit(decision, report, Action.RESTART, now, ranks)
        self._tell()
        return True

    def _incident(self, now: float) -> Incident:
        """Return the open incident of the ranks that are away, or open one."""
        state, old = self.state, self.state.incident
        if old is None or not old.survived or old.round != state.membership.round:
            since, steps = now if old is None else old.since, state.progress.steps
            state.incident = Incident(
                since, state.membership.round, decided=True, survived=True, steps=steps
            )
            return state.incident
        old.steps = state.progress.steps
        return old

    def _decide(self, report: events.WorkerFailed, now: float) -> Restart | None:
        """Ask the restart policy; end the job and return None if it grants nothing."""
        state = self.state
        cause = cause_of(
            report.failure, report.verdict, state.progress.steps, now - self.rounds.since
        )
        decision = state.restarts.decide(cause, now)
        if isinstance(decision, Stop):
            state.end(decision.exit_code, decision.reason, now, report)
            return None
        return decision

    # ---- returns

    def report(self, change: MembershipChange) -> None:
        """Take a rank's report: it is ready to train with the others, or has finished."""
        membership = self.state.membership
        away = change.rank not in membership.attempts
        if not membership.report(change):
            return
        if away and change.rank in membership.attempts:
            self.state.emit(events.ReplicaJoined(change.rank, len(membership.attempts)))
            if self.state.incident is not None and self.state.incident.survived:
                self.state.incident.steps = self.state.progress.steps
        self._tell()

    def succeed(self, node_id: int) -> None:
        """Note that all workers of a node have ended well, so that no rank trains on without it."""
        if self.state.membership.succeed(node_id):
            self._tell()

    def fill_holes(self) -> None:
        """Let nodes that have joined take the places of lost ones."""
        if not self.state.membership.holes:
            return
        for node_id in self.rounds.fill_holes():
            self._say(node_id, self.state.membership.members(self.state.progress.steps))

    def learn(self, node: Node, held: Holding, now: float) -> None:
        """Take in what a node knows and the journal does not: a crash of its machine may lose its last moments."""
        membership = self.state.membership
        if node.id not in membership.ranks or not membership.learn(node.id, held):
            return
        if membership.attempts or membership.over:
            self._tell()
        else:
            self.rounds.open("the master has lost who trains", now)

    def catch_up(self, node: Node) -> None:
        """Repeat the orders that a node may have missed while it was disconnected."""
        membership = self.state.membership
        if node.id not in membership.ranks:
            return
        again = membership.out_of(node.id)
        if again:
            self._say(node.id, StartAgain(membership.round, again))
        self._say(node.id, membership.members(self.state.progress.steps))

    # ---- orders

    def _tell(self) -> None:
        """Tell all nodes who trains."""
        membership = self.state.membership
        members = membership.members(self.state.progress.steps)
        for node_id in membership.ranks:
            self._say(node_id, members)

    def _say(self, node_id: int, message: StartAgain | Members) -> None:
        if self.state.nodes[node_id].connected:
            self.state.send(inputs.Say(node_id, message))
