"""The node check of a job: orders to the nodes, their reports, and the conclusion.

A check runs while a round collects: its nodes have joined and wait for their world. `nodecheck` pairs the
nodes and interprets the reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dlrover.master.machine import inputs
from dlrover.master.machine.checks import nodecheck
from dlrover.master.machine.checks.evidence import CheckEvidence, Trial, better
from dlrover.spec.check import (
    CheckFinding,
    CheckOrder,
    CheckReport,
    Component,
    FindingKind,
    ProbeResult,
    ProbeState,
)
from dlrover.spec.job import JobSpec
from dlrover.spec.world import Offer

ANSWER_GRACE = 15.0
"""Seconds after a round's time limit, which the nodes enforce themselves, in which reports may arrive."""


@dataclass
class CheckRun:
    """A check in progress."""

    number: int
    evidence: CheckEvidence
    began: float
    #: offers of the nodes, with the addresses where they meet
    offers: dict[int, Offer]
    round: int = 0
    round_began: float = 0.0
    #: orders to the nodes of this round
    orders: dict[int, CheckOrder] = field(default_factory=dict)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    #: answers to these orders
    reports: dict[int, CheckReport] = field(default_factory=dict)
    #: nodes whose answers are awaited; without any, the round is over
    missing: set[int] = field(default_factory=set)
    #: nodes lost during the check
    gone: set[int] = field(default_factory=set)
    #: True if spares are checked beside a world: a round that opens ends the check
    aside: bool = False
    #: notes on the nodes' clocks
    clocks: list[CheckFinding] = field(default_factory=list)


