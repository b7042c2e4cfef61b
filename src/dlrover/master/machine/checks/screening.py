"""Which nodes are checked before they join a world, and what becomes of those that a check names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrover.errors import ExitCode
from dlrover.master.machine import inputs
from dlrover.master.machine.fleet import Fleet
from dlrover.master.machine.recovery.recovery import Recovery
from dlrover.master.machine.recovery.survival import Survival
from dlrover.master.machine.rounds import Rounds
from dlrover.master.machine.state import JobState, Node, excluded
from dlrover.spec import events
from dlrover.spec.check import CheckFinding


@dataclass
class Screening:
    """Begins the checks of a job and acts on their findings; its state is the `Checks` of the `JobState`."""

    state: JobState = field(compare=False, repr=False)
    fleet: Fleet = field(compare=False, repr=False)
    rounds: Rounds = field(compare=False, repr=False)
    survival: Survival = field(compare=False, repr=False)
    recovery: Recovery = field(compare=False, repr=False)

    def run(self, now: float) -> bool:
        """Check nodes that are due before their world is formed; return whether a check is under way.

        After a check, the job continues without the nodes that it names, or it ends.
        """
        state, rdzv, checks = self.state, self.state.rendezvous, self.state.checks
        if state.has_ended():
            return False
        if rdzv.collecting and checks.run is not None and checks.run.aside:
            checks.cancel()  # a round has opened
        if checks.run is None:
            return self._begin_check(now)
        run, conclusion = checks.run, checks.conclude()
        if conclusion is None:
            return not run.aside
        found, out = conclusion
        state.emit(*_findings(found, out))
        count = len(run.evidence.nodes)
        state.emit(events.NodeCheckFinished(count, len(out), run.round, now - run.began))
        if not run.aside:
            rdzv.settle(now)
        for node_id, finding in out.items():
            self._leave_out(state.nodes[node_id], finding, now)
        self.survival.fill_holes()
        return self.run(now)

    def _begin_check(self, now: float) -> bool:
        """Check the joined nodes that are due; return whether there are any."""
        state, rdzv, checks = self.state, self.state.rendezvous, self.state.checks
        incident = state.incident
        ready = rdzv.ready(now)
        if ready and incident is not None and not incident.decided:
            # The decision may exclude one of the nodes.
            ready = self.recovery.decide(incident, now) and rdzv.ready(now)
        due = checks.due(rdzv.offers) if ready else set()
        if not due:
            self._check_spares(now)
            return False
        again = "it is new, or had a fault" if len(due) == 1 else "they are new, or had faults"
        reason = again if rdzv.members else "the job starts"
        state.emit(events.NodeCheckStarted(len(due), reason))
        ranks = {i: state.nodes[i].node_rank for i in rdzv.offers}
        state.send(*checks.begin(rdzv.in_order(ranks), rdzv.offers, now))
        return True

    def _check_spares(self, now: float) -> None:
        """Check new spares, and nodes that are to take lost ones' places, while the world trains."""
        state, rdzv, checks = self.state, self.state.rendezvous, self.state.checks
        if rdzv.collecting or state.adoption.pending or not state.job.node_check:
            return
        fitting = self.rounds.fitting()
        offers = state.spares.offers | {i: rdzv.offers[i] for i in state.spares.standing} | fitting
        due = checks.due(offers)
        if due:
            reason = "it is a spare" if len(due) == 1 else "they are spares"
            if due & fitting.keys():
                reason = "a lost node is to be replaced"
            state.emit(events.NodeCheckStarted(len(due), reason))
            state.send(*checks.begin(sorted(offers), offers, now, aside=True))

    def _leave_out(self, node: Node, finding: CheckFinding, now: float) -> None:
        """Continue without a node that the check named."""
        state, fleet = self.state, self.fleet
        if state.has_ended() or node.status.final:
            return
        reason = f"the node check names its {finding.component.value}: {finding.message}"
        node.excluded = True
        fleet.exclude(node, reason, now)
        if node.connected:
            state.send(inputs.Say(node.id, excluded(node, reason)))
        self.recovery.lose(node.id, reason, now)
        if state.has_ended() or node.launched or not state.rendezvous.collecting:
            return  # another node comes, or a world trains without it
        if not fleet.may_be_enough():
            living = sum(not n.status.final for n in state.nodes.values())
            state.end(
                ExitCode.INFRASTRUCTURE,
                f"node {node.id} is left out ({reason}), and only {living} of at least "
                f"{state.rendezvous.least.nodes} nodes remain.",
                now,
            )


def _findings(
    found: Sequence[CheckFinding], out: Mapping[int, CheckFinding]
) -> list[events.NodeCheckFinding]:
    """Return the events of a completed check: each finding and the nodes excluded for it."""
    return [
        events.NodeCheckFinding(
            finding.kind,
            finding.nodes,
            finding.component,
            finding.message,
            tuple(node for node in finding.nodes if out.get(node) is finding),
        )
        for finding in found
    ]
