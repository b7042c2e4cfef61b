"""Pairing of nodes in a node check, and its verdict on them: pure functions.

Each node checks its own parts alone. The network is checked in pairs, and a failed pair does not show which
of its two nodes is at fault. Assumptions about faults:

- a fault of a node's own part fails its own probe; it may also fail the pairs of the node;
- a fault of a node's network fails every pair of the node;
- a fault of a link fails the pair of the two nodes that it joins; no two broken links share a node;
- slow parts are compared across nodes, slow pairs across pairs. Slowness is relative: there is no verdict if
  half of the nodes or more are equally slow.

So a node of a passed pair is sound, a node that failed with two sound nodes is at fault, and a failed pair of
two sound nodes is a broken link. The first round pairs neighbours. Further rounds pair doubtful nodes with
sound ones, the slowest with the fastest. What cannot be decided is reported as such.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence

from dlrover.master.machine.checks.evidence import (
    CheckEvidence,
    Standing,
    Trial,
    named,
    standing,
)
from dlrover.spec.check import CheckFinding, Component, FindingKind, ProbeResult, ProbeState

JUDGED_BY_SPEED = (Component.DEVICE, Component.MEMORY)
"""Parts by which a node is judged slow. A disk is shared with others, so its speed is only shown."""


# ---- the verdict


def findings(evidence: CheckEvidence, ratio: float) -> list[CheckFinding]:
    """Return the findings of the evidence; a node without a finding is sound as far as it was checked.

    ``ratio`` is the multiple of the median above which a part or a pair is slow.
    """
    broken = _broken_parts(evidence)
    faulty = {node for finding in broken for node in finding.nodes}
    reach = _reach(evidence, faulty)
    speed = _speed(evidence, ratio)
    return [
        *broken,
        *_network_faults(evidence, reach),
        *_doubts(evidence, faulty, reach),
        *_slow_parts(evidence, faulty | reach.guilty, ratio),
        *_slow_network(evidence, faulty | reach.guilty, reach, speed),
    ]


def left_out(found: Sequence[CheckFinding], *, stragglers: bool) -> dict[int, CheckFinding]:
    """Return the nodes to exclude, each with the reason.

    For a broken link, the node with the higher number is excluded; the other one works with all that remain.
    If one of several nodes is at fault, all of them are excluded. A node that was only not tested stays.
    """
    out: dict[int, CheckFinding] = {}
    kinds = (
        FindingKind.FAULT,
        FindingKind.UNDETERMINED,
        *((FindingKind.SLOW,) if stragglers else ()),
    )
    for finding in found:
        if finding.kind in kinds:
            out.update({node: finding for node in finding.nodes if node not in out})
    for finding in found:
        if finding.kind is FindingKind.LINK and not out.keys() & set(finding.nodes):
            out[max(finding.nodes)] = finding
    return out


def slow_parts(evidence: CheckEvidence, ratio: float) -> set[int]:
    """Return the nodes with a slow part."""
    broken = {node for finding in _broken_parts(evidence) for node in finding.nodes}
    return named(_slow_parts(evidence, broken, ratio), FindingKind.SLOW)


def _broken_parts(evidence: CheckEvidence) -> list[CheckFinding]:
    return [
        CheckFinding(FindingKind.FAULT, (node,), result.component, _told(result))
        for node in evidence.nodes
        for result in evidence.local.get(node, ())
        if result.state is ProbeState.FAILED
    ]


def _told(result: ProbeResult) -> str:
    return f"{result.name}: {result.message}" if result.name else result.message


def _reach(evidence: CheckEvidence, faulty: Collection[int]) -> Standing:
    """Evaluate the network trials; ignore failed trials with a broken node, since they say nothing."""
    trials, known = evidence.trials, set(faulty)
    bad = [t.nodes for t in trials if t.failed and known.isdisjoint(t.nodes)]
    good = [t.nodes for t in trials if not t.failed]
    return standing(bad, good, evidence.trusted)


def _network_faults(evidence: CheckEvidence, reach: Standing) -> list[CheckFinding]:
    found = []
    for node in sorted(reach.guilty):
        failed = [t for t in evidence.trials if t.failed and node in t.nodes]
        partners = ", ".join(str(t.partner(node)) for t in failed)
        message = f"it does not reach nodes {partners} ({failed[-1].failed})"
        found.append(CheckFinding(FindingKind.FAULT, (node,), Component.NETWORK, message))
    for link in reach.links:
        why = next(t.failed for t in evidence.trials if t.failed and set(t.nodes) == set(link))
        message = f"nodes {link[0]} and {link[1]} reach others, but not each other ({why})"
        found.append(CheckFinding(FindingKind.LINK, link, Component.NETWORK, message))
    return found


def _doubts(evidence: CheckEvidence, faulty: set[int], reach: Standing) -> list[CheckFinding]:
    """Return findings on nodes that the network trials do not show to be sound or at fault."""
    found = []
    known = faulty | reach.guilty
    open_ = reach.doubtful | reach.sound
    unexplained = [
        t
        for t in evidence.trials
        if t.failed and open_.issuperset(t.nodes) and not reach.sound.issuperset(t.nodes)
    ]
    suspects = {node for t in unexplained for node in t.nodes} & reach.doubtful
    if suspects:
        nodes = tuple(sorted(suspects))
        who = f"nodes {', '.join(map(str, nodes))}" if len(nodes) > 1 else f"node {nodes[0]}"
        message = (
            f"undetermined: any of {who} or their links may be at fault ({unexplained[-1].failed})"
        )
        found.append(CheckFinding(FindingKind.UNDETERMINED, nodes, Component.NETWORK, message))
    judged = suspects | known | reach.sound
    for node in evidence.nodes if len(evidence.nodes) > 1 else ():
        if node not in judged:
            message = "it met no node that is known to be sound"
            found.append(CheckFinding(FindingKind.UNTESTED, (node,), Component.NETWORK, message))
    return found


# ---- speed


def _slow_parts(
    evidence: CheckEvidence, faulty: Collection[int], ratio: float
) -> list[CheckFinding]:
    found = []
    for (component, name), slowness in _figures(evidence, faulty).items():
        median, least = statistics.median_low(slowness.values()), min(slowness.values())
        slow = {node: s / median for node, s in slowness.items() if s > ratio * median}
        fast = sum(s <= ratio * least for s in slowness.values())
        part = f"{name}: " if name else ""
        if not slow and 2 * fast < len(slowness):
            nodes = tuple(n for n, s in slowness.items() if s > ratio * least)
            message = f"{part}most nodes are much slower than the fastest"
            found.append(CheckFinding(FindingKind.NOTE, nodes, component, message))
        found += [
            CheckFinding(
                FindingKind.SLOW, (node,), component, f"{part}{times:.1f} times the median"
            )
            for node, times in slow.items()
        ]
    return found


def _figures(
    evidence: CheckEvidence, faulty: Collection[int]
) -> dict[tuple[Component, str], dict[int, float]]:
    """Return the slowness of each node's slowest part, by kind of part."""
    figures: dict[tuple[Component, str], dict[int, float]] = {}
    for node in evidence.nodes:
        for result in evidence.local.get(node, ()) if node not in faulty else ():
            if result.component in JUDGED_BY_SPEED and result.slowness:
                kind = result.component, result.name.partition(":")[0]
                of_kind = figures.setdefault(kind, {})
                of_kind[node] = max(of_kind.get(node, 0.0), result.slowness)
    return figures


