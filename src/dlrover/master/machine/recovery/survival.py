"""The response to losses that stop no other rank: the ranks that are left go on, the lost ones start again.

A row of ranks that have one replica together is lost with any of them. The world, its round and its ranks stay; a node
that is given up because of its faults is lost with all its ranks.
Where no other rank trains, after a mistake of the program, and in a job without ``survive``, the loss is an incident
like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dlrover.master.machine import inputs
from dlrover.master.machine.recovery.incident import Incident
from dlrover.master.machine.recovery.ladder import Ladder
from dlrover.master.machine.recovery.restarts import Restart, cause_of
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.state import JobState, Node, loss_of
from dlrover.rpc.messages import StartAgain
from dlrover.spec import events
from dlrover.spec.failure import Action, FailureKind, Origin
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
        if membership.active and 0 <= failure.attempt < membership.latest.get(failure.rank, 0):
            membership.seen.add(failure.id)
            state.emit(report)  # its row was lost before, and it has been ordered to start again
            return True
        if not membership.survives_worker(failure.node_id, failure.local_rank):
            return False
        if verdict.hopeless or (verdict.origin is Origin.USER and not verdict.echo):
            return False  # the others run the same program
        if verdict.cause == "cannot_join":
            return False  # another attempt would come to the same place
        self._start_without(report, now)
        return True

    def _start_without(self, report: events.WorkerFailed, now: float) -> None:
        state, failure, verdict = self.state, report.failure, report.verdict
        membership = state.membership
        state.emit(report)
        same = self._is_same(report)
        incident = self._incident(now)
        incident.add(report)
        incident.killed.add(failure.rank)
        decision = self._decide(report, now, same=same)
        if decision is None:
            return
        node = state.nodes[failure.node_id]
        action = self.ladder.action(node, decision, verdict, now)
        if self.ladder.leaves(node, action):
            self._give_up(node, decision, report, action, now)
            return
        row = membership.lose_worker(failure.id, failure.node_id, failure.local_rank)
        self.ladder.emit(decision, report, action, now, tuple(row))
        self.ladder.act(node, action, verdict.title, now)
        self._tell(failure.node_id if action is Action.RESTART_FRESH else -1)

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
            ranks = membership.lose_node(node.id, self.rounds.worlds[node.id])
            self.ladder.emit(decision, report, action, now, tuple(ranks))
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
        same = self._is_same(report)
        incident = self._incident(now)
        incident.cut_off.update(membership.ranks[node.id])
        if incident.lost_node is None:
            incident.lost_node = report
        decision = self._decide(report, now, same=same)
        if decision is None:
            return True
        ranks = membership.lose_node(node.id, self.rounds.worlds[node.id])
        self.ladder.emit(decision, report, Action.RESTART, now, tuple(ranks))
        self._tell()
        return True

    @property
    def _is_open(self) -> bool:
        """True while ranks of this membership are away."""
        old = self.state.incident
        return old is not None and old.survived and old.round == self.state.membership.round

    def _incident(self, now: float) -> Incident:
        """Return the open incident of the ranks that are away, or open one."""
        state, old = self.state, self.state.incident
        if old is None or not self._is_open:
            since, steps = now if old is None else old.since, state.progress.steps
            state.incident = Incident(
                since, state.membership.round, decided=True, survived=True, steps=steps
            )
            return state.incident
        old.steps = state.progress.steps
        return old

    def _is_same(self, report: events.WorkerFailed) -> bool:
        """Return whether a loss belongs to the open incident's fault: many may be lost at once, as with their switch.

        A rank's process and its node are each part of it once: a node that is asked to stop ends its processes first.
        """
        incident, failure, verdict = self.state.incident, report.failure, report.verdict
        outside = verdict.origin is Origin.INFRASTRUCTURE and not verdict.hopeless
        if incident is None or not self._is_open or not outside:
            return False
        if failure.kind is FailureKind.NODE:
            return incident.cut_off.isdisjoint(self.state.membership.ranks[failure.node_id])
        return failure.rank not in incident.killed and failure.rank not in incident.cut_off

    def _decide(
        self, report: events.WorkerFailed, now: float, *, same: bool = False
    ) -> Restart | None:
        """Ask the restart policy, unless it is the same fault; end the job and return None if it grants nothing."""
        if same:
            return Restart(report.verdict.title)
        state = self.state
        failure = report.failure
        # The others' steps are no progress of a rank that fails again and again.
        steps = failure.steps or state.progress.steps
        cause = cause_of(failure, report.verdict, steps, now - self.rounds.since)
        if failure.attempt >= 0:
            on_way = failure.attempt > 0 and not failure.steps
            cause = msgspec.structs.replace(cause, rank=failure.rank, on_way=on_way)
        return self.ladder.ask(cause, report, now)

    # ---- returns

    def report(self, change: MembershipChange, now: float) -> None:
        """Take a rank's report: it is ready to train with the others, has finished, or is one of a row."""
        membership = self.state.membership
        row = membership.row_of(change.rank)
        away = [rank for rank in row if rank not in membership.attempts]
        if not membership.report(change):
            return
        joined = [rank for rank in away if rank in membership.attempts]
        self.state.emit(*(events.ReplicaJoined(r, len(membership.attempts)) for r in joined))
        if joined and self.state.incident is not None and self.state.incident.survived:
            self.state.incident.steps = self.state.progress.steps
        self._go_on("no replica is whole", now)

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
        self._order()

    def learn(self, node: Node, held: Holding, now: float) -> None:
        """Take in what a node knows and the journal does not: a crash of its machine may lose its last moments."""
        membership = self.state.membership
        if node.id not in membership.ranks or not membership.learn(node.id, held):
            return
        self._go_on("the master has lost who trains", now)

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

    def _go_on(self, reason: str, now: float) -> None:
        """Tell all nodes which ranks train; open a round if none does."""
        membership = self.state.membership
        if membership.attempts or membership.over:
            self._tell()
        else:
            self.rounds.open(reason, now)

    def _order(self, fresh: int = -1) -> None:
        """Order ranks to start again, on one node from processes that have loaded nothing."""
        membership = self.state.membership
        for node_id, attempts in membership.take_due().items():
            self._say(node_id, StartAgain(membership.round, attempts, node_id == fresh))

    def _tell(self, fresh: int = -1) -> None:
        """Order lost ranks to start again, and tell all nodes which ranks train."""
        self._order(fresh)
        self.state.send(inputs.TellMembers())

    def _say(self, node_id: int, message: StartAgain | Members) -> None:
        if self.state.nodes[node_id].connected:
            self.state.send(inputs.Say(node_id, message))