@dataclass
class Checks:
    """All checks of one job. Change it only through its methods."""

    job: JobSpec
    #: checks begun
    count: int = 0
    #: nodes that passed and need no further check before their next fault
    passed: set[int] = field(default_factory=set)
    run: CheckRun | None = None

    def due(self, nodes: Collection[int]) -> set[int]:
        """Return the nodes that have to be checked before they join a world."""
        return set(nodes) - self.passed if self.job.node_check else set()

    def doubt(self, nodes: Collection[int]) -> None:
        """Have these nodes checked again before they join another world, since they had a fault."""
        if self.job.limits.check_after_fault:
            self.passed -= set(nodes)

    def recheck(self, node: int) -> None:
        """Have a spare checked again just before it is used: its network may not have been tested."""
        self.passed.discard(node)

    def cancel(self) -> None:
        """End a check without a result."""
        self.run = None

    def deadline(self) -> float | None:
        """Return when the running round of a check times out; None without a check."""
        if self.run is None:
            return None
        return self.run.round_began + self.job.limits.check_timeout + ANSWER_GRACE

    def begin(
        self, nodes: Sequence[int], offers: Mapping[int, Offer], now: float, *, aside: bool = False
    ) -> list[inputs.Command]:
        """Check those of ``nodes``, given in order of rank, that are due; some of the others help."""
        due = [node for node in nodes if node not in self.passed]
        others = [node for node in nodes if node in self.passed]
        helpers = others[: max(2, len(due))]
        chosen = {*due, *helpers}
        taking_part = [node for node in nodes if node in chosen]
        self.count += 1
        self.run = CheckRun(
            number=self.count,
            evidence=CheckEvidence(tuple(taking_part), trusted=frozenset(helpers)),
            began=now,
            offers={node: offers[node] for node in taking_part},
            aside=aside,
        )
        return self._start_round(nodecheck.first_pairs(due, helpers), taking_part, now)

    def again(self, node: int) -> list[inputs.Command]:
        """Return the order for a node that has come back while its answer is awaited."""
        if self.run is None or node not in self.run.missing:
            return []
        return [inputs.Say(node, self.run.orders[node])]

    def take(self, node: int, report: CheckReport, now: float) -> list[inputs.Command]:
        """Record a report; it may open the next round."""
        run = self.run
        expected = run is not None and (report.check, report.round) == (run.number, run.round)
        if run is None or not expected or node not in run.missing:
            return []
        run.reports[node] = report
        run.missing.discard(node)
        run.clocks += _clock_notes(
            node, run.orders[node], report, now, self.job.limits.clock_offset
        )
        return self._go_on(now)

    def lose(self, node: int, now: float) -> list[inputs.Command]:
        """Remove a lost node; the trials that it took part in do not count."""
        self.passed.discard(node)
        if self.run is None or node not in self.run.offers:
            return []
        self.run.gone.add(node)
        self.run.missing.discard(node)
        return self._go_on(now)

    def time_out(self, now: float) -> list[inputs.Command]:
        """Record silent nodes as failed if the round's time is up."""
        deadline = self.deadline()
        if self.run is None or deadline is None or now < deadline:
            return []
        seconds = self.job.limits.check_timeout
        silent = ProbeResult(
            component=Component.AGENT,
            state=ProbeState.FAILED,
            message=f"it did not answer within {seconds:g} s",
        )
        for node in self.run.missing:
            order = self.run.orders[node]
            self.run.reports[node] = CheckReport(
                check=order.check, round=order.round, results=(silent,)
            )
        self.run.missing.clear()
        return self._go_on(now)

    def conclude(self) -> tuple[list[CheckFinding], dict[int, CheckFinding]] | None:
        """Return the findings of a completed check and the nodes to exclude; None while it runs."""
        run = self.run
        if run is None or run.orders:
            return None
        self.run = None
        found = nodecheck.findings(run.evidence, self.job.limits.straggler_ratio) + run.clocks
        found = [f for f in found if not set(f.nodes) <= run.gone]
        out = nodecheck.left_out(found, stragglers=self.job.exclude_stragglers)
        self.passed |= set(run.evidence.nodes) - out.keys() - run.gone
        return found, {node: finding for node, finding in out.items() if node not in run.gone}

    # ---- rounds

    def _start_round(
        self, groups: list[tuple[int, ...]], local: Collection[int], now: float
    ) -> list[inputs.Command]:
        """Start a round for these pairs; the nodes in ``local`` check their own parts, too."""
        run = self.run
        assert run is not None
        run.round += 1
        run.round_began = now
        pairs = [group for group in groups if len(group) > 1]
        local = set(local)
        alone = local.difference(*pairs)
        run.groups = [*pairs, *((node,) for node in run.evidence.nodes if node in alone)]
        run.reports = {}
        run.orders = {
            node: self._order(group, node in local, now) for group in run.groups for node in group
        }
        run.missing = set(run.orders)
        return [inputs.Say(node, order) for node, order in run.orders.items()]

    def _order(self, group: tuple[int, ...], local: bool, now: float) -> CheckOrder:
        run = self.run
        assert run is not None
        meeting = run.offers[group[0]]
        return CheckOrder(
            check=run.number,
            round=run.round,
            seconds=self.job.limits.check_timeout,
            local=local,
            members=group,
            store_addr=meeting.addr,
            store_port=meeting.store_port,
            sent_at=now,
        )

    def _go_on(self, now: float) -> list[inputs.Command]:
        """Open the next round or end the check, unless answers are awaited."""
        run = self.run
        assert run is not None
        if run.missing or not run.orders:
            return []
        evidence = run.evidence
        for node, report in run.reports.items():
            own = tuple(r for r in report.results if r.component is not Component.NETWORK)
            evidence.local[node] = better(evidence.local.get(node, ()), own)
        pairs = [group for group in run.groups if len(group) == 2 and not set(group) & run.gone]
        evidence.trials += [trial((a, b), run.reports[a], run.reports[b]) for a, b in pairs]
        evidence.nodes = tuple(node for node in evidence.nodes if node not in run.gone)
        run.orders = {}
        if run.round < self.job.limits.check_rounds:
            ratio = self.job.limits.straggler_ratio
            groups = nodecheck.next_pairs(evidence, ratio)
            # Repeated once, since a part may have been busy; the better figure counts.
            slow = nodecheck.slow_parts(evidence, ratio) if run.round == 1 else set()
            if groups or slow:
                return self._start_round(groups, slow, now)
        return []

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        run = self.run
        if run is None:
            return
        assert self.job.node_check, "a check of a job without checks"
        members = [node for group in run.groups for node in group]
        assert len(members) == len(set(members)), "a node is in two groups"
        assert run.reports.keys() <= set(members), "a report of a node without a group"
        assert 1 <= run.round <= max(1, self.job.limits.check_rounds)
        assert not run.orders or run.missing, "a round without an end"
        assert run.missing == run.orders.keys() - run.reports.keys() - run.gone


def trial(pair: tuple[int, int], first: CheckReport, second: CheckReport) -> Trial:
    """Combine the two nodes' results on the network between them."""
    results = [_network(first), _network(second)]
    failed = [r.message for r in results if r is not None and r.state is ProbeState.FAILED]
    if None in results:
        return Trial(pair, failed=(failed or ["a node did not take part"])[0])
    if failed:
        return Trial(pair, failed=failed[0] or "it failed")
    times = [r.slowness for r in results if r is not None]
    return Trial(pair, slowness=max(times) if all(times) else 0.0)


def _network(report: CheckReport) -> ProbeResult | None:
    return next((r for r in report.results if r.component is Component.NETWORK), None)


def _clock_notes(
    node: int, order: CheckOrder, report: CheckReport, now: float, limit: float
) -> list[CheckFinding]:
    """Return a note if a node's clock is off, from the four times of an order and its answer, as in NTP."""
    if not order.local or not report.received_at:
        return []
    offset = (report.received_at - order.sent_at + report.sent_at - now) / 2
    uncertain = (now - order.sent_at - (report.sent_at - report.received_at)) / 2
    if abs(offset) - max(0.0, uncertain) <= limit:
        return []
    word = "ahead of" if offset > 0 else "behind"
    message = f"it is {abs(offset):.1f} s {word} the master's"
    return [CheckFinding(FindingKind.NOTE, (node,), Component.CLOCK, message)]