def _speed(evidence: CheckEvidence, ratio: float) -> Standing:
    """Evaluate the times of the trials that passed."""
    timed = {t.nodes: t.slowness for t in evidence.trials if t.slowness and not t.failed}
    if not timed:
        return standing((), ())
    limit = ratio * _usual(list(timed.values()), ratio)
    slow = [pair for pair, time in timed.items() if time > limit]
    return standing(slow, timed.keys() - set(slow))


def _usual(times: Sequence[float], ratio: float) -> float:
    """Return the median time; if most pairs have a slow node, the median of the fast pairs."""
    median = statistics.median_low(times)
    fastest = min(times)
    if median <= ratio * fastest:
        return median
    return statistics.median_low([time for time in times if time <= ratio * fastest])


def _slow_network(
    evidence: CheckEvidence, faulty: Collection[int], reach: Standing, speed: Standing
) -> list[CheckFinding]:
    active = [node for node in evidence.nodes if node not in faulty]
    component = Component.NETWORK
    found = []
    slow = sorted(speed.guilty & set(active))
    if 2 * len(slow) < len(active):
        found += [
            CheckFinding(FindingKind.SLOW, (n,), component, _times(evidence, n)) for n in slow
        ]
    elif slow:
        message = "half of the nodes or more are slow"
        found.append(CheckFinding(FindingKind.NOTE, tuple(slow), component, message))
    doubtful = tuple(sorted(speed.doubtful & set(active)))
    if doubtful:
        message = "pairs with them are slow; any of them may be at fault"
        found.append(CheckFinding(FindingKind.NOTE, doubtful, component, message))
    few = len(reach.sound) < 2 or bool(evidence.trusted)
    comparable = few or _closing(active, evidence.trials)[1]
    if not (slow or doubtful or comparable):
        message = "too few pairs passed to compare their times"
        found.append(CheckFinding(FindingKind.NOTE, tuple(active), component, message))
    for link in speed.links:
        message = f"nodes {link[0]} and {link[1]} are slow only with each other"
        found.append(CheckFinding(FindingKind.NOTE, link, component, message))
    return found


