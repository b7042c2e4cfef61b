"""What a job waits for, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.spec.node import NodeStatus

if TYPE_CHECKING:
    from dlrover.master.machine.checks.checking import CheckRun
    from dlrover.master.machine.job import JobMachine
    from dlrover.master.machine.rendezvous import Rendezvous
    from dlrover.master.machine.state import Node

NODES_NAMED = 5
"""Maximum number of nodes that are named; the rest are counted."""


def waiting_for(machine: JobMachine, now: float) -> str:
    """Return what the job waits for, how long it has waited and the limit; empty if it does not wait."""
    rdzv, adoption = machine.rendezvous, machine.adoption
    if machine.outcome is None and adoption.pending:
        limit = (adoption.deadline or now) - adoption.began_at
        waited = f"{now - adoption.began_at:.0f} s of {limit:.0f} s"
        return f"the master has no journal and asks its nodes what runs: {waited}; {adoption.summary()}"
    if machine.outcome is not None or not rdzv.collecting:
        return ""
    if machine.checks.run is not None:
        return _checking(machine.checks.run, machine, now)
    limit = (rdzv.deadline() or now) - rdzv.opened_at
    waited = f"{now - rdzv.opened_at:.0f} s of {limit:.0f} s"
    joined = len(rdzv.offers)
    if rdzv.missing:
        missing = [machine.nodes[i] for i in sorted(rdzv.missing)]
        named = ", ".join(
            f"node {node.id} ({'is leaving' if node.id in rdzv.leaving else _state_of(node)})"
            for node in missing[:NODES_NAMED]
        )
        rest = len(missing) - NODES_NAMED
        more = f" and {rest} more" if rest > 0 else ""
        return f"waiting for {named}{more}: {waited}; {joined} joined"
    return _joining(rdzv, waited)


def too_few(machine: JobMachine) -> str:
    """Return why a round failed that did not get enough nodes in time."""
    rdzv, limit = machine.rendezvous, machine.job.limits.join_timeout
    why = _obstacle(machine)
    if rdzv.most.servers:
        there, least = rdzv.joined.by_role(), rdzv.least.by_role()
        return (
            f"only {there} of at least {least} joined round {rdzv.round} within {limit:g} s "
            f"(join_timeout).{why}"
        )
    return (
        f"only {len(rdzv.offers)} of at least {rdzv.least.nodes} nodes joined round {rdzv.round} within "
        f"{limit:g} s (join_timeout).{why}"
    )


def _obstacle(machine: JobMachine) -> str:
    """Return what keeps the first node from starting that its platform knows a reason of, as a sentence."""
    for node in machine.nodes.values():
        if node.status is NodeStatus.PENDING and node.waits:
            return f" Node {node.id}: {node.waits.rstrip('.')}."
    return ""


def _joining(rdzv: Rendezvous, waited: str) -> str:
    joined, least, most = rdzv.joined, rdzv.least, rdzv.most
    enough = rdzv.usable(joined).nodes > 0
    if most.servers:
        wanted = most if enough else least
        return f"waiting for {wanted.by_role()}; {joined.by_role()} joined: {waited}"
    if not enough:
        return f"waiting for {least.nodes} nodes, {joined.nodes} joined: {waited}"
    return f"{joined.nodes} of at most {most.nodes} nodes joined; waiting for more: {waited}"


def _checking(run: CheckRun, machine: JobMachine, now: float) -> str:
    limits = machine.job.limits
    waited = f"{now - run.round_began:.0f} s of {limits.check_timeout:.0f} s"
    awaited = sorted(run.missing)
    named = ", ".join(map(str, awaited[:NODES_NAMED]))
    more = f" and {len(awaited) - NODES_NAMED} more" if len(awaited) > NODES_NAMED else ""
    return (
        f"checking nodes, round {run.round} of at most {limits.check_rounds}: {waited}; "
        f"no answer yet from {named}{more}"
    )


def _state_of(node: Node) -> str:
    if node.status is NodeStatus.PENDING:
        return node.waits or "is being started"
    if not node.connected:
        return "has no connection"
    return "is joining" if node.status is NodeStatus.READY else "is stopping its workers"
