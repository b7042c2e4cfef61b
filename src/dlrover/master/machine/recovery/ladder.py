"""The ladder of responses to a fault: the first rung that applies is taken, and the event says which.

The restart policy (`restarts`) decides before that whether the job goes on at all: a hopeless failure, no progress
or a spent budget ends it. The budgets are ``max_restarts`` for the program's failures, otherwise
``max_infrastructure_restarts`` per ``restart_window``, and ``cause_budgets`` for single causes in addition. Faults
that repeat on one node (``node_fault_limit``) make the node leave, which takes the job to the rungs below NODE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.instances import Instances
from dlrover.master.machine.recovery.restarts import Restart, RestartCause, Stop
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.scaling.resizer import Resizer
from dlrover.master.machine.state import JobState, Node
from dlrover.spec import events
from dlrover.spec.failure import Action, Rung, Verdict

MEMORY_GROWTH = 2.0
"""Memory multiplier for the successor of a node killed for lack of memory, if the platform supports it."""


class FaultFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice of a rung depends on."""

    action: Action
    """Sufficient action after the failure, and after those before it on the node."""
    leaves: bool
    """True if the node is lost, or is given up."""
    survives: bool = False
    """True if the processes that are well can go on."""
    spare: bool = False
    """True if a spare is ready to take the node's place."""
    launched: bool = True
    """True if the platform launches another node in its place."""
    enough: bool = False
    """True if the other nodes are enough for a world."""


LADDER: dict[Rung, Callable[[FaultFacts], bool]] = {
    Rung.IN_PROCESS: lambda f: f.survives,
    Rung.PROCESS: lambda f: not f.leaves and f.action is not Action.RESTART_FRESH,
    Rung.NODE: lambda f: not f.leaves,
    Rung.SPARE: lambda f: f.spare,
    Rung.ELSEWHERE: lambda f: f.launched or not f.enough,
    Rung.SMALLER: lambda f: f.enough,
}
"""The rungs and when each applies, the cheapest first. Below the last one, the job ends."""


def choose(facts: FaultFacts) -> Rung:
    """Return the first rung that applies; `Rung.END` if none does."""
    return next((rung for rung, applies in LADDER.items() if applies(facts)), Rung.END)


@dataclass
class Ladder:
    """Chooses what becomes of a node after a fault, and carries out what goes beyond a restart of its workers."""

    state: JobState = field(compare=False, repr=False)
    fleet: Fleet = field(compare=False, repr=False)
    rounds: Rounds = field(compare=False, repr=False)
    resizer: Resizer = field(compare=False, repr=False)
    instances: Instances = field(compare=False, repr=False)

    def ask(
        self,
        cause: RestartCause,
        root: events.WorkerFailed | None,
        now: float,
        verdict: Verdict | None = None,
    ) -> Restart | None:
        """Return the restart that the policy grants; end the job, because of ``root``, if it grants none.

        ``verdict``: that on a hang, which has no root.
        """
        decision = self.state.restarts.decide(cause, now)
        if isinstance(decision, Stop):
            self.state.end(decision.exit_code, decision.reason, now, root, verdict)
            return None
        return decision

    def action(self, node: Node, decision: Restart, verdict: Verdict, now: float) -> Action:
        """Return the action for a fault: what its verdict or its repetition asks for, if possible."""
        if decision.suspect == node.id:
            verdict = msgspec.structs.replace(verdict, action=Action.RELAUNCH)
        if node.status.final:
            return verdict.action
        action = self.state.faults.action(node.id, verdict, now)
        stays = not node.launched and not self.fleet.is_enough(without=node)
        return Action.RESTART if action is Action.RELAUNCH and stays else action

    def _grows(self, node: Node, action: Action) -> bool:
        """Return whether another node is to take the place of one with more memory."""
        return action is Action.MORE_MEMORY and node.launched and self.state.job.grows_memory

    def leaves(self, node: Node, action: Action) -> bool:
        """Return whether a node is lost, or is given up by ``action``."""
        grows = self._grows(node, action) and self.resizer.may_grow(node)
        return node.status.final or action is Action.RELAUNCH or grows

    def emit(
        self,
        decision: Restart,
        report: events.WorkerFailed,
        action: Action,
        now: float,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Emit which rung is taken after a failure; ``ranks`` start again if the others go on."""
        state, node_id, cause = self.state, report.failure.node_id, report.verdict.cause
        rung, successor = Rung.PROCESS, -1
        if node_id in state.nodes:
            rung, successor = self._rung(state.nodes[node_id], action, now, bool(ranks))
        count, reason = state.restarts.count, decision.reason
        state.emit(
            events.RestartDecided(count, reason, cause, action, node_id, rung, successor, ranks)
        )

    def _rung(self, node: Node, action: Action, now: float, survives: bool) -> tuple[Rung, int]:
        """Return the rung, and the spare that takes the node's place at once or -1."""
        leaves, spare = self.leaves(node, action), -1
        if leaves and not survives and not self._grows(node, action):
            gives_up = action is Action.RELAUNCH
            spare = self.fleet.spare_for(node, now, on_its_host=not gives_up)
        facts = FaultFacts(
            action=action,
            leaves=leaves,
            survives=survives,
            spare=spare >= 0,
            launched=node.launched,
            enough=leaves and not survives and self.fleet.is_enough(without=node),
        )
        return choose(facts), spare

    def act(self, node: Node, action: Action, title: str, now: float) -> None:
        """Do what goes beyond a restart of workers, because of a failure with this title."""
        fleet = self.fleet
        match action:
            case Action.RESTART_FRESH if self.state.is_instance(node):
                self.instances.fresh.add(node.id)
            case Action.RESTART_FRESH:
                self.rounds.fresh = (node.id, self.state.rendezvous.next_round)
            case Action.RELAUNCH:
                fleet.exclude(node, title, now)
                fleet.give_up(node, title, now)
            case Action.MORE_MEMORY if self._grows(node, action):
                if not self.resizer.may_grow(node):
                    self.state.emit(events.MemoryBound(node.id, node.memory_factor))
                    return
                node.memory_factor = self.resizer.bounded(MEMORY_GROWTH * node.memory_factor)
                fleet.give_up(node, title, now)