def _times(evidence: CheckEvidence, node: int) -> str:
    own = min(t.slowness for t in evidence.trials if node in t.nodes and t.slowness)
    rest = [t.slowness for t in evidence.trials if node not in t.nodes and t.slowness]
    return (
        f"{own / statistics.median_low(rest):.1f} times the median of the other pairs"
        if rest
        else ""
    )


# ---- who meets whom


def first_pairs(nodes: Sequence[int], helpers: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Pair neighbours; an odd node is alone and meets others in later rounds.

    ``helpers`` are nodes of an earlier check; while there are some, each node meets one.
    """
    helped = min(len(nodes), len(helpers))
    pairs: list[tuple[int, ...]] = list(zip(helpers, nodes[:helped], strict=False))
    rest = nodes[helped:]
    return pairs + [tuple(rest[i : i + 2]) for i in range(0, len(rest), 2)]


def next_pairs(evidence: CheckEvidence, ratio: float) -> list[tuple[int, ...]]:
    """Return the pairs of the next round; empty if further trials would add nothing."""
    faulty = {node for finding in _broken_parts(evidence) for node in finding.nodes}
    reach, speed = _reach(evidence, faulty), _speed(evidence, ratio)
    out, slow = faulty | reach.guilty, speed.doubtful | speed.guilty
    active = [n for n in evidence.nodes if n not in out]
    if len(active) < 2:
        return []
    met = {frozenset(trial.nodes) for trial in evidence.trials}
    times = _best_times(evidence)
    sure = [n for n in active if n in reach.sound and n not in slow]
    sure.sort(key=lambda n: times.get(n, 0.0))
    open_ = [n for n in active if n not in reach.sound or n in speed.doubtful]
    open_.sort(key=lambda n: -times.get(n, float("inf")))
    pairs = _match(open_, sure, met)
    if not (open_ or evidence.trusted or slow):
        pairs, _ = _closing(active, evidence.trials)
        pairs = [pair for pair in pairs if frozenset(pair) not in met]
    return pairs


def _match(
    open_: Sequence[int], sure: Sequence[int], met: set[frozenset[int]]
) -> list[tuple[int, ...]]:
    """Pair each doubtful node with a sound one that it has not met, else with another doubtful one."""
    pairs: list[tuple[int, ...]] = []
    free, late = list(sure), []
    for node in open_:
        partner = _unmet(node, free, met)
        if partner is None:
            late.append(node)
            continue
        free.remove(partner)
        pairs.append((partner, node))
    while late:
        node = late.pop(0)
        partner = _unmet(node, late, met)
        if partner is not None:
            late.remove(partner)
            pairs.append((node, partner))
    return pairs


def _unmet(node: int, others: Sequence[int], met: set[frozenset[int]]) -> int | None:
    return next((other for other in others if frozenset((node, other)) not in met), None)


def _closing(active: Sequence[int], trials: Sequence[Trial]) -> tuple[list[tuple[int, ...]], bool]:
    """Return pairs without which slow nodes may stay unnoticed, and whether the trials suffice.

    A few slow nodes could be in every pair. Disjoint pairs of all nodes rule that out: with fewer slow nodes
    than pairs, one pair has none. An odd node has to meet both nodes of one pair.
    """
    present = set(active)
    passed = [t.nodes for t in trials if not t.failed and present.issuperset(t.nodes)]
    partner = max(_disjoint(passed), _disjoint(passed[::-1]), key=len)
    loose = [node for node in active if node not in partner]
    pairs: list[tuple[int, ...]] = [(loose[i], loose[i + 1]) for i in range(0, len(loose) - 1, 2)]
    if len(loose) % 2 == 0:
        return pairs, not pairs
    odd = loose[-1]
    met = [node for node in partner if (odd, node) in passed or (node, odd) in passed]
    if any(partner[node] in met for node in met):
        return pairs, not pairs
    wanted = [partner[node] for node in met] or list(partner)
    return [*pairs, *((node, odd) for node in wanted[:1])], len(active) < 2


def _disjoint(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Choose pairs that share no node; return each node's partner."""
    partner: dict[int, int] = {}
    for first, second in pairs:
        if first not in partner and second not in partner:
            partner[first], partner[second] = second, first
    return partner


def _best_times(evidence: CheckEvidence) -> dict[int, float]:
    best: dict[int, float] = {}
    for trial in evidence.trials:
        for node in trial.nodes if trial.slowness else ():
            best[node] = min(trial.slowness, best.get(node, trial.slowness))
    return best
